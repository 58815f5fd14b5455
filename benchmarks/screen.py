"""The Fisher screen against a brute-force sweep: does one forward with two draws rank what injection measures?

    python benchmarks/screen.py --model SMOLLM2_FOLDER --data GSM8K.jsonl --device cuda --json results/screen_h200.json
    python benchmarks/screen.py --model SMOLLM2_FOLDER --data GSM8K.jsonl --items 4 --seeds 0    # its cost alone

Swept, at noise of scale 0.05, with every seed on all tokens: layers, layer x operator, groups of linears as a serving
engine fuses them, and a sample of channels. Measured is the mean KL(clean || noisy) per token; predicted is the same
number from the screen. Timed: a whole screen trial and a clean forward, in interleaved pairs. Not timed: loading,
tokenising, the first calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from overhead import Run, compare, host_seconds, show
from screen_setup import (
    SCALE,
    Array,
    Cell,
    agreement,
    cells_of,
    channel_cell,
    channel_cells,
    frame_of,
    predict,
    read_material,
    run_screen,
    save,
)

import noisescope as ns
from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.runs.trial_runner import TrialRunner
from noisescope.trials import Result

SCREEN_SEEDS = 4  # screens with other draws, to show how much depends on the draw
CHOOSING_SEED = 1000  # channels are chosen by a screen of its own, or the best would be those it overrates
_OPEN: list[tuple[TrialRunner, StudyContext]] = []  # of this process: workers load the model once
TARGETS = {"layer: linear": 0.98, "layer: gemm": 0.98, "layer x operator": 0.98, "channel": 0.95}


def report(cells: list[Cell], screens: dict[tuple[int, int], Screened], measured: Array) -> dict[str, Any]:
    """measured [seeds, cells]: KL per token."""
    predicted = {key: np.array([predict(found, cell) for cell in cells]) for key, found in screens.items()}
    levels = []
    parts = {level: [cell.level == level for cell in cells] for level in dict.fromkeys(cell.level for cell in cells)}
    for part in sorted({cell.part for cell in cells if cell.part}):
        parts[f"channel, {part}"] = [cell.part == part for cell in cells]
    for level, chosen in parts.items():
        rows = np.flatnonzero(chosen)
        row = {"level": level, **agreement(predicted[2, 0][rows], measured[:, rows])}
        row["draws"] = {draws: [] for draws, _ in predicted}
        for (draws, _), values in predicted.items():
            row["draws"][draws].append(_short(agreement(values[rows], measured[:, rows])))
        target = TARGETS.get(level)
        if target is not None:
            row["target"] = min(target, row["split_half"]) if row["split_half"] is not None else target
            row["met"] = row["spearman"] is not None and row["spearman"] >= row["target"]
        levels.append(row)
    table = [
        {
            "level": cell.level,
            "cell": cell.name,
            **({"part": cell.part} if cell.part else {}),
            "predicted": _digits(predicted[2, 0][at]),
            "measured": [_digits(value) for value in measured[:, at]],
        }
        for at, cell in enumerate(cells)
    ]
    return {"levels": levels, "cells": table}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("spearman", "within_25_percent", "median_ratio")}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def print_levels(levels: list[dict[str, Any]]) -> None:
    print(f"\n{'level':<20}{'n':>4} {'Spearman':>9} {'split-half':>10} {'logs':>7} {'<= 25 %':>8} {'ratio':>6}")
    for row in levels:
        half = "" if row["split_half"] is None else f"{row['split_half']:.4f}"
        verdict = "" if "target" not in row else f"  target {row['target']:.3f}: {'met' if row['met'] else 'NOT met'}"
        print(
            f"{row['level']:<20}{row['n']:>4} {row['spearman']:>9.4f} {half:>10} {row['pearson_of_logs']:>7.4f} "
            f"{row['within_25_percent']:>8.2f} {row['median_ratio']:>6.3f}{verdict}"
        )
        for draws, several in row["draws"].items():
            ranks = [one["spearman"] for one in several]
            share = statistics.median(one["within_25_percent"] for one in several)
            print(f"    {draws} draws: Spearman {min(ranks):.4f} to {max(ranks):.4f}, <= 25 %: {share:.2f}")


def cost(runner: TrialRunner, context: StudyContext, pairs: int) -> list[dict[str, Any]]:
    """The screen's time over that of a clean forward of all samples in one batch."""
    (material,) = runner.materials.values()
    tokens = torch.tensor([group[0].ids for group in material.encoded.sequences], device=runner.device)

    def clean(size: int | None = None) -> None:
        with torch.no_grad():
            for part in torch.split(tokens, size or len(tokens)):
                runner.model(input_ids=part, use_cache=False)
        _wait(runner)

    def screening() -> None:
        run_screen(runner, context, draws=2, seed=0)
        _wait(runner)

    arms = {
        "clean forward, in four batches": lambda: clean(-(-len(tokens) // 4)),
        "screen, 2 draws": screening,
    }
    alone = runner.device.type == "cpu" and torch.get_num_threads() == 1
    rows = compare(arms, clean, pairs, processor_seconds if alone else host_seconds)
    show(f"{'processor' if alone else 'wall'} time over that of a clean forward", rows, {"screen, 2 draws": 5.0})
    return rows


def processor_seconds(run: Run) -> float:
    """Processor time: on one thread it is what an idle machine would need, whatever runs beside."""
    start = time.process_time()
    run()
    return time.process_time() - start


def _wait(runner: TrialRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize()


def open_bench(options: argparse.Namespace) -> tuple[TrialRunner, StudyContext]:
    """Model and text; the runner is not entered yet."""
    torch.set_float32_matmul_precision("highest")
    if options.threads:
        torch.set_num_threads(options.threads)
    subject = ns.load(options.model, dtype="float32", device=options.device)
    material = read_material(subject.tokenizer, options.data, options.items, options.length)
    return TrialRunner(subject, [material]), frame_of(subject, material, options.seeds)


def sweep_seeds(options: argparse.Namespace, cells: list[Cell], seeds: range) -> Iterator[tuple[Array, float]]:
    """KL per token [cells] and forwards of each seed, in this process or in several beside each other."""
    if options.workers == 1:
        yield from (sweep(options, cells, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(sweep, itertools.repeat(options), itertools.repeat(cells), seeds)


def swept_before(result: dict[str, Any], cells: list[Cell]) -> list[Array]:
    """The seeds of an earlier run of the same cells."""
    table = result.get("cells", [])
    if [(row["level"], row["cell"]) for row in table] != [(cell.level, cell.name) for cell in cells]:
        return []
    return list(np.array([row["measured"] for row in table]).T)


def chosen_channels(
    runner: TrialRunner, context: StudyContext, options: argparse.Namespace, result: dict[str, Any]
) -> list[Cell]:
    """The channels of an earlier run, if any: rounding changes a prediction, and with it the choice."""
    rows = [row for row in result.get("cells", []) if row["level"] == "channel"]
    if rows:
        named = [(*row["cell"].rsplit(" ", 1), row["part"]) for row in rows]
        return [channel_cell(context, module, int(channel), part) for module, channel, part in named]
    chooser = run_screen(runner, context, draws=2, seed=CHOOSING_SEED)
    return channel_cells(context, chooser, options.layers, options.channels)


def sweep(options: argparse.Namespace, cells: list[Cell], seed: int) -> tuple[Array, float]:
    """One seed; cells that ask the same are run once."""
    if not _OPEN:
        runner, context = open_bench(options)
        _OPEN.append((runner.__enter__(), context))
    runner, context = _OPEN[0]
    known: dict[str, Result] = {}
    rows = []
    before = runner.forwards
    for cell in cells:
        (trial,) = context.ask(cell.injection, seeds=[seed])
        if trial.id not in known:
            known[trial.id] = runner.run(trial)
        result = known[trial.id]
        if result.failed:
            raise SystemExit(f"{cell.level} {cell.name}: {result.error}")
        rows.append(np.mean(np.array(result.values["kl"], dtype=np.float64)))
    return np.array(rows), runner.forwards - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M")
    parser.add_argument("--data", required=True, type=Path, help="GSM8K as JSONL with question and answer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--items", type=int, default=36)
    parser.add_argument("--length", type=int, default=128, help="tokens of an item; all but the first are scored")
    parser.add_argument("--seeds", type=int, default=8, help="0: no sweep")
    parser.add_argument("--layers", type=int, default=10**6, help="sweep only so many layers")
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10, help="timed pairs; 0: no timing")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds of the sweep")
    parser.add_argument("--json", type=Path, help="results; seeds of a sweep that it holds already are not run again")
    options = parser.parse_args()

    runner, context = open_bench(options)
    machine = (
        torch.cuda.get_device_name()
        if options.device.startswith("cuda")
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    result: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": {"name": "SmolLM2-135M-Instruct", "fingerprint": context.conditions.model, "dtype": "float32"},
        "data": {"name": "GSM8K test", "items": options.items, "tokens": options.length,
                 "scored_tokens": options.items * (options.length - 1)},
        "noise": f"Gaussian({SCALE}), relative to each element, on outputs",
    }  # fmt: skip
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}; {result['data']}")
    earlier = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if {**earlier, **result} == earlier:
        result = earlier
    with runner:
        _OPEN.append((runner, context))
        if options.pairs:
            result["cost"] = cost(runner, context, options.pairs)
        if options.seeds:
            against_sweep(runner, context, options, result)
        result["notes"] = runner.notes
    save(options.json, result)


def against_sweep(
    runner: TrialRunner, context: StudyContext, options: argparse.Namespace, result: dict[str, Any]
) -> None:
    started = time.perf_counter()
    screens = {(2, 0): run_screen(runner, context, draws=2, seed=0)}
    result["screen"] = {"seconds": time.perf_counter() - started, "forwards": 1, "backwards": 2}
    for draws, seed in itertools.product((1, 2, 4), range(SCREEN_SEEDS)):
        screens[draws, seed] = run_screen(runner, context, draws=draws, seed=seed)
    cells = cells_of(context, options.layers) + chosen_channels(runner, context, options, result)
    swept = swept_before(result, cells)
    forwards, before = (result["sweep"][name] for name in ("forwards", "seconds")) if swept else (0.0, 0.0)
    started = time.perf_counter()
    for found, counted in sweep_seeds(options, cells, range(len(swept), options.seeds)):
        swept.append(found)
        forwards, seconds = forwards + counted, before + time.perf_counter() - started
        print(f"{len(swept)} seeds: {len(cells)} cells, {seconds:.1f} s so far", flush=True)
        result["sweep"] = {"seeds": len(swept), "seconds": seconds, "forwards": forwards, "workers": options.workers}
        result |= report(cells, screens, np.stack(swept))
        save(options.json, result)  # after every seed: a sweep is long
    print_levels(result["levels"])
    print(f"screen {result['screen']}\nsweep {result['sweep']}")


if __name__ == "__main__":
    main()
