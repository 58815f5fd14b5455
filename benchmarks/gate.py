"""How often the gate is wrong: an unchanged model that fails, and a model made worse that passes.

    python benchmarks/gate.py --work FOLDER --seconds 540 --json benchmarks/results/gate_cpu.json

Every re-run has 50 problems and a noise seed of its own for the baseline, and others for the candidate; no problem is
used twice within an arm. A set's numbers are those that `noisescope gate --effort screen` takes
(`api.guarding.gauged`), and the verdict is `plans.gate.decide`'s. Measured sets are kept in --work, so the same command
goes on after --seconds.

The worse model is the bundled one with the gain of its final norm multiplied, which sharpens its output: it answers the
same problems right and its loss hardly moves, but the same relative noise inside moves its output further. The factor
is chosen on 200 problems of their own so that the predicted divergence, by which the gate decides first, is 1.4 times
the baseline's (geometric means): worse by twice the limit of 20 %. What that does to injected noise is in the results.

The absolute limit is set to 0.5, out of the way: the unchanged model loses more than 0.15 under this noise, rightly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noisescope as ns
from noisescope import stats
from noisescope.api.guarding import gauged
from noisescope.data import DataSet, Item, gather
from noisescope.demo.problems import Problem, held_out
from noisescope.model import Subject
from noisescope.plans.gate import decide

WORSE_BY = 1.4
LIMIT = 0.5
CALIBRATION = 200
PROBLEMS = 2027  # seed; others than those on which the statistic was chosen (stats/trimmed.py)


def data_set(problems: list[Problem]) -> DataSet:
    items = [Item(at, prompt=problem.prompt, answer=problem.answer) for at, problem in enumerate(problems)]
    return gather(items, "generated problems")


def worsened(gain: float) -> Subject:
    subject = ns.load("demo")
    with torch.no_grad():
        subject.model.model.norm.weight.mul_(gain)
    return subject


def measured(subject: Subject, problems: list[Problem], seed: int) -> dict[str, Any]:
    return gauged(subject, data_set(problems), samples=len(problems), seeds=[seed], slice=len(problems))


def ratio(after: dict[str, Any], before: dict[str, Any], measure: str, operator: str = "gemm") -> float:
    """Geometric means, the same samples."""
    return math.exp(float(np.mean(np.log(after[measure][operator]) - np.log(before[measure][operator]))))


def calibrated(problems: list[Problem]) -> dict[str, Any]:
    """The gain at which the predicted divergence is WORSE_BY times as large: log ratio is nearly linear in log gain."""
    before = measured(ns.load("demo"), problems, 0)
    gain = 1.2
    for _ in range(2):
        after = measured(worsened(gain), problems, 0)
        gain **= math.log(WORSE_BY) / math.log(ratio(after, before, "predicted_kl"))
    after = measured(worsened(gain), problems, 0)
    accuracy = {
        name: [float(np.mean(side["accuracy"][name])) for side in (before, after)] for name in ("clean", "gemm")
    }
    return {
        "gain": gain,
        "samples": len(problems),
        "predicted_ratio": {name: ratio(after, before, "predicted_kl", name) for name in before["predicted_kl"]},
        "injected_ratio": ratio(after, before, "kl"),
        "accuracy_before_and_after": accuracy,
    }


class Sets:
    """Measured sets by name, kept on disk; measuring stops when time is up."""

    def __init__(self, folder: Path, problems: list[Problem], size: int, until: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.problems, self.size, self.until = folder, problems, size, until

    def get(self, kind: str, subject: Subject, number: int, samples: int, seed: int) -> dict[str, Any] | None:
        """The set of a kind: the `samples`-th part of the problems under a seed; None where time is up."""
        path = self.folder / f"{kind}-{number}.json"
        if not path.exists():
            if time.monotonic() > self.until:
                return None
            part = self.problems[samples * self.size : (samples + 1) * self.size]
            path.write_text(json.dumps(measured(subject, part, seed)), encoding="utf-8")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts counted, with an interval, and what the rows looked like."""
    failed = [float(result["verdict"] == "fail") for result in results]
    rows = [result["divergence"] for result in results]
    per_row = {
        row["name"]: {
            "median_ratio": float(np.median([one[at]["ratio"]["value"] for one in rows])),
            "sd_of_log_ratio": float(np.std([math.log(one[at]["ratio"]["value"]) for one in rows])),
            "median_smallest_detectable": float(np.median([one[at]["smallest_detectable"] for one in rows])),
            "failed": sum(one[at]["verdict"] == "fail" for one in rows),
            "undecided": sum(one[at]["verdict"] == "undecided" for one in rows),
        }
        for at, row in enumerate(rows[0])
    }
    noisy = [next(row for row in result["accuracy"] if row["under_noise_in"] == "gemm") for result in results]
    return {
        "reruns": len(results),
        "failed": int(sum(failed)),
        "undecided": sum(result["verdict"] == "undecided" for result in results),
        "share_failed": stats.mean(failed).to_dict(),
        "rows": per_row,
        "accuracy": {
            "surely_lower": sum(
                row["difference"]["high"] is not None and row["difference"]["high"] < 0 for row in noisy
            ),
            "median_smallest_drop": float(np.median([row["smallest_detectable"] for row in noisy])),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reruns", type=int, default=100)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=540, help="stop measuring by then; the same command goes on")
    parser.add_argument("--work", type=Path, required=True, help="a folder to go on from")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    problems = held_out(CALIBRATION + 2 * options.reruns * options.samples, seed=PROBLEMS)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "calibration.json"
    if not kept.exists():
        kept.write_text(json.dumps(calibrated(problems[:CALIBRATION])), encoding="utf-8")
    calibration = json.loads(kept.read_text(encoding="utf-8"))
    sets = Sets(options.work, problems[CALIBRATION:], options.samples, until)
    good, bad = ns.load("demo"), worsened(calibration["gain"])
    unchanged, worse = [], []
    for rerun in range(options.reruns):
        before = sets.get("baseline", good, rerun, 2 * rerun, 3 * rerun)
        same = sets.get("same", good, rerun, 2 * rerun + 1, 3 * rerun + 1)
        after = sets.get("worse", bad, rerun, 2 * rerun + 1, 3 * rerun + 2)
        if before is None or same is None or after is None:
            break
        unchanged.append(decide(before, same, max_degradation=LIMIT))
        worse.append(decide(before, after, max_degradation=LIMIT))
    if not unchanged:
        print("calibrated, and no re-run is finished yet: the same command goes on")
        return
    found = {
        "workload": f"bundled model, {options.samples} generated problems a side, 1 seed, Gaussian 0.05, effort screen",
        "machine": f"{os.cpu_count()} shared cores, one thread, torch {torch.__version__}",
        "calibration": calibration,
        "unchanged": summary(unchanged),
        "worse_by_twice_the_limit": summary(worse),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("unchanged", "worse_by_twice_the_limit"):
        print(f"{name}: {found[name]['failed']} of {found[name]['reruns']} fail, {found[name]['undecided']} undecided")


if __name__ == "__main__":
    main()
