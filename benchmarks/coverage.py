"""Do intervals hold the truth as often as they say? Simulated, the methods of version 0.1 beside those of today.

    python benchmarks/coverage.py --json benchmarks/results/coverage.json > tables.md

"false" is the share of all runs in which a printed statement is wrong: an interval that leaves the truth out, or a
one-sided bound on the wrong side of it. "refused" is the share of runs without a two-sided interval. Width is the
median of (high - low) / truth over the runs that give both ends. Constants were chosen on other distributions, other
seeds and other problems of the bundled model (`coverage_population.py`) than those used here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import coverage_cases as cases
import numpy as np
import scipy
from scipy import special

from noisescope import stats
from noisescope.stats import continuous, typical
from noisescope.stats.score_arrays import Array

SIZES = (16, 50, 100, 300)
LEVEL = 0.95
Limits = tuple[Array, Array]


def row(limits: Limits, truth: float) -> dict[str, float | None]:
    """Ends at -inf and inf (or a lower end at 0 with an infinite upper one) state nothing on that side."""
    low, high = limits
    given = np.isfinite(high) & np.isfinite(low)
    wrong = (low > truth) | (high < truth)
    return {
        "coverage": round(float(1 - wrong[given].mean()), 4) if given.any() else None,
        "refused": round(float(1 - given.mean()), 4),
        "false": round(float(wrong.mean()), 4),
        "width": round(float(np.median((high - low)[given])) / truth, 3) if given.any() else None,
    }


def ends(estimates: Sequence[stats.Estimate]) -> Limits:
    low = np.array([-np.inf if one.low is None else one.low for one in estimates])
    high = np.array([np.inf if one.high is None else one.high for one in estimates])
    return low, high


def median_limits(values: Array) -> Limits:
    """`stats.median` of each run at once."""
    ranks = typical.rank_limits(values.shape[1], LEVEL)
    assert ranks is not None, f"n = {values.shape[1]} is too small for an interval of the median"
    ordered = np.sort(values, axis=1)
    return ordered[:, ranks[0] - 1], ordered[:, ranks[1] - 1]


def means_and_medians(runs: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for at, case in enumerate(cases.tails()):
        for n in sizes:
            values = case.draw(np.random.default_rng([at, n, 1]), (runs, n))
            methods: list[tuple[str, Limits, float]] = [
                ("mean, v0.1", continuous.mean_limits(values, LEVEL), case.mean),
                ("mean", typical.nonnegative_limits(values, LEVEL), case.mean),
                ("typical", ends([stats.typical(one) for one in values]), case.typical),
                ("median", median_limits(values), case.median),
            ]
            found += [{"case": case.name, "n": n, "method": name, **row(both, t)} for name, both, t in methods]
    return found


def paired_ratios(runs: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for at, case in enumerate(cases.pair_cases()):
        for n in sizes:
            below, above = case.draw(np.random.default_rng([at, n, 2]), (runs, n))
            with np.errstate(all="ignore"):
                old = continuous.ratio_limits(below, above, LEVEL)
            methods = [
                ("ratio of means, v0.1", old, case.of_means),
                ("typical ratio", median_limits(above / below), case.typical),
            ]
            found += [{"case": case.name, "n": n, "method": name, **row(both, t)} for name, both, t in methods]
    return found


def agreement_shares(runs: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The share of tokens on which the noisy model agrees, per sample, of the bundled model."""
    found = []
    for at, (window, columns) in enumerate(cases.population().items()):
        values = columns["agreement"]
        for n in sizes:
            drawn = np.random.default_rng([at, n, 3]).choice(values, (runs, n))
            with np.errstate(all="ignore"):
                old = continuous.mean_limits(drawn, LEVEL)
            new = ends([stats.proportion(one) for one in drawn])
            for name, both in (("mean, v0.1", old), ("share", new)):
                found.append({"case": f"layers {window}", "n": n, "method": name, **row(both, float(values.mean()))})
    return found


def fisher(r: Array, n: int, ranks: bool) -> Limits:
    """The interval of correlations in version 0.1."""
    largest = 1 - 6 / (n**3 - n) if ranks else 1 - 1e-12
    z = np.arctanh(np.clip(r, -largest, largest))
    half = special.ndtri((1 + LEVEL) / 2) * np.sqrt((1 + r**2 / 2 if ranks else np.ones_like(r)) / (n - 3))
    return np.minimum(np.tanh(z - half), r), np.maximum(np.tanh(z + half), r)


def correlations(runs: int) -> list[dict[str, Any]]:
    found = []
    for method, kinds in (
        ("spearman", ("normal", "Student's t, 3 degrees")),
        ("pearson", ("normal", "Student's t, 3 degrees", "lognormal, sigma 1")),
    ):
        for kind in kinds:
            for rho in (0.9, 0.97, 0.99):
                truth = cases.true_correlation(kind, rho, method)
                for n in (6, 10, 14, 30):
                    x, y = cases.correlated_points(np.random.default_rng([n, 4]), kind, rho, (runs, n))
                    made = [stats.correlation(a, b, method=method, permutations=1) for a, b in zip(x, y, strict=True)]
                    value = np.array([one.value for one in made], dtype=float)
                    new = (np.array([one.low for one in made]), np.array([one.high for one in made]))
                    case = {"case": f"{method}, {kind}, {truth:.3f}", "n": n}
                    found.append(
                        {**case, "method": "Fisher, v0.1", **row(fisher(value, n, method == "spearman"), truth)}
                    )
                    found.append({**case, "method": "wider of Fisher and jackknife", **row(new, truth)})
    return found


def selection(runs: int) -> list[dict[str, Any]]:
    """The window picked because it is largest: its ordinary interval and size, and those that allow for the choice."""

    def scored(scores: Callable[..., Any], **how: Any) -> Callable[[Any, int, Array], stats.Selected]:
        return lambda random, n, loss: stats.select_largest(*scores(random, n, loss, **how))

    kinds = {
        "0/1, 3 seeds, overlapping windows": scored(cases.right_or_wrong),
        "0/1, 3 seeds, independent windows": scored(cases.right_or_wrong, overlap=False),
        "continuous, overlapping windows": scored(cases.continuous_scores),
        "continuous, independent windows": scored(cases.continuous_scores, overlap=False),
    }
    found = []
    for at, (kind, pick) in enumerate(kinds.items()):
        for truth in ("equal", "spread", "one leading"):
            loss, random = cases.losses(truth), np.random.default_rng([at, 5])
            made = [pick(random, 100, loss) for _ in range(runs)]
            true = np.array([loss[one.index] for one in made])
            sides = {name: [getattr(one, name) for one in made] for name in ("observed", "estimate")}
            widths = {name: np.subtract(*ends(both)[::-1]) for name, both in sides.items()}
            for name, both in sides.items():
                low, high = ends(both)
                values = np.array([one.value for one in both], dtype=float)
                found.append(
                    {
                        "case": f"{kind}, {truth}",
                        "n": 100,
                        "method": "as observed, v0.1" if name == "observed" else "allowing for the choice",
                        "coverage": round(float(np.mean((low <= true) & (true <= high))), 4),
                        "width_over_uncorrected": round(float(np.median(widths[name] / widths["observed"])), 3),
                        "size_over_truth": round(float(np.mean(values / true)), 3),
                    }
                )
    return found


def ratios_of_losses(runs: int) -> list[dict[str, Any]]:
    """A window's loss over that of its two neighbours, 0/1 scores with 3 seeds and continuous ones."""
    found = []
    for kind, scores in (("0/1, 3 seeds", cases.right_or_wrong), ("continuous", cases.continuous_scores)):
        for above, below in ((0.1, 0.1), (0.15, 0.1), (0.3, 0.1), (0.05, 0.05), (0.3, 0.02)):
            loss = np.full(cases.WINDOWS, below)
            loss[5] = above
            for n in (30, 100, 300):
                random, made = np.random.default_rng([n, 6]), []
                for _ in range(runs):
                    clean, noisy = scores(random, n, loss)
                    beside = np.column_stack([noisy[4], noisy[6]])
                    made.append(stats.degradation_ratio(clean, noisy[5], beside))
                both = row(ends(made), above / below)
                found.append({"case": f"{kind}, {above} over {below}", "n": n, "method": "Fieller, paired", **both})
    return found


def table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Markdown: a line per case and method, a column per n (coverage, refused, false, width)."""
    sizes = sorted({one["n"] for one in rows})
    keys = [key for key in rows[0] if key not in ("case", "n", "method")]
    lines = [f"### {title}", "", "| case | method | " + " | ".join(f"n = {n}: {', '.join(keys)}" for n in sizes) + " |"]
    lines.append("|---|---|" + "---|" * len(sizes))
    for case, method in dict.fromkeys((one["case"], one["method"]) for one in rows):
        cells = []
        for n in sizes:
            match = [one for one in rows if (one["case"], one["method"], one["n"]) == (case, method, n)]
            cells.append(", ".join(shown(key, match[0][key]) for key in keys) if match else "")
        lines.append(f"| {case} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if key in ("coverage", "refused", "false") else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000, help="simulated runs per cell; a quarter where runs are slow")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    few, started = max(options.runs // 4, 1), time.process_time()
    parts: dict[str, list[dict[str, Any]]] = {
        "Mean, typical value and median of KL": means_and_medians(options.runs, SIZES),
        "Ratios": paired_ratios(options.runs, SIZES),
        "Agreement": agreement_shares(options.runs, SIZES),
        "Correlations": correlations(few),
        "The largest of fourteen windows": selection(few),
        "Ratio of two losses": ratios_of_losses(few),
    }
    for title, rows in parts.items():
        print(table(rows, title))
    if options.json is not None:
        about = {
            "runs": options.runs,
            "runs_of_correlations_selection_and_losses": few,
            "level": LEVEL,
            "machine": f"{os.cpu_count()} shared {platform.machine()} cores, one thread",
            "versions": {"numpy": np.__version__, "scipy": scipy.__version__},
            "processor_seconds": round(time.process_time() - started),
        }
        text = json.dumps({**about, **parts}, indent=None).replace('{"case"', '\n{"case"')
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"{about['processor_seconds']} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    main()
