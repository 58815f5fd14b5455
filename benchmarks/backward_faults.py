"""Gradient faults, planted in tiny models and the demo model, and healthy steps: what `locate --backward` says of them.

    python benchmarks/backward_faults.py                 # the faults that the code was developed on
    python benchmarks/backward_faults.py --held-out      # the others
    python benchmarks/backward_faults.py --healthy 50    # steps without a fault

A fault is a custom autograd function in a patched forward, a hook, a detached tensor or a patched function of
transformers; forwards stay right. It counts as named where the verdict is faulty and the first suspect is the backward
of the module that the fault is in (of a hook between two modules, either of them) and the right gradient of it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from backward_fault_list import FAULTS
from backward_plants import GradientFault
from torch import nn

import noisescope as ns
from noisescope.localization.backward import audit_backward
from noisescope.localization.backward_verdict import with_backward
from noisescope.localization.verdict import Verdict
from noisescope.testing import tiny_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEALTHY = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "falcon", "phi3", "bert", "mixtral", "t5", "bloom")


def model_of(name: str, dtype: str, seed: int = 0) -> nn.Module:
    """A tiny architecture ("llama", "llama/eager") or the demo model."""
    architecture, _, attention = name.partition("/")
    if architecture == "demo":
        return ns.load("demo", dtype=dtype).model
    given: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    return tiny_model(architecture, layers=3, seed=seed, biases=0.1, **given).to(_DTYPES[dtype])


def verdict_on(model: nn.Module, seed: int = 0) -> Verdict:
    """The backward alone: forwards of these models are right."""
    return with_backward(Verdict("healthy", "none"), audit_backward(model, seed=seed))


def is_named(fault: GradientFault, verdict: Verdict) -> bool:
    if verdict.verdict != "faulty" or not verdict.suspects:
        return False
    site = verdict.suspects[0].site
    return (
        site.phase == "backward" and site.module in fault.modules and (not fault.tensor or site.tensor in fault.tensor)
    )


def run(faults: list[GradientFault]) -> None:
    named = 0
    for number, fault in enumerate(faults, 1):
        model = model_of(fault.model, fault.dtype)
        with contextlib.ExitStack() as stack:
            fault.plant(model, stack)
            verdict = verdict_on(model)
        found = is_named(fault, verdict)
        named += found
        first = verdict.suspects[0] if verdict.suspects else None
        said = "healthy" if first is None else f"{first.site}, {first.fault_class} ({len(verdict.suspects)} suspects)"
        print(f"{number:2} {'named' if found else 'NOT  '} {fault.model} {fault.dtype}: {fault.name} -> {said}")
    print(f"{named} of {len(faults)} named at rank 1")


def healthy(steps: int) -> None:
    alarms = modules = 0
    for model, dtype, seed in itertools.islice(_healthy(), steps):
        verdict = verdict_on(model_of(model, dtype, seed), seed)
        alarms += bool(verdict.suspects)
        covered = verdict.coverage.backward
        modules += covered is not None and covered.modules.share == 1 == covered.parameters.share
        for suspect in verdict.suspects:
            print(f"ALARM {model} {dtype} seed {seed}: {suspect.site}: {suspect.evidence}")
    print(f"{alarms} alarms in {steps} healthy steps; every module and parameter judged in {modules}")


def _healthy() -> Iterator[tuple[str, str, int]]:
    yield from (("demo", dtype, 0) for dtype in ("float32", "bfloat16"))
    for seed in itertools.count():
        for name in HEALTHY:
            eager = name in ("llama", "gpt2", "opt", "phi3") and seed % 2
            for dtype in ("float32", "bfloat16"):
                yield f"{name}/eager" if eager else name, dtype, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--healthy", type=int, default=0, metavar="STEPS")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    if given.healthy:
        healthy(given.healthy)
    else:
        chosen = [fault for fault in FAULTS if fault.held_out == given.held_out]
        run([fault for fault in chosen if given.only in fault.name])
    print(f"{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
