"""Power and false alarms of the gate: how often five kinds of damage are found, and undamaged models failed.

    python benchmarks/gate.py --work FOLDER --seconds 1500 --json benchmarks/results/gate_cpu.json

====================  =================================================================================================
damage                made of the bundled model
====================  =================================================================================================
int4 weights          every linear of the blocks rounded to int4, groups of 64
weight noise          Gaussian noise of 10 % of each weight's root mean square in those linears, drawn anew in each run
one damaged layer     noise of 50 % in the linears of one block, another block and another draw in each run
wrong template        "Question: ... Answer:" around every prompt, which the model was not trained with
final-norm gain       the gain of the final norm times a factor chosen so that the predicted divergence grows by 1.4
====================  =================================================================================================

A run has its own problems and noise seed. On the same samples the damaged model is measured on the baseline's problems
with the baseline's seed, as `noisescope gate` does; on other samples it is the next run's damaged set, so that each
set serves two comparisons. Another template gives other tokens, so on the same samples the gate refuses to compare:
counted as refused. False alarms: the undamaged model on the same problems under another noise seed, and on the next
run's problems.

A set has what `noisescope gate --effort screen` measures (`api.gates.measure_baseline`), and the verdict is
`plans.gate.decide`'s. What a damage does to the score and to the divergence is measured on problems of their own. The
absolute limit is 0.5: the undamaged model rightly loses more than 0.15 under this noise. Measured sets are kept in
--work, so the same command continues after --seconds. With 32 problems per set the whole takes about 25 minutes on one
core.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noisescope as ns
from noisescope import stats
from noisescope.api.gates import measure_baseline
from noisescope.data.dataset import DataSet, Item, gather
from noisescope.demo.problems import Problem, held_out
from noisescope.diagnosis.section_types import GateNumbers
from noisescope.jsonform import from_json, to_json
from noisescope.measures.format_costs import is_planned, weight_format
from noisescope.model.loading import Subject
from noisescope.plans.gate import decide, pairs_of
from noisescope.plans.gate_rows import Decision
from noisescope.probe.formats import quantise

WORSE_BY = 1.4  # of the final-norm gain: twice the limit of 20 %
LIMIT = 0.5
WEIGHT_NOISE, LAYER_NOISE = 0.2, 2.0  # of a weight's root mean square
CALIBRATION = 100
PROBLEMS = 2027  # seed; others than those on which the statistic was chosen (stats/typical.py)
GOOD, AGAIN = "undamaged", "undamaged, another noise seed"

Template = Callable[[str], str]


def as_trained(prompt: str) -> str:
    return prompt


def as_chat(prompt: str) -> str:
    return f"Question: {prompt} Answer:"


@dataclass(frozen=True)
class Damage:
    """A model made worse: `made` gives that of a run, `template` the text it is asked with."""

    name: str
    made: Callable[[int], Subject]
    template: Template = as_trained


def linears(subject: Subject, block: int | None = None) -> list[torch.nn.Module]:
    modules = dict(subject.model.named_modules())
    wanted = [unit for unit in subject.anatomy.units if is_planned(unit) and block in (None, unit.place)]
    return [modules[unit.module] for unit in wanted]


@functools.cache
def loaded() -> Subject:
    return ns.load("demo")


def good(run: int) -> Subject:
    """A model of its own, to be damaged."""
    kept = loaded()
    return Subject(copy.deepcopy(kept.model), kept.tokenizer, kept.anatomy, kept.source)


def rounded(run: int) -> Subject:
    subject = good(run)
    with torch.no_grad():
        for linear in linears(subject):
            linear.weight.copy_(quantise(linear.weight, weight_format("int4"), weight=True))  # type: ignore[operator,arg-type,union-attr]
    return subject


def noised(run: int, size: float = WEIGHT_NOISE, block: int | None = None) -> Subject:
    subject, draw = good(run), torch.Generator().manual_seed(run)
    with torch.no_grad():
        for linear in linears(subject, block):
            weight: Any = linear.weight
            weight.add_(size * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=draw))
    return subject


def one_layer(run: int) -> Subject:
    return noised(run, LAYER_NOISE, run % len(loaded().anatomy.blocks))


def sharpened(gain: float) -> Subject:
    subject = good(0)
    with torch.no_grad():
        subject.model.model.norm.weight.mul_(gain)
    return subject


def damages(gain: float) -> list[Damage]:
    return [
        Damage("int4 weights", rounded),
        Damage("weight noise", noised),
        Damage("one damaged layer", one_layer),
        Damage("wrong template", good, as_chat),
        Damage("final-norm gain", lambda run: sharpened(gain)),
    ]


def data_set(problems: Sequence[Problem], template: Template) -> DataSet:
    items = [Item(at, prompt=template(problem.prompt), answer=problem.answer) for at, problem in enumerate(problems)]
    return gather(items, "generated problems")


def measured(subject: Subject, problems: Sequence[Problem], seed: int, template: Template = as_trained) -> GateNumbers:
    count = len(problems)
    return measure_baseline(subject, data_set(problems, template), samples=count, seeds=[seed], slice=count)


def ratio(after: GateNumbers, before: GateNumbers) -> dict[str, float]:
    """How much further noise moves the output, by what it is in: geometric means over the same problems."""
    sides = {f"predicted: {name}": (after.predicted_kl[name], before.predicted_kl[name]) for name in after.predicted_kl}
    sides["injected: gemm"] = (after.kl["gemm"], before.kl["gemm"])
    return {name: math.exp(float(np.mean(np.log(x) - np.log(y)))) for name, (x, y) in sides.items()}  # type: ignore[arg-type]


def calibrated(problems: Sequence[Problem]) -> dict[str, Any]:
    """The gain that makes the predicted divergence WORSE_BY times as large, and what each damage does."""
    before = measured(good(0), problems, 0)
    gain = 1.2
    for _ in range(2):  # log ratio is nearly linear in log gain
        found = ratio(measured(sharpened(gain), problems, 0), before)["predicted: gemm"]
        gain **= math.log(WORSE_BY) / math.log(found)
    effects = {}
    for damage in damages(gain):
        after = measured(damage.made(0), problems, 0, damage.template)
        effects[damage.name] = {
            "clean_accuracy": [float(np.mean(side.accuracy["clean"])) for side in (before, after)],  # type: ignore[arg-type]
            "divergence_ratio": ratio(after, before),
        }
    return {"gain": gain, "samples": len(problems), "effects": effects}


class Sets:
    """Measured sets by name, kept on disk; measuring stops when time is up."""

    def __init__(self, folder: Path, problems: Sequence[Problem], size: int, until: float) -> None:
        self.folder, self.problems, self.size, self.until = folder, problems, size, until

    def get(self, kind: Damage, run: int, seed: int) -> GateNumbers | None:
        """The set of a kind on the problems of a run; None where time is up."""
        path = self.folder / f"{kind.name.replace(' ', '-').replace(',', '')}-{run}.json"
        if not path.exists():
            if time.monotonic() > self.until:
                return None
            problems = self.problems[run * self.size : (run + 1) * self.size]
            numbers = measured(kind.made(run), problems, seed, kind.template)
            path.write_text(json.dumps(to_json(numbers)), encoding="utf-8")
        return from_json(GateNumbers, json.loads(path.read_text(encoding="utf-8")))


def verdict(before: GateNumbers, after: GateNumbers, *, same: bool) -> Decision | None:
    """What the gate decides; None where it refuses other samples."""
    if same and pairs_of(before.samples, after.samples) is None:
        return None
    return decide(before, after, max_degradation=LIMIT)


def summary(found: Sequence[Decision | None]) -> dict[str, Any]:
    """Verdicts counted, with the interval of the share that fails or is refused, and which rows failed."""
    decided = [one for one in found if one is not None]
    caught = [float(one is None or one.verdict == "fail") for one in found]
    rows: dict[str, int] = {}
    for one in decided:
        for row in one.checks:
            rows[row.name] = rows.get(row.name, 0) + (row.verdict == "fail")
    largest = [one.worst.ratio.value or 0.0 for one in decided]
    undecided = [sum(row.verdict == "undecided" for row in one.checks) for one in decided]
    return {
        "runs": len(found),
        "failed": sum(one.verdict == "fail" for one in decided),
        "refused": len(found) - len(decided),
        "undecided": sum(one.verdict == "undecided" for one in decided),
        "share_caught": to_json(stats.mean(caught)),
        "rows_failed": rows,
        "median_undecided_rows": float(np.median(undecided)) if decided else None,
        "median_largest_ratio": float(np.median(largest)) if decided else None,
        "mean_clean_accuracy": _accuracy(decided),
    }


def _accuracy(decided: Sequence[Decision]) -> list[float] | None:
    """Of the baseline and of the candidate, without noise."""
    clean = [change for one in decided for change in one.accuracy if change.under_noise_in == "clean"]
    sides = [[row.baseline.value or 0.0 for row in clean], [row.candidate.value or 0.0 for row in clean]]
    return [float(np.mean(side)) for side in sides] if clean else None


def filled(sets: Sets, runs: int, gain: float, workers: int) -> None:
    """Measure the sets of all runs in several processes, so that `compared` finds them on disk."""
    with multiprocessing.get_context("fork").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pool.starmap(_fill, [(sets, run, runs, gain) for run in range(runs + 1)], chunksize=1)


def _fill(sets: Sets, run: int, runs: int, gain: float) -> None:
    for kind in (Damage(GOOD, good), *damages(gain)):
        sets.get(kind, run, run)
    sets.get(Damage(AGAIN, good), run, runs + 1 + run)


def compared(sets: Sets, runs: int, gain: float) -> dict[str, dict[str, list[Decision | None]]]:
    """Decisions by kind and arm, of the runs that were measured in time."""
    kinds = [Damage(GOOD, good), *damages(gain)]
    known: dict[str, list[GateNumbers]] = {kind.name: [] for kind in kinds}
    again: list[GateNumbers] = []
    for run in range(runs + 1):  # the last only serves as other samples
        found = [sets.get(kind, run, run) for kind in kinds]
        other_seed = sets.get(Damage(AGAIN, good), run, runs + 1 + run)
        if other_seed is None or any(one is None for one in found):
            break
        again.append(other_seed)
        for kind, one in zip(kinds, found, strict=True):
            if one is not None:
                known[kind.name].append(one)
    before = known[GOOD]
    whole = range(len(before) - 1)
    arms = {
        kind.name: {
            "same samples": [verdict(before[i], known[kind.name][i], same=True) for i in whole],
            "other samples": [verdict(before[i], known[kind.name][i + 1], same=False) for i in whole],
        }
        for kind in kinds
    }
    arms[GOOD]["same samples"] = [verdict(before[i], again[i], same=True) for i in whole]
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--samples", type=int, default=32, help="problems per set")
    parser.add_argument(
        "--seconds", type=float, default=1500, help="stop measuring by then; the same command continues"
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder to continue from")
    parser.add_argument("--workers", type=int, default=1, help="processes that measure, one thread each")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    problems = held_out(CALIBRATION + (options.runs + 1) * options.samples, seed=PROBLEMS)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "calibration.json"
    if not kept.exists():
        kept.write_text(json.dumps(calibrated(problems[:CALIBRATION])), encoding="utf-8")
    calibration = json.loads(kept.read_text(encoding="utf-8"))
    sets = Sets(options.work, problems[CALIBRATION:], options.samples, until)
    if options.workers > 1:
        filled(sets, options.runs, calibration["gain"], options.workers)
    arms = compared(sets, options.runs, calibration["gain"])
    done = len(arms[GOOD]["same samples"])
    if not done:
        print("no run is complete yet: the same command continues")
        return
    found = {
        "workload": f"bundled model, {options.samples} problems per side, 1 seed, Gaussian 0.05, effort screen",
        "machine": f"{os.cpu_count()} shared cores, one thread, torch {torch.__version__}, {platform.machine()}",
        "complete": done == options.runs,
        "calibration": calibration,
        "arms": {kind: {arm: summary(rows) for arm, rows in by_arm.items()} for kind, by_arm in arms.items()},
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("| model | accuracy | largest ratio | samples | runs | fails | refused | undecided | caught, 95 % interval |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, by_arm in found["arms"].items():
        for arm, row in by_arm.items():
            share = row["share_caught"]
            interval = f"{100 * share['value']:.0f} % ({100 * share['low']:.0f} to {100 * share['high']:.0f})"
            counts = " | ".join(str(row[name]) for name in ("runs", "failed", "refused", "undecided"))
            clean, times = row["mean_clean_accuracy"], row["median_largest_ratio"]
            now = "" if clean is None else f"{100 * clean[1]:.0f} %"
            print(f"| {kind} | {now} | {'' if times is None else f'{times:.2f}'} | {arm} | {counts} | {interval} |")


if __name__ == "__main__":
    main()
