"""How near healthy arithmetic comes to the limits that are guards and not derived: largest statistic / limit seen.

    python benchmarks/healthy_limits.py

Tiny models of five architectures in three dtypes, four seeds each: their relations with weights read, and their audit.
Above 1 would be a false alarm. Printed by test (the audit's) or by level and law (those of relations): the largest
ratio, and over how many tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from noisescope.localization import audit_log
from noisescope.localization.audit import audit
from noisescope.localization.inputs import Batch, parts_of
from noisescope.localization.judge import Judgement, judge
from noisescope.localization.laws.law_log import MODEL, OPERATOR, SUBLAYER
from noisescope.localization.relations import Search
from noisescope.model.forwards import evaluating
from noisescope.testing import tiny_inputs, tiny_model

MODELS = ("llama", "gpt2", "qwen3", "gemma2", "mixtral")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = range(4)
LEVELS = {OPERATOR: "operator", SUBLAYER: "sub-layer", MODEL: "model"}
Ratio = tuple[str, float]  # what was tested, statistic / limit


def of_relations(model: torch.nn.Module, batch: Batch) -> Iterator[Ratio]:
    model, _, anatomy = parts_of(model)
    with evaluating(model), torch.no_grad():
        search = Search(model, anatomy, batch, weights=True, places=None)
        search.verdict(())
    for entry in search.log.sites.values():
        for law, result in entry.results.items():
            yield f"{LEVELS[entry.level]} {law}", result.strength


def of_audit(model: torch.nn.Module, batch: Batch, seed: int) -> Iterator[Ratio]:
    judged: list[Judgement] = []

    def record(*args: Any, **kwargs: Any) -> Judgement:
        judged.append(judge(*args, **kwargs))
        return judged[-1]

    with mock.patch.object(audit_log, "judge", record):
        audit(model, batch, seed=seed)
    for judgement in judged:
        yield from ((f"audit {test}", strength) for test, strength in judgement.strengths.items())


def main() -> None:
    torch.set_num_threads(1)
    seen: dict[str, list[float]] = {}
    for name, dtype, seed in itertools.product(MODELS, DTYPES, SEEDS):
        model, batch = tiny_model(name, seed=seed).to(dtype), tiny_inputs(name, length=24, seed=seed)
        for what, ratio in (*of_relations(model, batch), *of_audit(model, batch, seed)):
            seen.setdefault(what, []).append(ratio)
    for what, ratios in sorted(seen.items()):
        print(f"{what:20} {max(ratios):8.3f} of the limit at most, {len(ratios):6} looks")


if __name__ == "__main__":
    main()
