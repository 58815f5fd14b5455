"""Which faults `relations` finds, with and without weights, and whether it leaves healthy models alone.

    python benchmarks/relations.py --json results/relations_cpu.json
    python benchmarks/relations.py --model SMOLLM2_FOLDER --block 12 --parts linear,sublayers,healthy \\
        --json results/relations_cpu.json

linear      twenty faults of one linear (down_proj of --block), by laws alone and with weights read
sublayers   fifteen faults of that block's attention, activation and norms, and of the rotary angles
healthy     the model as it is, in three dtypes; any suspect is a false alarm
tiny        tiny models of every architecture in three dtypes, fused and eager attention, with and without weights
cost        forward-equivalents of `auto` on a healthy model of 28 layers

A fault counts as found where the first suspect is its own module and operator; `class` is the kind of fault named for
it. A fault that changed no element is an error of this script. Each part is written to the JSON file when it is done;
what other runs left there stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from relations_faults import linear_faults, sublayer_faults

import noisescope as ns
from noisescope.faults import faulty
from noisescope.faults.fault import Fault
from noisescope.localization.relations import relations
from noisescope.localization.verdict import Verdict
from noisescope.model.loading import Subject
from noisescope.testing import MODELS, tiny_inputs, tiny_model

DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("linear", "sublayers", "healthy", "tiny", "cost")
TARGETS = {  # part -> at least so many found (linear, sublayers), at most so many false alarms
    "linear, without weights": 16,
    "linear, with weights": 20,
    "sublayers, float32": 13,
    "healthy": 0,
}
Row = dict[str, Any]


def linear_rows(subject: Subject, block: int, *, weights: bool, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """One row a fault of the block's down_proj; `names` chooses some."""
    module = f"{subject.anatomy.blocks[block]}.mlp.down_proj"
    weight: torch.Tensor = subject.model.get_parameter(f"{module}.weight")
    for name, fault in linear_faults(weight.dtype, weight.shape[0]).items():
        if not names or name in names:
            where = {"site": block, "operator": "linear", "module": module}
            yield _row(subject, name, fault, where, weights=weights, places=[block])


def sublayer_rows(subject: Subject, block: int) -> Iterator[Row]:
    for name, (fault, where) in sublayer_faults(block).items():
        yield _row(subject, name, fault, where, weights=False, places=[block, "rotary"])


def _row(subject: Subject, name: str, fault: Fault, where: Row, *, weights: bool, places: list[Any]) -> Row:
    with faulty(subject.model, fault, **where) as scope:
        verdict = relations(subject, weights=weights, places=places)
    assert scope.changed, f"{name} changed nothing"
    first = verdict.suspects[0] if verdict.suspects else None
    found = first is not None and (first.site.place, first.site.operator) == (where["site"], where["operator"])
    if first is not None and "module" in where:
        found = found and first.site.module == where["module"]
    return {
        "fault": name,
        "found": found,
        "class": None if first is None else first.fault_class,
        "right": found and first is not None and first.fault_class == fault.fault_class,
        "broken": [] if first is None else list(first.details["broken"]),
        "suspects": len(verdict.suspects),
        "changed": scope.changed,
    }


def _counted(rows: list[Row], target: int | None) -> Row:
    found = sum(row["found"] for row in rows)
    return {
        "found": found,
        "of": len(rows),
        "class_right": sum(row["right"] for row in rows),
        "target": target,
        "met": None if target is None else found >= target,
        "missed": [row["fault"] for row in rows if not row["found"]],
        "class_wrong": {row["fault"]: row["class"] for row in rows if row["found"] and not row["right"]},
        "rows": rows,
    }


# -- healthy models


def _alarms(verdicts: Iterator[tuple[str, Verdict]]) -> Row:
    runs, alarms, undecided, forwards = 0, [], [], []
    for label, verdict in verdicts:
        runs += 1
        forwards.append(verdict.forwards)
        if verdict.verdict == "faulty":
            alarms.append({"run": label, "evidence": [suspect.evidence for suspect in verdict.suspects]})
        elif verdict.verdict == "undecided":
            undecided.append({"run": label, "unseen": [str(site) for site in verdict.unseen]})
    return {
        "false_alarms": len(alarms),
        "of": runs,
        "target": TARGETS["healthy"],
        "met": not alarms,
        "undecided": undecided,
        "alarms": alarms,
        "forwards": [round(min(forwards), 2), round(max(forwards), 2)],
    }


def healthy_runs(source: str, seeds: int) -> Iterator[tuple[str, Verdict]]:
    for dtype in DTYPES:
        subject = ns.load(source, dtype=dtype)
        for seed in range(seeds):
            yield f"{dtype}, text {seed}", relations(subject, weights=bool(seed % 2), seed=seed)


def tiny_runs(seeds: int) -> Iterator[tuple[str, Verdict]]:
    for seed in range(seeds):
        for name in MODELS:
            eager = bool(seed % 2) and name != "transformer_encoder"
            settings = {"attn_implementation": "eager"} if eager else {}
            for kind in DTYPES:
                dtype = getattr(torch, kind)
                model = tiny_model(name, seed=seed, **settings).to(dtype)
                given = tiny_inputs(name, length=16 + 8 * (seed % 3), batch=2 + seed % 2, seed=seed)
                inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
                yield f"{name}, {kind}, seed {seed}", relations(model, inputs, weights=bool(seed % 2))


def cost_of_auto() -> Row:
    model = tiny_model("llama", layers=28)
    verdict = ns.locate(model)
    return {"verdict": verdict.verdict, "method": verdict.method, "forwards": verdict.forwards, "target": 10,
            "met": verdict.forwards <= 10}  # fmt: skip


# -- the whole


def measure(options: argparse.Namespace) -> None:
    start = time.process_time()

    def keep(label: str, row: Row) -> None:
        nonlocal start
        row["seconds"], start = round(time.process_time() - start, 1), time.process_time()
        print(f"{label:44s} {_told(row)}", flush=True)
        if options.json is not None:
            _write(Path(__file__).parent / options.json, Path(options.model).name, label, row)

    parts = options.parts.split(",")
    for dtype in options.dtypes.split(",") if {"linear", "sublayers"} & set(parts) else ():
        subject = ns.load(options.model, dtype=dtype)
        block = (len(subject.anatomy.blocks) - 1) // 2 if options.block is None else options.block
        if "linear" in parts:
            for weights, words in ((False, "without weights"), (True, "with weights")):
                rows = list(linear_rows(subject, block, weights=weights))
                keep(f"linear, {words}, {dtype}", _counted(rows, TARGETS[f"linear, {words}"]))
        if "sublayers" in parts:
            keep(
                f"sublayers, {dtype}",
                _counted(list(sublayer_rows(subject, block)), TARGETS.get(f"sublayers, {dtype}")),
            )
    if "healthy" in parts:
        keep("healthy", _alarms(healthy_runs(options.model, options.texts)))
    if "tiny" in parts:
        keep("tiny models", _alarms(tiny_runs(options.seeds)))
    if "cost" in parts:
        keep("auto, 28 healthy layers", cost_of_auto())


def _write(file: Path, model: str, label: str, row: Row) -> None:
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    facts = {
        "machine": f"{platform.machine()}, one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    models = known.get("models", {})
    models.setdefault(model, {})[label] = row
    file.write_text(json.dumps({**facts, "models": models}, indent=1) + "\n", encoding="utf-8")


def _told(row: Row) -> str:
    target = "" if row["target"] is None else f" (target {row['target']}, {'met' if row['met'] else 'NOT met'})"
    if "found" in row:
        missed = f"; missed: {', '.join(row['missed'])}" if row["missed"] else ""
        return f"{row['found']} of {row['of']} found, {row['class_right']} classes right{target}{missed}"
    if "false_alarms" in row:
        low, high = row["forwards"]
        return f"{row['false_alarms']} false alarms in {row['of']} runs, {low:g} to {high:g} forwards{target}"
    return f"{row['verdict']} by {row['method']}, {row['forwards']:g} forwards{target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder")
    parser.add_argument("--block", type=int, help="of the faults; by default the middle one")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the faults")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--texts", type=int, default=2, help="healthy runs of the model, for each dtype")
    parser.add_argument("--seeds", type=int, default=2, help="healthy runs of each tiny model, for each dtype")
    parser.add_argument("--json", type=Path, help="where results go, relative to this folder")
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    measure(options)


if __name__ == "__main__":
    main()
