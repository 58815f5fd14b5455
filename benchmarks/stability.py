"""How often a diagnosis says the same thing again: other samples, other noise seeds, the same model.

    python benchmarks/stability.py --repeats 10 --samples 50 --json benchmarks/results/stability_demo.json
    python benchmarks/stability.py --model SMOLLM2 --data gsm8k_test.jsonl --repeats 5 --samples 32 --device cuda \
        --json benchmarks/results/stability_smollm2.json

Each repeat has samples that no other repeat has, and seeds of its own. Agreement is counted over all pairs of repeats:

    first place      the first findings of both are about the same layer or place ("layer 0" and "layer 0, matmul" are)
    top finding      both name the same place or operator first, in the same words
    top three        how much the sets of the first three share (intersection over union)
    bands            rows of windows and operators whose bands overlap: two intervals that do not contradict each other
    bands by points  rows that get the same band by the point value, as the original method notes have it
    avalanche        windows that both call an avalanche point, or both do not; by intervals and by points

A pair contradicts itself where the band ranges of a row have nothing in common.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import noisescope as ns
from noisescope import demo
from noisescope.data.dataset import DataSet, gather
from noisescope.diagnosis.report import Diagnosis
from noisescope.findings import BANDS
from noisescope.sites import Place

FIRST = 3


@dataclass(frozen=True)
class Said:
    """What one repeat says, as far as it is compared."""

    top: tuple[str, ...]
    first: frozenset[Place]
    bands: dict[str, tuple[str, tuple[str, str]]]  # row -> (kind of bands, both ends)
    point_bands: dict[str, str]
    avalanches: frozenset[str]
    point_avalanches: frozenset[str]
    windows: tuple[str, ...]
    risk: str


def said(found: Diagnosis) -> Said:
    layers = found.layer_analysis
    assert layers is not None
    rows = [("window", row.layer_range, row) for row in layers.windows]
    rows += [("degradation", f"operator {name}", row) for name, row in (found.operator_analysis or {}).items()]
    rows = [row for row in rows if row[2].injected and row[2].point_rule is not None]
    return Said(
        tuple(finding.component for finding in found.findings[:FIRST]),
        frozenset(found.findings[0].target.places) if found.findings else frozenset(),
        {name: (kind, (row.band, row.band_upper)) for kind, name, row in rows},
        {name: row.point_rule.degradation_band for _, name, row in rows if row.point_rule is not None},
        frozenset(point.layer_range for point in layers.avalanche_points if point.decided),
        frozenset(f"L{point.start}-{point.end}" for point in layers.point_rule_avalanches),
        tuple(row.layer_range for row in layers.windows),
        found.executive_summary.overall_risk_level,
    )


def overlap(kind: str, one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two ranges of bands have a band in common."""
    names = BANDS[kind].names
    if not set(one) | set(other) <= set(names):
        return one == other
    (a, b), (c, d) = (tuple(map(names.index, ends)) for ends in (one, other))
    return a <= d and c <= b


def agreement(repeats: Sequence[Said]) -> dict[str, float]:
    pairs = list(itertools.combinations(repeats, 2))

    def mean(share: Callable[[Said, Said], float]) -> float:
        return sum(share(a, b) for a, b in pairs) / len(pairs)

    def rows(a: Said, b: Said) -> list[str]:
        return [name for name in a.bands if name in b.bands]

    def share_of(names: Sequence[str], same: Callable[[str], bool]) -> float:
        return sum(map(same, names)) / len(names) if names else 1.0

    return {
        "first place": mean(lambda a, b: bool(a.first & b.first)),
        "top finding": mean(lambda a, b: a.top[:1] == b.top[:1]),
        "top three": mean(lambda a, b: len(set(a.top) & set(b.top)) / max(len(set(a.top) | set(b.top)), 1)),
        "bands": mean(
            lambda a, b: share_of(
                rows(a, b), lambda name: overlap(a.bands[name][0], a.bands[name][1], b.bands[name][1])
            )
        ),
        "bands by points": mean(
            lambda a, b: share_of(rows(a, b), lambda name: a.point_bands[name] == b.point_bands[name])
        ),
        "avalanche": mean(
            lambda a, b: share_of(a.windows, lambda name: (name in a.avalanches) == (name in b.avalanches))
        ),
        "avalanche by points": mean(
            lambda a, b: share_of(a.windows, lambda name: (name in a.point_avalanches) == (name in b.point_avalanches))
        ),
        "risk": mean(lambda a, b: a.risk == b.risk),
    }


def pieces(data: DataSet, repeats: int, samples: int) -> list[DataSet]:
    if len(data.items) < repeats * samples:
        raise SystemExit(f"{repeats} repeats of {samples} samples need {repeats * samples}, got {len(data.items)}")
    return [gather(data.items[at * samples : (at + 1) * samples], f"{data.source}, part {at}") for at in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, default=demo.test_file())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--effort", default="standard")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--metric", default="accuracy")
    parser.add_argument("--calibration-samples", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subject = ns.load(options.model, device=options.device, dtype=options.dtype)
    parts = pieces(ns.read_data(options.data), options.repeats, options.samples)
    repeats, started = [], time.perf_counter()
    for number, part in enumerate(parts):
        report = ns.diagnose(
            subject,
            part,
            calibration=part,
            calibration_samples=options.calibration_samples,
            samples=options.samples,
            seeds=[options.seeds * number + k for k in range(options.seeds)],
            effort=options.effort,
            metric=options.metric,
        )
        assert isinstance(report.value, Diagnosis)
        repeats.append(said(report.value))
        print(f"{number}: {', '.join(repeats[-1].top)}; risk {repeats[-1].risk}", flush=True)
    cuda = torch.cuda.is_available() and next(subject.model.parameters()).is_cuda
    machine = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    found = agreement(repeats)
    for name, share in found.items():
        print(f"| {name} | {100 * share:.1f} % |")
    if options.json is not None:
        result = {
            "machine": machine,
            "model": Path(options.model).name,
            "repeats": options.repeats,
            "samples": options.samples,
            "seeds": options.seeds,
            "effort": options.effort,
            "metric": options.metric,
            "seconds": time.perf_counter() - started,
            "agreement": found,
            "first": Counter(one.top[0] for one in repeats if one.top).most_common(),
            "top": [one.top for one in repeats],
            "avalanches": [sorted(one.avalanches) for one in repeats],
            "avalanches_by_points": [sorted(one.point_avalanches) for one in repeats],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
