"""Medians with intervals that hold for every distribution.

Of n independent samples the number that lie at or below the true median is binomial (n, 1/2), whatever the values
are. So the order statistics X(l) and X(u) enclose the median with a probability that is a sum of binomial terms:

    P(X(l) > median) <= P(B <= l - 1) <= alpha / 2,    P(X(u) < median) <= P(B >= u) <= alpha / 2.

l is the largest rank for which this holds, and u = n + 1 - l the smallest. No tail can break the interval,
neither can ties (they only make it hold more often). Whole ranks make the true level a little higher than the nominal
one: at nominal 95 % it is 97.9, 96.7, 96.5 and 95.7 % at n = 16, 50, 100 and 300, and above 99 % at n = 8 alone.

W. R. Thompson (1936), "On confidence ranges for the median and other expectation distributions for populations of
unknown distribution form", Annals of Mathematical Statistics 7, 122-128.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from noisescope.stats.estimate import (
    NOT_MEASURABLE,
    UNBOUNDED,
    Array,
    Estimate,
    checked_level,
    nonnegative,
    pairs,
    scores,
)


def median(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The median over samples with its exact interval; no interval below 6 samples (at 95 %).

    Half of the samples lie above it. Seeds are averaged within a sample first.

    >>> estimate = median([3, 1, 4, 1, 5, 9, 2, 6])
    >>> estimate.value, estimate.low, estimate.high
    (3.5, 1.0, 9.0)
    """
    return _of_sorted(np.sort(scores(values, "values").mean(axis=1)), level, "median")


def typical_ratio(above: ArrayLike, below: ArrayLike, level: float = 0.95) -> Estimate:
    """The median over samples of above / below, with the exact interval of a median.

    It answers "by what factor does a typical sample differ" and needs nothing of the tails, where a ratio of means is
    decided by the few largest samples. It is not the ratio of the means, and where `below` is itself a noisy estimate
    its errors are in the answer (the median of x / (y e) is not the median of x / y unless e has median 1).

    x / 0 counts as larger than every number. 0 / 0 says nothing: such samples are left out, and the note counts them.

    >>> estimate = typical_ratio([2, 4, 6, 8, 10, 12, 0], [1, 2, 3, 4, 5, 6, 0])
    >>> estimate.value, estimate.n, estimate.note
    (2.0, 6, '1 of 7 samples left out: 0 on both sides')
    """
    raw_x, raw_y = pairs(below, above, ("below", "above"))
    x, y = nonnegative(raw_x, "below").mean(axis=1), nonnegative(raw_y, "above").mean(axis=1)
    known = (x > 0) | (y > 0)
    with np.errstate(divide="ignore", over="ignore"):
        ratios = np.sort(y[known] / x[known])
    dropped = len(x) - len(ratios)
    note = f"{dropped} of {len(x)} samples left out: 0 on both sides" if dropped else ""
    if not len(ratios):
        return Estimate(None, None, None, 0, checked_level(level), NOT_MEASURABLE)
    return _of_sorted(ratios, level, "median ratio", note)


def rank_limits(n: int, level: float) -> tuple[int, int] | None:
    """Ranks (from 1) of the order statistics that enclose the median; None where n is too small.

    >>> rank_limits(16, 0.95), rank_limits(5, 0.95)
    ((4, 13), None)
    """
    low = int(np.count_nonzero(special.bdtr(np.arange(n), n, 0.5) <= (1 - level) / 2))  # P(B <= k), k = 0 .. n - 1
    return (low, n + 1 - low) if low else None


def _of_sorted(ordered: Array, level: float, method: str, note: str = "") -> Estimate:
    """The median of sorted values, which may end in infinities."""
    level, n = checked_level(level), len(ordered)
    left, right = ordered[(n - 1) // 2], ordered[n // 2]
    value = float(left + (right - left) / 2) if right < np.inf else None
    ranks = rank_limits(n, level)
    notes = [note, UNBOUNDED if value is None else ""]
    if ranks is None:
        needed = math.ceil(math.log2(2 / (1 - level)))
        notes.append(f"an interval at {100 * level:.4g} % takes {needed} samples")
        return Estimate(value, None, None, n, level, "; ".join(filter(None, notes)))
    low, high = (None if ordered[rank - 1] == np.inf else float(ordered[rank - 1]) for rank in ranks)
    named = method if low is not None or high is not None else ""
    return Estimate(value, low, high, n, level, "; ".join(filter(None, notes)), named)
