"""Field benchmark of `locate`: faults that noisescope's simulator did not make, and a zoo of healthy models.

    python benchmarks/field_faults.py --half tune --cells 40              # 40 faults and 40 healthy models
    python benchmarks/field_faults.py --half held-out --store scratch/field.jsonl --json field.json
    python benchmarks/field_faults.py --half tune --stored                # judge stored runs again
    python benchmarks/field_faults.py --list                              # every case, and what is left out

Faults are patched forwards, intercepted torch functions, hooks, cache edits and kernels rewritten in plain torch. Cases
and models are split into two halves by a hash of the name: tune on one, report the other. `locate` gets the model with
the fault's scope open and nothing else. Each case measures its own visibility; a fault that changes nothing is left out
of the count. Runs are kept in --store (JSONL, keyed by cell, method and --tag): the same command goes on where it
stopped, and what is stored is judged again each time. Seconds are processor time; building and measuring are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from field_architectures import LEFT_OUT
from field_cases import PLAIN, FaultCase
from field_judge import judge_fault, judge_healthy, said_by
from field_list import fault_cases
from field_models import MODELS, build
from field_own import OwnModel
from field_tables import Row, show, summary
from field_visibility import Visibility, measure, tokens
from field_zoo import HealthyModel, healthy_models
from stored_rows import stored_rows
from torch import nn

import noisescope as ns

Cell = FaultCase | HealthyModel


@functools.cache
def _demo_tokenizer() -> Any:
    return ns.load("demo", dtype="float32").tokenizer


def located(model: nn.Module, method: str, tokenizer: Any = None) -> Row:
    """What `locate` says, with its processor time; a crash is a result too.

    Hand-written models have no config to tell their vocabulary, so they come with token ids as their author gives them.
    """
    own = any(isinstance(part, OwnModel) for part in model.modules())
    inputs = {"input_ids": tokens(PLAIN, 0)} if own else None
    start = time.process_time()
    try:
        said, error = said_by(ns.locate(ns.wrap(model, tokenizer), method=method, inputs=inputs)), ""
    except Exception as problem:
        said, error = None, f"{type(problem).__name__}: {problem}"[:300]
    return {"said": said, "error": error, "seconds": round(time.process_time() - start, 3)}


def run_fault(case: FaultCase, methods: list[str], device: str) -> Iterator[Row]:
    change = measure(case)
    for method in methods:
        model = build(case.model, case.dtype).to(device)
        kind = type(model.get_submodule(case.module)).__name__ if case.module else type(model).__name__
        row: Row = {"cell": case.name, "method": method, "change": dataclasses.asdict(change), "class": kind}
        if change.visible:
            tokenizer = _demo_tokenizer() if MODELS[case.model].is_demo else None
            with case.fault(model):
                row |= located(model, method, tokenizer)
        yield row


def run_healthy(case: HealthyModel, methods: list[str], device: str) -> Iterator[Row]:
    for method in methods:
        row: Row = {"cell": case.name, "method": method}
        try:
            model = case.build().to(device)
        except Exception as problem:  # a package or architecture that can't be built here is no result of locate
            yield row | {"skipped": f"{type(problem).__name__}: {problem}"[:200]}
            continue
        with case.scope(model) if case.scope is not None else contextlib.nullcontext():
            yield row | located(model, method, _demo_tokenizer() if "/demo" in case.name else None)


def judged(cell: Cell, row: Row) -> Row:
    """A stored run with its outcome, by today's rules."""
    if isinstance(cell, HealthyModel):
        outcome = "" if "skipped" in row else judge_healthy(row["said"], row["error"])
        return row | {"part": "healthy", "kind": cell.kind, "outcome": outcome}
    change = Visibility(**row["change"])
    found = judge_fault(cell, change, row.get("said"), row.get("error", ""), row["class"])
    head = {"part": "faults", "kind": cell.kind, "phase": cell.phase, "expected": _expected(cell)}
    return row | head | dataclasses.asdict(found)


def _expected(case: FaultCase) -> str:
    places = sorted({str(p) for a in case.answers for p in (a.places or ("any block",))})
    operators = sorted({o for a in case.answers for o in a.operators})
    return f"{' or '.join(places)}: {', '.join(operators)} ({', '.join(sorted(case.classes))})"


def chosen(half: str, part: str, count: int | None, only: str = "") -> list[Cell]:
    """The cells of a half, at most `count` of each part; the order is fixed, so fewer cells are a sample."""
    parts: list[list[Cell]] = []
    if part in ("faults", "all"):
        parts.append([case for case in fault_cases() if half in (case.half, "all") and only in case.name])
    if part in ("healthy", "all"):
        parts.append([model for model in healthy_models() if half in (model.half, "all") and only in model.name])
    return [cell for cells in parts for cell in cells[:count]]


def run(
    cells: list[Cell],
    methods: list[str],
    store: Path,
    tag: str,
    *,
    device: str = "cpu",
    seconds: float = math.inf,
    stored: bool = False,
) -> list[Row]:
    """Judged rows of these cells, from the store or run now; stops after `seconds` of this process."""
    known = stored_rows(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    done = []
    with store.open("a") as lines:
        for cell in cells:
            missing = [method for method in methods if (cell.name, method, tag) not in known]
            if missing and not stored and time.process_time() - start < seconds:
                if isinstance(cell, FaultCase):
                    work = run_fault(cell, missing, device)
                else:
                    work = run_healthy(cell, missing, device)
                for row in work:
                    known[cell.name, row["method"], tag] = row = row | {"tag": tag}
                    lines.write(json.dumps(row) + "\n")
                    lines.flush()
            found = [known[cell.name, m, tag] for m in methods if (cell.name, m, tag) in known]
            done += [judged(cell, row) for row in found]
    return done


def show_list() -> None:
    for case in fault_cases():
        print(f"{case.half:9} {case.kind:9} {case.phase:8} {case.name}  ->  {_expected(case)}")
    for model in healthy_models():
        print(f"{model.half:9} healthy   {model.name}")
    for name, reason in LEFT_OUT.items():
        print(f"left out  {name}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tune", "held-out", "all"), default="tune")
    parser.add_argument("--part", choices=("faults", "healthy", "all"), default="all")
    parser.add_argument("--cells", type=int, help="at most so many faults and so many healthy models")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th cell from the I-th on, for N processes at once")
    parser.add_argument("--device", default="cpu", help="of locate; visibility is measured on the CPU")
    parser.add_argument("--methods", default="auto", help="methods of locate, with commas between")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of processor time, then print what there is")
    parser.add_argument("--store", type=Path, default=Path("scratch/field.jsonl"))
    parser.add_argument("--stored", action="store_true", help="judge what is stored, run nothing")
    parser.add_argument("--tag", default="dev", help="version of the code: rows of another tag are run again")
    parser.add_argument("--json", type=Path, help="summary and judged rows")
    parser.add_argument("--list", action="store_true", help="print every case and model, run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # tiny configs are unusual, and transformers says so for each
    if options.list:
        show_list()
        return
    first, step = map(int, options.shard.split("/"))
    cells = chosen(options.half, options.part, options.cells, options.only)[first::step]
    methods = options.methods.split(",")
    limits = {"seconds": options.seconds, "stored": options.stored}
    rows = run(cells, methods, options.store, options.tag, device=options.device, **limits)
    print(f"half {options.half}, tag {options.tag}: {len(rows)} of {len(cells) * len(methods)} runs")
    for method in methods:
        show([row for row in rows if row["method"] == method], method)
    if options.json:
        found = {method: summary([row for row in rows if row["method"] == method]) for method in methods}
        head = {"half": options.half, "tag": options.tag, "torch": torch.__version__}
        options.json.write_text(json.dumps({**head, "summaries": found, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
