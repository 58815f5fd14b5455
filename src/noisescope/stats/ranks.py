"""Agreement between two profiles over the same places: correlations, and how well a sweep agrees with itself."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput, unknown
from noisescope.stats.estimate import NOT_MEASURABLE, Array, checked_level, pairs, scores

METHODS = ("spearman", "pearson")


@dataclass(frozen=True)
class Correlation:
    """A correlation with its interval and the p of "no relation"; None where it can't be computed."""

    method: str
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    level: float = 0.95
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("method", "value", "low", "high", "p", "n", "level")}
        return {**plain, "note": self.note} if self.note else plain


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    *,
    method: str = "spearman",
    every: int = 1,
    level: float = 0.95,
    permutations: int = 9999,
    seed: int = 0,
) -> Correlation:
    """Spearman's or Pearson's correlation of two profiles, one number per layer or window.

    Neighbouring windows that share layers are no independent points: the textbook p, a permutation p and Fisher's
    interval all count each layer several times over. Give `every` = the window's size to keep only windows that share
    none; n is what is left. The p is by permutation (seeded), which needs no normal values, only points that could be
    exchanged; the interval is Fisher's z with error 1 / sqrt(n - 3), for Spearman sqrt((1 + r^2 / 2) / (n - 3)) (Bonett
    and Wright 2000), and None below 4 points. A constant profile has no correlation: value None.
    """
    if method not in METHODS:
        raise unknown("correlation", method, METHODS)
    if every < 1:
        raise InvalidInput(f"every must be at least 1 (keep each point), got {every}")
    level = checked_level(level)
    raw_x, raw_y = pairs(x, y, ("x", "y"))
    a, b = raw_x.mean(axis=1)[::every], raw_y.mean(axis=1)[::every]
    n = len(a)
    if method == "spearman":
        a, b = ranked(a), ranked(b)
    a, b = _unit(a), _unit(b)
    if not a.any() or not b.any():
        return Correlation(method, None, None, None, None, n, level, NOT_MEASURABLE)
    value = float(np.clip(a @ b, -1, 1))
    shuffled = np.random.default_rng(seed).permuted(np.tile(b, (permutations, 1)), axis=1) @ a
    p = float((1 + np.count_nonzero(np.abs(shuffled) >= abs(value) - 1e-12)) / (1 + permutations))
    low, high = _fisher(value, n, method, level)
    return Correlation(method, value, low, high, p, n, level)


def split_half_agreement(sweep: ArrayLike, *, splits: int = 100, seed: int = 0) -> float | None:
    """Mean Spearman correlation between the profiles of two halves of the seeds; rows are seeds, columns are sites.

    It says how well a ranking from half the seeds can be repeated, and so bounds what any prediction can reach against
    this sweep. All ways to halve the seeds are used if there are at most `splits`, else so many are drawn; of an odd
    number of seeds one half has one more. None where a half ranks all sites alike.
    """
    rows = scores(sweep, "sweep")
    seeds, sites = rows.shape
    if seeds < 2 or sites < 2:
        raise InvalidInput(f"split halves need at least 2 seeds (rows) and 2 sites (columns); got {rows.shape}")
    values = []
    for half in _halves(seeds, splits, seed):
        inside = np.isin(np.arange(seeds), half)
        a, b = (_unit(ranked(rows[which].mean(axis=0))) for which in (inside, ~inside))
        if not a.any() or not b.any():
            return None
        values.append(float(a @ b))
    return math.fsum(values) / len(values)


def ranked(values: Array) -> Array:
    """Ranks from 1 on; ties share the mean of their ranks."""
    ordered = np.sort(values)
    ranks: Array = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    return ranks


def _halves(seeds: int, splits: int, seed: int) -> list[tuple[int, ...]]:
    size = seeds // 2
    if math.comb(seeds, size) <= 2 * splits:  # halves of an even number come in pairs, which changes no mean
        return list(itertools.combinations(range(seeds), size))
    generator = np.random.default_rng(seed)
    return [tuple(generator.permutation(seeds)[:size].tolist()) for _ in range(splits)]


def _unit(values: Array) -> Array:
    """Centred and of length 1, or all 0 for a constant."""
    centred = values - values.mean()
    length = float(np.sqrt(centred @ centred))
    if length <= 1e-12 * max(float(np.abs(values).max()), 1e-300):
        return np.zeros_like(centred)
    unit: Array = centred / length
    return unit


def _fisher(value: float, n: int, method: str, level: float) -> tuple[float | None, float | None]:
    if n < 4:
        return None, None
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    variance = (1 + value**2 / 2 if method == "spearman" else 1.0) / (n - 3)
    # z is infinite at 1. Ranks in perfect order stand for all correlations nearer to 1 than the next possible one,
    # 1 - 12 / (n^3 - n): take the middle.
    largest = 1 - 6 / (n**3 - n) if method == "spearman" else 1 - 1e-12
    z = math.atanh(max(-largest, min(largest, value)))
    low, high = (math.tanh(z + side * quantile * math.sqrt(variance)) for side in (-1, 1))
    return min(low, value), max(high, value)
