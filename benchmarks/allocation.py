"""Where the forwards of a diagnosis are best spent: on more seeds, on more samples, or on rows that are undecided.

    python benchmarks/allocation.py --repeats 5 --slice 32 --json benchmarks/results/allocation_demo.json

Each repeat runs a standard diagnosis (operators and layers) on 3 slices of samples with 3 seeds, none of them used by
another repeat. Parts of its results are then read as smaller designs:

    3 seeds x 1 slice     what the default settings do with a third of the samples
    1 seed  x 3 slices    as many forwards
    1 seed  x 2 slices    two thirds of them
    3 seeds x 3 slices    all

For each design: samples under injections, the median width of the rows' intervals (of the typical KL as
log(high / low), of the loss of the score as a difference), and how often two repeats agree (stability.py).

"Decided after one seed" counts rows whose band is settled by the interval of the first seed. Stopping there is optional
stopping: the interval that is printed is the first one that settles, or the last one. `--simulate` draws from normal
distributions how often that interval misses the truth, for shares of the variance between samples from 0 to 0.9 and for
truths around the limit, and how wide it must be made to miss 5 % of the time again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from screen_setup import save
from stability import agreement, pieces, said

import noisescope as ns
from noisescope import demo, stats
from noisescope.api.preparation import prepare_run
from noisescope.diagnosis import all_levels
from noisescope.diagnosis.context import Settings, StudyContext
from noisescope.diagnosis.effects import StudyResults, divergence, paired
from noisescope.diagnosis.section_types import Conclusions
from noisescope.findings import band_range
from noisescope.injection import Injection
from noisescope.options.shared import ScoringOptions
from noisescope.runs.store import Store
from noisescope.runs.trial_runner import LocalExecutor, NoProgress, TrialRunner, run_waves

SEEDS, SLICES = 3, 3
DESIGNS = {"3 seeds x 1 slice": (3, 1), "1 seed x 3 slices": (1, 3), "1 seed x 2 slices": (1, 2), "3 x 3": (3, 3)}
LIMIT_SHARES = (0.0, 0.5, 0.75, 0.9)  # of the variance of a score that lies between samples


def widths(context: StudyContext, results: Any, injections: list[Injection]) -> dict[str, list[float]]:
    """Of each injected row, at 95 %."""
    study, found = StudyResults(context, results), dict[str, list[float]](kl=[], loss=[])
    clean = study.answer(None)
    for injection in injections:
        noisy = study.answer(injection)
        if clean is None or noisy is None or noisy.error:
            continue
        typical = divergence(noisy.mean("kl")).typical
        loss = stats.degradation(*paired(context, clean, noisy), chance=context.chance)
        if typical.low and typical.high:
            found["kl"].append(float(np.log(typical.high / typical.low)))
        if loss.low is not None and loss.high is not None:
            found["loss"].append(loss.high - loss.low)
    return found


def decided(context: StudyContext, results: Any, injections: list[Injection]) -> list[bool]:
    """Whether the band of each row is settled."""
    study, found = StudyResults(context, results), []
    clean = study.answer(None)
    for injection in injections:
        noisy = study.answer(injection)
        if clean is not None and noisy is not None and not noisy.error:
            level = stats.simultaneous_level(len(injections))
            loss = stats.degradation(*paired(context, clean, noisy), chance=context.chance, level=level)
            low, high = band_range("degradation", loss)
            found.append(low == high)
    return found


def one_repeat(subject: Any, data: Any, number: int, options: argparse.Namespace) -> dict[str, Any]:
    seeds = tuple(SEEDS * number + k for k in range(SEEDS))
    settings = Settings(ns.Gaussian(0.05), levels=("operator", "layer"), seeds=seeds, step=options.step)
    scoring = ScoringOptions(data=data, samples=SLICES * options.slice, slice=options.slice)
    prepared = prepare_run(subject, scoring, settings)
    context = replace(prepared.context, all_token_slices=(), curvature_slice=None)
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        TrialRunner(subject, prepared.materials) as runner,
        Store(Path(folder)) as store,
    ):
        run_waves(lambda known: all_levels.propose(context, known), store, LocalExecutor(runner), NoProgress())
        asked = [t.injection for t in all_levels.propose(context, store) if t.measure == "score" and t.injection]
        injections = list(dict.fromkeys(replace(injection, seed=0) for injection in asked))
        for name, (count, parts) in DESIGNS.items():
            smaller = replace(context, settings=replace(settings, seeds=seeds[:count]), test=context.test[:parts])
            concluded: Conclusions = all_levels.conclude(smaller, store)
            found[name] = {
                "samples of injections": len(injections) * count * parts * options.slice,
                "widths": widths(smaller, store, injections),
                "said": said(concluded),  # type: ignore[arg-type]  # it has what is read of a diagnosis
            }
        first = replace(context, settings=replace(settings, seeds=seeds[:1]))
        settled = decided(first, store, injections)
        found["decided after one seed"] = (sum(settled), len(settled))
    return found


def summed_up(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in DESIGNS:
        rows = [repeat[name] for repeat in repeats]
        result[name] = {
            "samples_of_injections": int(np.mean([row["samples of injections"] for row in rows])),
            "rows": sum(len(row["widths"]["kl"]) for row in rows),
            "median_log_width_of_kl": float(np.median(np.concatenate([row["widths"]["kl"] for row in rows]))),
            "median_width_of_loss": float(np.median(np.concatenate([row["widths"]["loss"] for row in rows]))),
            "agreement": agreement([row["said"] for row in rows]) if len(rows) > 1 else {},
            "top": [row["said"].top for row in rows],
        }
    result["decided after one seed"] = [repeat["decided after one seed"] for repeat in repeats]
    return result


# -- optional stopping, simulated


def missed(share: float, truth: float, factor: float, *, draws: int, seed: int = 0) -> float:
    """How often the printed interval misses the truth, in units of the standard error after one seed.

    `share` of the variance lies between samples. The limit is 0: the first interval that leaves it out is printed.
    """
    rng = np.random.default_rng(seed)
    between = rng.normal(size=draws) * share**0.5
    noise = rng.normal(size=(draws, SEEDS)) * (1 - share) ** 0.5
    looks = [truth + between + noise[:, :1].mean(1), truth + between + noise.mean(1)]
    errors = [1.0, (share + (1 - share) / SEEDS) ** 0.5]
    stops = np.abs(looks[0]) > factor * 1.96 * errors[0]
    miss = [np.abs(look - truth) > factor * 1.96 * error for look, error in zip(looks, errors, strict=True)]
    return float(np.where(stops, miss[0], miss[1]).mean())


def simulated(draws: int) -> dict[str, Mapping[str, float]]:
    found: dict[str, Mapping[str, float]] = {}
    truths = np.linspace(0, 4, 17)
    for share in LIMIT_SHARES:
        worst = max(missed(share, truth, 1.0, draws=draws) for truth in truths)
        factor = next(
            f for f in np.arange(1, 1.3, 0.01) if max(missed(share, t, f, draws=draws) for t in truths) <= 0.0505
        )
        found[f"{share:g}"] = {"worst_miss": worst, "widening_needed": float(factor)}
        print(f"share between samples {share:g}: misses up to {100 * worst:.1f} %; needs x {factor:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, default=demo.test_file())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slice", type=int, default=32, help="samples of a slice")
    parser.add_argument("--step", type=int, default=1, help="of windows")
    parser.add_argument("--simulate", type=int, default=200_000, metavar="DRAWS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started, simulation = time.perf_counter(), simulated(options.simulate)
    subject = ns.load(options.model)
    parts = pieces(ns.read_data(options.data), options.repeats, SLICES * options.slice)
    repeats = []
    for number, part in enumerate(parts):
        repeats.append(one_repeat(subject, part, number, options))
        result = {
            "machine": f"CPU, {torch.get_num_threads()} threads",
            "model": Path(options.model).name,
            "repeats": len(repeats),
            "samples_per_slice": options.slice,
            "seconds": time.perf_counter() - started,
            "optional_stopping": simulation,
            **summed_up(repeats),
        }
        save(options.json, result)
        print(f"{number}: {result['seconds']:.0f} s, decided {repeats[-1]['decided after one seed']}", flush=True)
    for name in DESIGNS:
        print(name, {key: value for key, value in result[name].items() if key != "top"})


if __name__ == "__main__":
    main()
