"""Agreement between two profiles over the same places: correlations, and whether a single point causes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from noisescope.errors import InvalidInput, unknown
from noisescope.estimate import NOT_MEASURABLE
from noisescope.stats.score_arrays import Array, checked_level, pairs

METHODS = ("spearman", "pearson")


@dataclass(frozen=True)
class Correlation:
    """A correlation with its interval and the p of "no relation"; None if it can't be computed."""

    method: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int = 0
    level: float = 0.95
    note: str = ""


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
    exchanged; the interval (`_limits`) is None below 4 points. A constant profile has no correlation: value None.
    """
    if every < 1:
        raise InvalidInput(f"every must be at least 1 (keep every point), got {every}")
    level = checked_level(level)
    a, b = (profile[::every] for profile in _profiles(x, y, method))
    n = len(a)
    low, high = _limits(a, b, method, level)
    a, b = _prepared(a, method), _prepared(b, method)
    if not a.any() or not b.any():
        return Correlation(method, n=n, level=level, note=NOT_MEASURABLE)
    value = float(np.clip(a @ b, -1, 1))
    shuffled = np.random.default_rng(seed).permuted(np.tile(b, (permutations, 1)), axis=1) @ a
    p = float((1 + np.count_nonzero(np.abs(shuffled) >= abs(value) - 1e-12)) / (1 + permutations))
    return Correlation(method, value, low, high, p, n, level)


@dataclass(frozen=True)
class Influence:
    """A correlation without its most influential point."""

    index: int  # of that point
    without: float


def influence(x: ArrayLike, y: ArrayLike, *, method: str = "spearman") -> Influence | None:
    """The point whose removal brings the correlation nearest to 0, and the correlation without it.

    A correlation of 0.9 that is 0.2 without one point is a statement about that point. None where there is no
    correlation to begin with, or below 4 points.

    >>> influence([1, 2, 3, 4, 100], [2, 1, 4, 3, 90], method="pearson")
    Influence(index=4, without=0.6)
    """
    a, b = _profiles(x, y, method)
    whole = float(_prepared(a, method) @ _prepared(b, method))
    if len(a) < 4 or not whole:
        return None
    left = np.sign(whole) * _left_out(a, b, method)
    index = int(np.argmin(left))
    return Influence(index, round(float(np.sign(whole) * left[index]), 12))


def _profiles(x: ArrayLike, y: ArrayLike, method: str) -> tuple[Array, Array]:
    if method not in METHODS:
        raise unknown("correlation", method, METHODS)
    a, b = pairs(x, y, ("x", "y"))
    return a.mean(axis=1), b.mean(axis=1)


def ranked(values: Array) -> Array:
    """Ranks from 1 on; ties share the mean of their ranks."""
    ordered = np.sort(values)
    ranks: Array = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2
    return ranks


def _unit(values: Array) -> Array:
    """Centred and of length 1, or all 0 for a constant."""
    centred = values - values.mean()
    length = float(np.sqrt(centred @ centred))
    if length <= 1e-12 * max(float(np.abs(values).max()), 1e-300):
        return np.zeros_like(centred)
    unit: Array = centred / length
    return unit


def _prepared(values: Array, method: str) -> Array:
    return _unit(ranked(values) if method == "spearman" else values)


def _left_out(a: Array, b: Array, method: str) -> Array:
    """The correlation without each point in turn."""
    keep = ~np.eye(len(a), dtype=bool)
    return np.array([float(_prepared(a[k], method) @ _prepared(b[k], method)) for k in keep])


def _limits(a: Array, b: Array, method: str, level: float) -> tuple[float | None, float | None]:
    """The wider of two intervals in Fisher's z = atanh(r), n >= 4.

    - Fisher's, with error 1 / sqrt(n - 3), for Spearman sqrt((1 + r^2 / 2) / (n - 3)) (Bonett and Wright 2000). Near 1
      it is too narrow for ranks (82 to 88 % at rho = 0.99, n = 10 to 30), and for Pearson wherever the values have
      heavy tails (under 60 % for lognormal values with sigma 2): its error knows nothing of the points.
    - The jackknife's: the spread of the n values that leave one point out, with Student's quantile for n - 2 degrees of
      freedom. By itself it is too narrow for few ranks in perfect order.

    Ranks move in steps; a half of the smallest step, 6 / (n^3 - n), is added at both ends for Spearman. Coverage is in
    benchmarks/README.md ("Coverage of intervals"). Nothing mends Pearson where a few points carry it: see `influence`.

    R. G. Miller (1974), "The jackknife: a review", Biometrika 61, 1-15.
    D. G. Bonett, T. A. Wright (2000), Psychometrika 65, 23-28.
    """
    n = len(a)
    value = float(np.clip(_prepared(a, method) @ _prepared(b, method), -1, 1))
    if n < 4:
        return None, None
    ranks = method == "spearman"
    step = 6 / (n**3 - n) if ranks else 0.0
    # z is infinite at 1. Ranks in perfect order stand for all correlations nearer to 1 than the next possible one,
    # 1 - 2 step: take the middle.
    largest = 1 - step if ranks else 1 - 1e-12
    z = math.atanh(max(-largest, min(largest, value)))
    fisher = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((1 + value**2 / 2 if ranks else 1.0) / (n - 3))
    without = np.arctanh(np.clip(_left_out(a, b, method), -largest, largest))
    error = math.sqrt((n - 1) * float(np.var(without)))
    half = max(fisher, float(special.stdtrit(n - 2, (1 + level) / 2)) * error)
    low, high = math.tanh(z - half) - step, math.tanh(z + half) + step
    return max(min(low, value), -1.0), min(max(high, value), 1.0)
