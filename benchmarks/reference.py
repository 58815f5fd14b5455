"""How often the locators that use another device's record are right: `fingerprint` and `replay`, on the bundled model.

    python benchmarks/reference.py --json results/reference_cpu.json
    python benchmarks/reference.py --quick

fingerprint, both modes apart: the six families of the original notes at the output of every block, at 0.03 and 0.3 (of
std for non_determinism), and a family that is not among the candidates: a stuck bit in a linear. `blind` knows neither
family, size nor seed; `same-seed` is given all three, as the published method is, and for the stuck bit tries every
family. replay: faults at operators, drawn as in detection.py, against a healthy record of full detail.

Healthy controls: for fingerprint other prompts, one by one (other kernels) or with eager attention; for replay other
prompts, in float32 with noise of one rounding at every linear of the recording side. Candidates do not depend on the
failure, so they are simulated once for all. Tasks are shuffled once; --seconds (of processor time) leaves the last ones
out. A fault that changed nothing is counted apart. Not timed: nothing is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detection import score
from detection_grid import NOTES, Cell, grid, sample

import noisescope as ns
from noisescope.comparison.records import Record
from noisescope.faults import Fault, faulty, make_fault
from noisescope.localization.fingerprint_locator import DRAWS, explained
from noisescope.localization.fingerprint_match import Array, Setting, TrialRunner, settings
from noisescope.localization.inputs import last_logits, prompt_ids
from noisescope.localization.replay import replay
from noisescope.localization.verdict import Verdict
from noisescope.model.loading import Subject
from noisescope.probe.function_mode import FUSED

Row = dict[str, Any]
Task = Callable[[], Row]

SIZES = (0.03, 0.3)
PROMPTS, LENGTH = 24, 16
REPLAY_PROMPTS, REPLAY_LENGTH = 8, 32
DTYPES = ("float32", "bfloat16")
INSIDE_ATTENTION = ("matmul", "bmm", "softmax")  # a replay sees fused attention as one call
DIRECT = ("dead_zone", "saturation", "bias")  # functions of the data; the others draw


class OnceOnly(TrialRunner):
    """A runner that simulates a fault once, whoever asks."""

    @functools.cache  # noqa: B019 (a runner lives as long as the benchmark)
    def faulty_logits(self, layer: int, setting: Setting, *, draws: int = 1) -> Array:
        return super().faulty_logits(layer, setting, draws=draws)

    @functools.cache  # noqa: B019
    def floor(self) -> float:
        return super().floor()


# -- fingerprint


def fault_of(family: str, size: float, seed: int) -> Fault:
    """A fault of the original notes; non-determinism has 0.01 v of std, v its size."""
    settings = {"variance_factor": 100 * size} if family == "non_determinism" else {"magnitude": size}
    return make_fault(family, **settings, seed=seed)


def fingerprint_tasks(subject: Subject, runner: TrialRunner, draw: random.Random) -> Iterator[Task]:
    """Every family, size and block, in both modes."""
    blocks = range(len(subject.anatomy.blocks))
    everything = {mode: tuple(settings(mode, None, None, 0)) for mode in ("blind", "same-seed")}
    for family, size, layer in itertools.product(NOTES, SIZES, blocks):
        fault = fault_of(family, size, seed=draw.randrange(2**31))
        own = as_candidate(fault)
        group = "function of the data" if family in DIRECT else "draws"
        about = {"family": family, "size": size, "layer": layer, "group": group}
        for mode, candidates in (("blind", everything["blind"]), ("same-seed", (own,))):
            yield functools.partial(
                explained_row, subject, runner, fault, f"{layer}", mode=mode, candidates=candidates, about=about
            )
    for layer, mode in itertools.product(blocks, everything):
        module = draw.choice(["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
        fault = make_fault("stuck_bit", bit=20)
        about = {"family": "stuck_bit", "size": None, "layer": layer, "group": "no candidate's family"}
        yield functools.partial(
            explained_row,
            subject,
            runner,
            fault,
            f"{layer}/linear/{module}",
            mode=mode,
            candidates=everything[mode],
            about=about,
        )


def as_candidate(fault: Fault) -> Setting:
    """The fault itself as the only candidate of each layer."""
    return Setting(fault.family, fault.size, fault, fault.seed)


def explained_row(
    subject: Subject,
    runner: TrialRunner,
    fault: Fault,
    where: str,
    *,
    mode: str,
    candidates: tuple[Setting, ...],
    about: Row,
) -> Row:
    with faulty(subject.model, fault, where, anatomy=subject.anatomy) as scope:
        said, _ = last_logits(subject.model, runner.batches[0])
    layers = range(len(subject.anatomy.blocks))
    found = explained(runner, said.double().numpy(), None, mode=mode, faults=candidates, layers=layers)
    first = found.suspects[0] if found.suspects else None
    return {
        "method": mode,
        "kind": "fault" if scope.changed else "no-op",
        **about,
        "verdict": found.verdict,
        "top1": first is not None and first.site.place == about["layer"],
        "top3": any(s.site.place == about["layer"] for s in found.suspects[:3]),
        "class_right": first is not None and first.fault_class == fault.fault_class,
    }


def healthy_fingerprint(subject: Subject, seed: int, how: str) -> Row:
    """Other prompts; said one by one, or with attention taken apart."""
    model = subject.model
    prompts = prompt_ids(model, subject.tokenizer, None, seed=seed, count=PROMPTS, length=LENGTH)
    if how == "one by one":
        said = torch.cat([last_logits(model, (prompt,))[0] for prompt in prompts])
    else:
        model.set_attn_implementation("eager")
        said, _ = last_logits(model, prompts)
        model.set_attn_implementation("sdpa")
    faults, layers = tuple(settings("blind", ["bias"], None, 0)), range(len(subject.anatomy.blocks))
    with TrialRunner(model, subject.anatomy, [prompts], draws=2) as runner:
        found = explained(runner, said.double().numpy(), None, mode="blind", faults=faults, layers=layers)
    return {"method": "fingerprint", "kind": "healthy", "group": "healthy", "verdict": found.verdict}


# -- replay


def replay_row(cell: Cell, subject: Subject, record: Record) -> Row:
    """A fault at an operator, against the healthy record."""
    assert cell.fault is not None and cell.where is not None
    with faulty(subject.model, cell.fault, cell.where, anatomy=subject.anatomy) as scope:
        found = replay(subject, record)
    inside = cell.where.operator in INSIDE_ATTENTION
    told = score(cell, found.suspects, width=0)
    first = found.suspects[0] if found.suspects else None
    operator = told["top1_operator"] or (inside and told["top1_place"] and _operator(found) == FUSED)
    return {
        "method": "replay",
        "kind": "fault" if scope.changed else "no-op",
        "group": "inside attention" if inside else "modules and sums",
        **{name: cell.to_dict()[name] for name in ("dtype", "family", "size", "place", "operator", "module")},
        "verdict": found.verdict,
        "top1": told["top1_place"],
        "operator_right": operator,
        "class_right": told["class_right"],
        "said": None if first is None else f"{first.site}: {first.fault_class}",
    }


def _operator(found: Verdict) -> str | None:
    return found.suspects[0].site.operator if found.suspects else None


def healthy_replay(subject: Subject, dtype: str, seed: int, folder: Path) -> Row:
    rounding = contextlib.nullcontext()
    if dtype == "float32":
        rounding = ns.inject(subject.model, ns.Injection(ns.Gaussian(2.0**-24), operators={"linear"}, seed=seed))
    with rounding:
        record = recorded(subject, seed, folder / f"healthy-{dtype}-{seed}")
    found = replay(subject, record)
    return {"method": "replay", "kind": "healthy", "group": "healthy", "dtype": dtype, "verdict": found.verdict}


def recorded(subject: Subject, seed: int, folder: Path) -> Record:
    prompts = prompt_ids(subject.model, subject.tokenizer, None, seed=seed, count=REPLAY_PROMPTS, length=REPLAY_LENGTH)
    return ns.record(subject, output=folder, prompts=prompts, detail="full")


def replay_tasks(folder: Path, count: int) -> Iterator[Task]:
    """`count` faults over both dtypes, and a control for every four."""
    subjects = {dtype: ns.load("demo", dtype=dtype) for dtype in DTYPES}
    records = {dtype: recorded(subject, 0, folder / dtype) for dtype, subject in subjects.items()}
    cells = grid({"demo": subjects["float32"].anatomy}, DTYPES, tiny=())
    for cell in sample([cell for cell in cells if cell.part == "operators"], count):
        yield functools.partial(replay_row, cell, subjects[cell.dtype], records[cell.dtype])
    for dtype, seed in itertools.product(DTYPES, range(1, 1 + max(1, count // 8))):
        yield functools.partial(healthy_replay, subjects[dtype], dtype, seed, folder)


# -- all of them


def summary(rows: list[Row]) -> list[Row]:
    """Counts of each method and group."""
    found = []
    ordered = sorted(rows, key=lambda row: (row["method"], row["kind"], row["group"], str(row.get("dtype"))))
    for key, group in itertools.groupby(
        ordered, key=lambda row: (row["method"], row["kind"], row["group"], row.get("dtype"))
    ):
        some = list(group)
        verdicts = {name: sum(row["verdict"] == name for row in some) for name in ("faulty", "undecided", "healthy")}
        right = {
            name: sum(bool(row[name]) for row in some)
            for name in ("top1", "top3", "operator_right", "class_right")
            if name in some[0]
        }
        found.append(
            {"method": key[0], "kind": key[1], "group": key[2], "dtype": key[3], "n": len(some), **verdicts, **right}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one task in twelve")
    parser.add_argument("--replays", type=int, default=160, help="faults that are replayed, over both dtypes")
    parser.add_argument("--seconds", type=float, default=540.0, help="of processor time, then print what there is")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="summary and rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.process_time()
    subject, healthy = ns.load("demo"), ns.load("demo")
    prompts = prompt_ids(subject.model, subject.tokenizer, None, seed=0, count=PROMPTS, length=LENGTH)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        OnceOnly(subject.model, subject.anatomy, [prompts], draws=DRAWS) as runner,
    ):
        draw = random.Random(0)
        tasks = [*fingerprint_tasks(subject, runner, draw), *replay_tasks(Path(folder), options.replays)]
        for seed, how in itertools.product(range(1, 21), ("one by one", "eager attention")):
            tasks.append(functools.partial(healthy_fingerprint, healthy, seed, how))
        draw.shuffle(tasks)
        tasks = tasks[::12] if options.quick else tasks
        for task in tasks:
            if time.process_time() - started > options.seconds:
                break
            rows.append(task())
    print(f"{len(rows)} of {len(tasks)} runs, {time.process_time() - started:.0f} s of processor time")
    found = summary(rows)
    for each in found:
        print(json.dumps(each))
    if options.json:
        head = {"machine": "CPU, one thread of a shared two-core machine", "torch": torch.__version__}
        head |= {"numpy": np.__version__, "runs": len(rows), "of": len(tasks)}
        options.json.write_text(json.dumps({**head, "summary": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
