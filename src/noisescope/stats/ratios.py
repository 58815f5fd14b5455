"""Two losses of one score, compared on the same samples: their ratio, and by how much one exceeds the other.

For a ratio of divergences see `typical_ratio` (quantiles.py), which holds for every tail.

E. C. Fieller (1954), "Some problems in interval estimation", J. R. Stat. Soc. B 16, 175-185.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from noisescope.stats import continuous
from noisescope.stats.estimate import Array, Estimate, checked_level, pairs
from noisescope.stats.intervals import around, difference, unchanged, unseen_error

NO_LOSS_BELOW = "the loss it is compared with does not stand clear of 0"


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
