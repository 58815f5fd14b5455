"""Self-benchmark of fault finding: a blind grid of simulated faults with healthy controls among them.

    python benchmarks/detection.py --quick --dtypes float32                       # 1 cell in 20, demo model
    python benchmarks/detection.py --cells 200 --parts notes,operators --tag v1   # 200 faults of each part
    python benchmarks/detection.py --models demo,tiny,SMOLLM2_FOLDER --parts control --cells 300 --tag v1
    python benchmarks/detection.py --models demo,SMOLLM2_FOLDER --methods audit,relations,scans,srdd --tag v1  # all
    python benchmarks/detection.py --stored --tag v1 --json results/detection.json

The cells are those of detection_grid.py, in an order shuffled once. A locator gets the model with the fault's scope
open, tokens and a seed, never the cell. Runs are kept in --store (JSONL, keyed by cell, method and --tag): the same
command goes on where it stopped. --quick, --cells, --limit, --seconds and the filters leave cells out, nothing else.

A fault's effect is measured apart, at its operator, on the tokens that the locator gets. Faults of an effect over 4 ulp
anywhere, or whose signed mean or rms is significant, count for the targets; those that changed nothing are no-ops and
must come out healthy. Not timed: loading, measuring the effect. Seconds are processor time on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from detection_effect import effect_of, windows
from detection_grid import DTYPES, Cell, classes, grid, is_quick, sample
from detection_tables import Row, failures, show, show_failures, summary
from stored_rows import stored_rows

import noisescope as ns
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.faults import FAMILIES, faulty
from noisescope.localization.inputs import batches_for
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.model.loading import Subject, outline
from noisescope.testing import MODELS as TINY
from noisescope.testing import tiny_model

Locator = Callable[[Subject, Any, int], Verdict]  # of the model, token batches (None: built-in text) and a seed
METHODS = ("audit", "relations", "relations_weights", "scans", "srdd", "auto")
ZOO = "tiny"  # controls on tiny models of every architecture that takes tokens


def locators(names: list[str]) -> dict[str, Locator]:
    """The methods asked for; one that is not there yet is left out with a note."""

    def found(module: str) -> Any:
        return getattr(importlib.import_module(f"noisescope.localization.{module}"), module)

    known: dict[str, tuple[str, Callable[[Any], Locator]]] = {
        "audit": ("audit", lambda f: lambda subject, inputs, seed: f(subject, inputs, seed=seed)),
        "relations": ("relations", lambda f: lambda subject, inputs, seed: f(subject, inputs, seed=seed)),
        "relations_weights": (
            "relations",
            lambda f: lambda subject, inputs, seed: f(subject, inputs, weights=True, seed=seed),
        ),
        "scans": ("scans", lambda f: lambda subject, inputs, seed: f(subject, seed=seed)),
        "srdd": ("srdd", lambda f: lambda subject, inputs, seed: f(subject, seed=seed)),
        "auto": ("locate", lambda f: lambda subject, inputs, seed: f(subject, inputs=inputs, seed=seed)),
    }
    ready = {}
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown method {name!r}: choose of {', '.join(known)}")
        module, adapt = known[name]
        try:
            ready[name] = adapt(found(module))
        except ModuleNotFoundError as missing:
            print(f"{name} is left out: {missing}")
    return ready


# -- one cell


def examine(cell: Cell, subject: Subject, methods: dict[str, Locator]) -> Iterator[Row]:
    """A row for each method. Failures are rows too."""
    inputs = windows(subject, cell.prompt)
    effect: Row = {}
    refused = ""
    if cell.fault is not None:
        try:
            effect = effect_of(cell, subject, batches_for(subject.model, subject.tokenizer, inputs, cell.prompt))
        except (InvalidInput, NothingInjected) as reason:
            refused = str(reason)
    for name, locator in methods.items():
        row: Row = {**cell.to_dict(), "method": name, "effect": effect, "changed": 0}
        yield row | (
            {"refused": refused} if refused else _located(cell, subject, locator, inputs, effect.get("width", 0))
        )


def _located(cell: Cell, subject: Subject, locator: Locator, inputs: Any, width: int) -> Row:
    scope = None
    error = ""
    found = Verdict("undecided", "none")
    with contextlib.ExitStack() as stack:
        if cell.fault is not None:
            scope = stack.enter_context(faulty(subject.model, cell.fault, cell.where, anatomy=subject.anatomy))
        cuda = next(subject.model.parameters()).is_cuda
        clock = time.perf_counter if cuda else time.process_time
        start = clock()
        try:
            found = locator(subject, inputs, cell.prompt)
        except Exception as problem:  # a crash is a result
            error = f"{type(problem).__name__}: {problem}"
        seconds = clock() - start
    said = {
        "verdict": found.verdict,
        "alarm": found.verdict == "faulty",
        "suspects": [_short(suspect) for suspect in found.suspects[:3]],
        "forwards": found.forwards,
        "seconds": round(seconds, 3),
        "error": error,
        "notes": list(found.notes)[:4],
        "changed": 0 if scope is None else scope.changed,
    }
    return said | score(cell, found.suspects, width)


def score(cell: Cell, suspects: tuple[Suspect, ...], width: int) -> Row:
    """How right the suspects are, about a fault on an output of `width` channels."""
    if cell.where is None or cell.fault is None:
        return {}
    where = cell.where
    first = suspects[0] if suspects else None
    placed = first is not None and first.site.place == where.place
    operator = first is not None and placed and first.site.operator == where.operator
    module = first is not None and operator and first.site.module == where.module
    named = first is not None and first.fault_class != "unknown"
    return {
        "top1_place": placed,
        "top1_operator": operator,
        "top1_module": module and first is not None and first.site.occurrence == (where.occurrence or 0),
        "top3_place": any(suspect.site.place == where.place for suspect in suspects[:3]),
        "class_named": named,
        "class_right": first is not None and first.fault_class in classes(cell.fault, width),
        "class_exact": first is not None and first.fault_class == cell.fault.fault_class,
        "confidence": first.confidence if first is not None else None,
    }


def _short(suspect: Suspect) -> Row:
    return {
        "place": suspect.site.place,
        "operator": suspect.site.operator,
        "module": suspect.site.module,
        "occurrence": suspect.site.occurrence,
        "class": suspect.fault_class,
        "confidence": suspect.confidence,
        "evidence": suspect.evidence[:300],
    }


# -- all cells


def run(
    cells: list[Cell],
    methods: dict[str, Locator],
    store: Path,
    tag: str,
    load: Callable[[str, str], Subject],
    *,
    seconds: float = math.inf,
) -> list[Row]:
    """Rows of these cells and methods, from the store or run now; stops after `seconds` of this process."""
    known = stored_rows(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    done = []
    with store.open("a") as lines:
        for cell in cells:
            missing = {name: locator for name, locator in methods.items() if (cell.id, name, tag) not in known}
            if missing and time.process_time() - started > seconds:
                break
            for row in examine(cell, load(cell.model, cell.dtype), missing) if missing else ():
                known[cell.id, row["method"], tag] = row | {"tag": tag}
                lines.write(json.dumps(row | {"tag": tag}) + "\n")
                lines.flush()
            done += [known[cell.id, name, tag] for name in methods]
    return done


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells that the options leave."""
    models = [name for name in options.models.split(",") if name != ZOO]
    anatomies = {name: outline(name).anatomy for name in models}
    zoo = [name for name in TINY if name != "transformer_encoder"]
    cells = grid(anatomies, tiny=zoo if ZOO in options.models.split(",") else ())
    families = options.families.split(",") if options.families else []
    for name in families:
        if name not in FAMILIES:
            raise SystemExit(f"unknown family {name!r}: choose of {', '.join(FAMILIES)}")
    left = [
        cell
        for cell in cells
        if cell.dtype in options.dtypes.split(",")
        and (not options.parts or cell.part in options.parts.split(","))
        and (not families or cell.fault is None or cell.fault.family in families)
        and (not options.quick or is_quick(cell))
    ]
    left = left if options.cells is None else sample(left, options.cells)
    return left[: options.limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", "--model", default=f"demo,{ZOO}", help="demo, folders, tiny (more controls)")
    parser.add_argument("--methods", default="audit", help=", ".join(METHODS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--families", help="only these, and controls")
    parser.add_argument("--parts", help="of notes, operators, control")
    parser.add_argument("--quick", action="store_true", help="a fixed subset of the cells")
    parser.add_argument("--cells", type=int, help="at most so many of each part, spread over the part's axes")
    parser.add_argument("--limit", type=int, help="only the first cells")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th cell from the I-th on, for N processes at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of processor time, then print what there is")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tag", default="dev", help="version of the code: rows of another tag are run again")
    parser.add_argument("--store", type=Path, default=Path("scratch/detection.jsonl"))
    parser.add_argument("--stored", action="store_true", help="tally the store's runs of this tag, run nothing")
    parser.add_argument("--failures", type=int, default=0, help="print so many of them in full")
    parser.add_argument("--json", type=Path, help="summary and rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    if options.stored:
        rows = [row for row in stored_rows(options.store).values() if row["tag"] == options.tag]
        _conclude(rows, list(dict.fromkeys(row["method"] for row in rows)), options)
        return
    methods = locators(options.methods.split(","))
    first, step = map(int, options.shard.split("/"))
    cells = chosen(options)[first::step]
    loaded: dict[tuple[str, str], Subject] = {}

    def load(model: str, dtype: str) -> Subject:
        if (model, dtype) not in loaded:
            kind = model.removeprefix(f"{ZOO}:")
            if kind == model:
                loaded[model, dtype] = ns.load(model, dtype=dtype, device=options.device)
            else:  # with biases: initialisation leaves them at 0, training does not
                zoo = tiny_model(kind, biases=0.1)
                loaded[model, dtype] = ns.wrap(zoo.to(options.device, getattr(torch, dtype)))
        return loaded[model, dtype]

    rows = run(cells, methods, options.store, options.tag, load, seconds=options.seconds)
    print(f"{len(rows)} of {len(cells) * len(methods)} runs")
    _conclude(rows, list(methods), options)


def _conclude(rows: list[Row], methods: list[str], options: argparse.Namespace) -> None:
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    print(f"torch {torch.__version__}, {machine}; {len(rows)} runs, tag {options.tag}")
    found = [summary(rows, name) for name in methods]
    for each in found:
        show(each)
    bad = failures(rows)
    show_failures(bad, options.failures)
    if options.json:
        head = {"torch": torch.__version__, "machine": machine, "tag": options.tag, "runs": len(rows)}
        options.json.write_text(json.dumps({**head, "summaries": found, "failures": bad}, indent=1))


if __name__ == "__main__":
    main()
