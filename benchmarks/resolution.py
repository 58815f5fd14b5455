"""How small an error the audit judges, by class and dtype, and how far healthy calls are from the limits it uses.

    python benchmarks/resolution.py --half tune --seconds 300 --json benchmarks/results/resolution.json

Healthy models of field_zoo.py are audited, and their resolution tables put together. Beside that, each class whose code
holds inexact functions is taken as a healthy device: its code is run with random rounding of its own (other seeds than
the limits come from), and the largest error over its limit is kept for each such call. The stated false-alarm rate is
that of 7 standard deviations, 2.6e-12 an element.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from field_cases import PLAIN
from field_own import OwnModel
from field_visibility import tokens
from field_zoo import HealthyModel, healthy_models
from torch import Tensor, nn

import noisescope as ns
from noisescope.localization import audit as audit_module
from noisescope.localization.call_tree import Node
from noisescope.localization.host_copies import host_copy, is_state, leaves_in, own_state, set_state, tensors_in
from noisescope.localization.host_twin import HostTwin
from noisescope.localization.resolution import Resolution, percent_of
from noisescope.localization.twin_comparison import Comparison

_CALLS, _RUNS = 10, 50  # of one class in one model, and healthy runs of each
_STATED = 2.6e-12  # two-sided tail of 7 standard deviations

Key = tuple[str, str]
_ratios: dict[Key, list[float]] = {}  # class and dtype -> the largest error over its limit, by call


class MeasuringTwin(HostTwin):
    """A host twin that also runs what it compares as a healthy device would."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._measured: Counter[Key] = Counter()

    def compare(self, node: Node) -> Comparison:
        twin = self._modules[node.module]
        before = own_state(twin)
        result = super().compare(node)
        given = (node.args, node.kwargs)
        caches = [leaf for _, leaf in leaves_in(given) if is_state(leaf) and not isinstance(leaf, Tensor)]
        if result.exact or result.problem or caches:  # a call has changed its cache
            return result
        outputs = {(-1, path): x for path, x in tensors_in(node.output) if x.is_floating_point() and x.numel()}
        if outputs:
            key = type(node.callee).__name__, str(next(iter(outputs.values())).dtype).removeprefix("torch.")
            if self._measured[key] < _CALLS:
                self._measured[key] += 1
                after = own_state(twin)
                _ratios.setdefault(key, []).extend(self._healthy(twin, node, (given, before), outputs))
                set_state(twin, after)
        return result

    def _healthy(
        self, twin: nn.Module, node: Node, before: tuple[Any, Any], outputs: dict[tuple[int, str], Tensor]
    ) -> list[float]:
        limits = self._limits(twin, node, before, {key: (y, y) for key, y in outputs.items()})
        found = []
        for number in range(_RUNS):
            set_state(twin, before[1])
            generator = torch.Generator("cpu").manual_seed(10_000 + number)
            seen = self._run(twin, node, host_copy(before[0]), generator=generator).seen
            there = [key for key, y in outputs.items() if key in seen and seen[key].shape == y.shape]
            same = [(seen[key], outputs[key], limits[key]) for key in there]
            found += [max(_largest(*each) for each in same)] if same else []
        return found


def _largest(got: Tensor, expected: Tensor, limit: Tensor) -> float:
    return float(((got.double() - expected.double()).abs() / limit.clamp_min(1e-300)).nan_to_num(0.0).max())


def rows_of(cell: HealthyModel) -> tuple[str, tuple[Resolution, ...]]:
    model = cell.build()
    own = any(isinstance(part, OwnModel) for part in model.modules())
    inputs = {"input_ids": tokens(PLAIN, 0)} if own else None
    with cell.scope(model) if cell.scope is not None else contextlib.nullcontext():
        verdict = ns.locate(ns.wrap(model, None), method="audit", inputs=inputs, state=False)
    return verdict.verdict, verdict.coverage.resolution


def together(rows: list[Resolution]) -> list[dict[str, Any]]:
    """One row for each class and dtype, the coarsest first."""
    by_class: dict[Key, list[Resolution]] = {}
    for row in rows:
        by_class.setdefault((row.name, row.dtype), []).append(row)
    found = []
    for (name, dtype), those in by_class.items():
        driven = [row.driven for row in those if row.driven is not None]
        found.append(
            {
                "class": name,
                "dtype": dtype,
                "models": len(those),
                "calls": sum(row.calls for row in those),
                "smallest": min(row.smallest for row in those),
                "largest": max(row.largest for row in those),
                "driven": max(driven) if driven else None,
                "not_judged": sum(row.not_judged for row in those),
            }
        )
    return sorted(found, key=lambda row: -row["largest"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tune", "held-out", "all"), default="tune")
    parser.add_argument("--seconds", type=float, default=600.0, help="of processor time")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    audit_module.HostTwin = MeasuringTwin  # type: ignore[misc]
    start, rows, verdicts = time.process_time(), list[Resolution](), Counter[str]()
    for cell in healthy_models():
        if options.half not in (cell.half, "all") or options.only not in cell.name:
            continue
        if time.process_time() - start > options.seconds:
            break
        try:
            verdict, found = rows_of(cell)
        except ImportError:
            continue
        verdicts[verdict] += 1
        rows += found
    table = together(rows)
    calls = [ratio for ratios in _ratios.values() for ratio in ratios]
    print(f"{sum(verdicts.values())} healthy models ({options.half} half): {dict(verdicts)}")
    for row in table:
        inside = "" if row["driven"] is None else f", inside {percent_of(row['driven'])}"
        ends = f"{percent_of(row['smallest'])} to {percent_of(row['largest'])}"
        print(f"{row['class']} {row['dtype']}: {ends}{inside} ({row['calls']} calls, {row['not_judged']} not judged)")
    beyond = sum(ratio > 1 for ratio in calls)
    most = max(calls, default=0.0)
    print(f"{len(calls)} healthy calls of {len(_ratios)} classes: at most {most:.3f} of the limit, {beyond} beyond")
    if options.json:
        maxima = {
            " ".join(key): {"calls": len(found), "largest": max(found)} for key, found in _ratios.items() if found
        }
        head = {"half": options.half, "torch": torch.__version__, "verdicts": dict(verdicts), "stated_rate": _STATED}
        healthy = {"calls": len(calls), "largest": most, "beyond": beyond, "by_class": maxima}
        options.json.write_text(json.dumps({**head, "table": table, "healthy": healthy}, indent=1) + "\n")


if __name__ == "__main__":
    main()
