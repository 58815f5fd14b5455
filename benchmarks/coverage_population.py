"""Per-sample KL of the bundled model, as a population to draw from: injected, predicted, and the layers of each window.

    python benchmarks/coverage_population.py --samples 400 --work FOLDER --json benchmarks/results/kl_population.json

About 10 minutes on one core; the same command goes on where it stopped. Every second problem is written out: the others
were used to choose the constants of `stats.nonnegative_mean`. Ranks of screen and sweep are compared over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coverage_cases import typical_values

import noisescope as ns
from noisescope.api.preparation import Prepared, prepare_diagnosis
from noisescope.data.dataset import Item, gather
from noisescope.demo.problems import held_out
from noisescope.diagnosis import layers, predicted_kl
from noisescope.diagnosis.context import StudyContext
from noisescope.injection import Injection
from noisescope.runs.store import Store
from noisescope.stats.correlation import ranked
from noisescope.stats.score_arrays import Array
from noisescope.trials import Results, Trial

PROBLEMS = 4711  # seed
WINDOWS = (0, 1, 4, 8, 11, 13)  # first layer of each
RANKED_BY = {
    "mean": lambda rows: rows.mean(axis=1),
    "typical": typical_values,
    "median": lambda rows: np.median(rows, axis=1),
}


class Sweep:
    """Every window, layer and cell injected, and the screen."""

    def propose(self, context: StudyContext, results: Results) -> list[Trial]:
        questions = [None, *(injection for group in groups(context).values() for injection in group)]
        return predicted_kl.propose(context, results) + [
            trial for question in questions for trial in context.ask(question)
        ]

    def conclude(self, context: StudyContext, results: Results, notes: list[str]) -> dict[str, Any]:
        return {"schema_version": 1}


def groups(context: StudyContext) -> dict[str, list[Injection]]:
    return {
        "windows": [layers.window_injection(context, window) for window in context.windows],
        "layers": [layers.layer_injection(context, layer) for layer in range(context.blocks)],
        "cells": [layers.cell_injection(context, *cell) for cell in layers.cells(context)],
    }


def measured(samples: int, work: Path) -> tuple[Prepared, Store]:
    problems = held_out(samples, seed=PROBLEMS)
    items = [Item(at, prompt=problem.prompt, answer=problem.answer) for at, problem in enumerate(problems)]
    prepared = prepare_diagnosis(
        ns.load("demo"),
        gather(items, "generated problems"),
        level="layer",
        samples=samples,
        calibration_samples=50,
        effort="full",
    )
    prepared.run(Sweep(), ns.Options(output=work))
    return prepared, Store(work, create=False)


def columns(prepared: Prepared, store: Store) -> dict[str, dict[str, Array]]:
    """[sites, samples] of windows, layers and cells: injected KL (mean of three seeds), predicted KL, agreement."""
    context = prepared.context
    screened = predicted_kl.conclude(context, store)
    assert screened is not None
    found = {}
    for name, injections in groups(context).items():
        answers = [context.answer(store, injection) for injection in injections]
        found[name] = {
            "injected": np.stack([answer.mean("kl") for answer in answers if answer is not None]),
            "agreement": np.stack([answer.mean("agreement") for answer in answers if answer is not None]),
            "predicted": np.stack([screened.predicted_by(injection) for injection in injections]),
        }
    return found


def rank_agreement(injected: Array, predicted: Array, samples: int, draws: int = 40) -> dict[str, Any]:
    """Spearman of screen and sweep on the same samples, and of the sweep with itself on others; means over draws."""
    result: dict[str, Any] = {"samples": samples, "draws": draws}
    for name, of in RANKED_BY.items():
        both = []
        for draw in range(draws):
            order = np.random.default_rng(draw).permutation(injected.shape[1])
            here, there = order[:samples], order[samples : 2 * samples]
            a, b, c = (ranked(of(rows)) for rows in (injected[:, here], predicted[:, here], injected[:, there]))
            both.append((np.corrcoef(a, b)[0, 1], np.corrcoef(a, c)[0, 1]))
        screen_sweep, again = np.mean(both, axis=0).tolist()
        result[name] = {"screen_and_sweep": round(screen_sweep, 4), "sweep_and_sweep_of_others": round(again, 4)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--work", type=Path, required=True, help="a folder to go on from")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepared, store = measured(options.samples, options.work)
    with store:
        found = columns(prepared, store)

    def short(values: Array) -> list[float]:
        return [float(f"{value:.4g}") for value in values[1::2]]

    windows, single = found["windows"], found["layers"]["injected"]
    result = {
        "workload": f"bundled model, {options.samples} generated problems, Gaussian 0.05 on products, 3 seeds; "
        "every second problem",
        "machine": f"{os.cpu_count()} shared cores, one thread, torch {torch.__version__}",
        "windows": {
            f"{at} to {at + 2}": {
                **{name: short(windows[name][at]) for name in ("injected", "predicted", "agreement")},
                "layers": short(single[at : at + 3].sum(axis=0)),
            }
            for at in WINDOWS
        },
        "ranks": {
            group: [rank_agreement(rows["injected"], rows["predicted"], n) for n in (50, 100)]
            for group, rows in found.items()
        },
    }
    options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
