"""Whether the order of a report's findings holds: noise injected again, with other seeds, on other samples.

    python benchmarks/confirm.py --model SMOLLM2 --data gsm8k_test.jsonl --samples 32 --device cuda --output OUT \
        --json benchmarks/results/confirm_smollm2.json

A report is made of the first samples (effort standard). Then noise is injected into every layer, every place outside
the layers and every operator of every layer, with other seeds on the samples behind those, and the typical KL there
ranks the same places anew. Printed are the report's findings about places with both numbers and both ranks, the places
of its migration plan in their order, and Spearman's correlation over all places.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import noisescope as ns
from noisescope import demo, stats
from noisescope.data.dataset import gather
from noisescope.diagnosis.report import Diagnosis
from noisescope.jsonform import to_json

SWEPT = (100, 101, 102)  # seeds of the sweep; those of the report are 0, 1, 2


def nats_by_place(found: Diagnosis) -> dict[str, float]:
    """What noise does in each layer and each place outside the layers."""
    section = found.layer_analysis
    assert section is not None
    return {f"layer {row.layer}": row.nats for row in section.layers} | {
        name: row.nats for name, row in section.places.items()
    }


def nats_by_cell(found: Diagnosis) -> dict[str, float]:
    section = found.layer_analysis
    assert section is not None
    return {f"layer {row.layer}, {row.operator}": row.nats for row in section.map}


def rank(values: dict[str, float], name: str) -> int:
    return 1 + sum(value > values[name] for value in values.values())


def rows(report: Diagnosis, sweep: Diagnosis, most: int = 10) -> list[dict[str, Any]]:
    """The findings about places, with what the sweep says of the same places."""
    found = []
    for finding in report.findings:
        cells = finding.target.kind == "cell"
        before, now = (
            (nats_by_cell if cells else nats_by_place)(report),
            (nats_by_cell if cells else nats_by_place)(sweep),
        )
        if finding.component in now:
            found.append(
                {
                    "finding": finding.component,
                    "severity": finding.severity,
                    "among": "cells" if cells else "places",
                    "nats": before[finding.component],
                    "nats_again": now[finding.component],
                    "rank": rank(before, finding.component),
                    "rank_again": rank(now, finding.component),
                }
            )
    return found[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, default=demo.test_file())
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--output", type=Path, help="folder for the report")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subject = ns.load(options.model, device=options.device, dtype=options.dtype)
    items = ns.read_data(options.data).items
    first, second = (
        gather(items[at * options.samples : (at + 1) * options.samples], f"{options.data.name}, part {at}")
        for at in (0, 1)
    )
    started = time.perf_counter()
    report = ns.diagnose(subject, first, calibration=first, samples=options.samples, output=options.output)
    if options.output is not None:
        report.save(options.output, formats=("json", "md", "html"))
    again = ns.diagnose(
        subject,
        second,
        level="layer",
        effort="full",
        window=1,
        calibration_samples=0,
        samples=options.samples,
        seeds=SWEPT,
    )
    diagnosis, sweep = report.diagnosis, again.diagnosis
    table = rows(diagnosis, sweep)
    print("| finding | severity | nats per token | again | rank | rank again |\n|---|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row['finding']} | {row['severity']} | {row['nats']:.3g} | {row['nats_again']:.3g} | "
            f"{row['rank']} of {row['among']} | {row['rank_again']} |"
        )
    plan = diagnosis.migration_plan
    assert plan is not None
    order = [str(entry.place) for priority in plan.priorities[:2] for entry in priority.evidence]
    print(f"migration plan, priorities 1 and 2: {', '.join(order)}")
    before, now = nats_by_place(diagnosis), nats_by_place(sweep)
    agreement = stats.correlation(list(before.values()), [now[name] for name in before])
    print(f"Spearman over {agreement.n} places: {agreement.value:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]")
    print(report.to_markdown()[:3000])
    if options.json is not None:
        cuda = options.device.startswith("cuda")
        result = {
            "machine": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
            "model": Path(options.model).name,
            "samples": options.samples,
            "seconds": time.perf_counter() - started,
            "findings": table,
            "top_findings": [to_json(finding) for finding in diagnosis.executive_summary.top_findings],
            "migration_plan": order,
            "spearman": to_json(agreement),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
