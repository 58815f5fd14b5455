"""Ratios of two quantities measured on the same samples.

Which one to print: `typical_ratio` (quantiles.py) holds for every tail and says what happens in a typical sample;
`ratio` says what happens to the mean, which the few largest samples decide, and often can give no interval.
`degradation_ratio` and `degradation_excess` compare two losses of one score.

E. C. Fieller (1954), "Some problems in interval estimation", J. R. Stat. Soc. B 16, 175-185.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from noisescope.stats import continuous
from noisescope.stats.estimate import NOT_MEASURABLE, Array, Estimate, checked_level, nonnegative, pairs
from noisescope.stats.intervals import around, difference, unchanged, unseen_error

WIDEST = 20.0  # an interval of a ratio that spans more than this factor is refused
FEW_DECIDE = "the largest samples decide this ratio of means; no interval holds"
FEW_DECIDE_ABOVE = "the largest samples decide this ratio of means; only a lower bound holds"
NOTHING_ABOVE = "the numerator is 0 in every sample"
NO_LOSS_BELOW = "the loss it is compared with does not stand clear of 0"


def ratio(numerator: ArrayLike, denominator: ArrayLike, *, level: float = 0.95) -> Estimate:
    """mean(numerator) / mean(denominator) of paired values of at least 0.

    The interval is Fieller's, the smallest that holds Student's and Hall's (`continuous.py`), with degrees of freedom
    from the number of pairs that carry the variance (`continuous.heavy_quantile`). Where it spans more than a factor of
    20 the upper end is None, and so is the lower one unless it is above 0; the note says so.

    The interaction index is `ratio(kl_of_the_window, sum_of_the_kls_of_its_layers)`, per sample on both sides.

    >>> ratio([2.0, 4.1, 6.2, 7.9, 10.1, 12.0], [1, 2, 3, 4, 5, 6]).method
    'ratio of means'
    >>> ratio([1, 1, 1, 1, 1, 90], [1, 1, 1, 1, 1, 1]).note
    'the largest samples decide this ratio of means; no interval holds'
    """
    raw_x, raw_y = pairs(denominator, numerator, ("denominator", "numerator"))
    x, y = nonnegative(raw_x, "denominator").mean(axis=1), nonnegative(raw_y, "numerator").mean(axis=1)
    level, n = checked_level(level), len(x)
    if not x.any():
        return Estimate(None, None, None, n, level, NOT_MEASURABLE)
    value = float(y.mean() / x.mean())
    if not y.any():
        return Estimate(value, None, None, n, level, NOTHING_ABOVE)
    if n < 2:
        return Estimate(value, None, None, n, level)
    low, high = (float(end) for end in ratio_of_means_limits(x, y, level))
    if math.isfinite(high):
        return Estimate(value, low, high, n, level, "", "ratio of means")
    if low > 0:
        return Estimate(value, low, None, n, level, FEW_DECIDE_ABOVE, "at least")
    return Estimate(value, None, None, n, level, FEW_DECIDE)


def ratio_of_means_limits(x: Array, y: Array, level: float) -> tuple[Array, Array]:
    """Both ends of mean(y) / mean(x) over the last axis; infinite where the upper end is refused, 0 for the lower."""
    centre = y.mean(axis=-1) / x.mean(axis=-1)
    spread = np.ptp(y - centre[..., np.newaxis] * x, axis=-1)
    same = spread <= 1e-12 * (np.abs(x).max(axis=-1) + np.abs(y).max(axis=-1))
    low, high = continuous.ratio_limits(x, y, level, continuous.heavy_quantile(x, y, level))
    n = x.shape[-1]
    half = continuous.student_quantile(n, level) * centre / (n + 2)  # the same in all pairs: see unseen_error
    low, high = np.where(same, centre - half, low), np.where(same, centre + half, high)
    low = np.maximum(low, 0.0)
    return low, np.where(high <= WIDEST * low, high, np.inf)


def degradation_ratio(clean: ArrayLike, noisy: ArrayLike, beside: ArrayLike, *, level: float = 0.95) -> Estimate:
    """(clean - noisy) / (clean - beside): how many times the loss of `beside` the loss of `noisy` is, same samples.

    Fieller's interval of the paired losses. Seeds are averaged within a sample, so `beside` may hold the columns of
    several neighbours. Where the loss of `beside` does not stand clear of 0 there is no interval: use
    `degradation_excess` to decide.

    >>> clean = [1.0] * 20
    >>> found = degradation_ratio(clean, [0, 1] * 10, [0, 1, 1, 1] * 5)
    >>> found.value, found.above(1)
    (2.0, True)
    """
    x, a, b, level = _losses(clean, noisy, beside, level)
    above, below, n = x - a, x - b, len(x)
    value = float(above.mean() / below.mean()) if below.mean() > 0 else None
    if not difference(clean, beside, level=level).above(0.0):
        return Estimate(value, None, None, n, level, NO_LOSS_BELOW)
    if value is not None and unchanged(below, above, value):
        half = continuous.student_quantile(n, level) * unseen_error(x) / float(below.mean())
        return around(value, half, n, level, "paired ratio")
    ends = (float(end) for end in continuous.ratio_limits(below, above, level))
    low, high = (end if math.isfinite(end) else None for end in ends)
    return Estimate(value, low, high, n, level, "", "paired ratio")


def degradation_excess(
    clean: ArrayLike, noisy: ArrayLike, beside: ArrayLike, *, factor: float = 1.0, level: float = 0.95
) -> Estimate:
    """Mean of (clean - noisy) - factor (clean - beside): above 0 where the loss is more than `factor` times the other.

    It has an interval also where `beside` loses nothing. In the score's own unit (0.1 is ten answers of a hundred).

    >>> found = degradation_excess([1.0] * 40, [0, 1] * 20, [1] * 39 + [0], factor=1.5)
    >>> round(found.value, 4), found.above(0)
    (0.4625, True)
    """
    x, a, b, level = _losses(clean, noisy, beside, level)
    d, n = (x - a) - factor * (x - b), len(x)
    value, method = float(d.mean()), "paired difference"
    if n < 2:
        return Estimate(value, None, None, n, level)
    if np.ptp(d) <= 1e-12 * (np.abs(x).max() + 1):
        half = continuous.student_quantile(n, level) * unseen_error(x)
        return (
            Estimate(value, value - half, value + half, n, level, "", method)
            if half
            else Estimate(value, None, None, n, level)
        )
    low, high = continuous.mean_limits(d, level)
    return Estimate(value, float(low), float(high), n, level, "", method)


def _losses(clean: ArrayLike, noisy: ArrayLike, beside: ArrayLike, level: float) -> tuple[Array, Array, Array, float]:
    x, a = pairs(clean, noisy)
    _, b = pairs(clean, beside, ("clean", "beside"))
    return x.mean(axis=1), a.mean(axis=1), b.mean(axis=1), checked_level(level)
