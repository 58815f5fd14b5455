"""Records of the bundled model on two devices, compared: healthy, and with a fault simulated on one side.

    python benchmarks/devices.py record gpu --device cuda          # on one machine: healthy and faulty records
    python benchmarks/devices.py record cpu --healthy              # on the other
    python benchmarks/devices.py compare cpu gpu --json results/devices.json

The same prompts on both (32 test problems of the bundled model), sketches of every operator. A fault counts as named
where the first site to part is its block and operator (a fault inside attention: its attention).
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import noisescope as ns

DTYPES = ("float32", "bfloat16")
FAULTS = {  # text -> block, operator
    "gain:0.05@9/linear/up_proj": (9, "linear"),
    "gain:0.01@2/linear/q_proj": (2, "linear"),
    "dead_lane@4/linear/o_proj": (4, "linear"),
    "bias:0.05@6": (6, "residual"),
    "stuck_bit:bit=12@11/softmax": (11, "attention"),
    "truncation:4@13/linear/down_proj": (13, "linear"),
}


def record(folder: Path, device: str, *, healthy: bool) -> None:
    for dtype in DTYPES:
        subject = ns.load("demo", device=device, dtype=dtype)
        ns.record(subject, output=folder / f"{dtype}.healthy")
        for number, fault in enumerate(() if healthy else FAULTS):
            with ns.faulty(subject.model, fault, anatomy=subject.anatomy):
                ns.record(subject, output=folder / f"{dtype}.fault{number}")


def compare(a: Path, b: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"healthy": {}, "faults": []}
    for dtype in DTYPES:
        found = ns.compare(a / f"{dtype}.healthy", b / f"{dtype}.healthy")
        worst = max(row.relative_l2 or 0.0 for row in found.sites)
        kl = None if found.logits is None else found.logits.kl
        results["healthy"][dtype] = {"verdict": found.verdict, "worst_relative_l2": worst, "kl": kl}
        results["devices"] = {"a": found.sides.a.device, "b": found.sides.b.device}
        for number, (fault, (place, operator)) in enumerate(FAULTS.items()):
            said = ns.compare(a / f"{dtype}.healthy", b / f"{dtype}.fault{number}")
            first = None if said.first is None else (said.first.site.place, said.first.site.operator)
            row = {"dtype": dtype, "fault": fault, "verdict": said.verdict, "first": first}
            results["faults"].append({**row, "named": first == (place, operator)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    recording = tasks.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--device", default="cpu")
    recording.add_argument("--healthy", action="store_true", help="no faulty records")
    comparing = tasks.add_parser("compare")
    comparing.add_argument("a", type=Path, help="the healthy side")
    comparing.add_argument("b", type=Path)
    comparing.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.task == "record":
        record(options.folder, options.device, healthy=options.healthy)
        return
    results = compare(options.a, options.b)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
