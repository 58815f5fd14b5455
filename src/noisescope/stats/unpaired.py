"""The difference of two means, or of two medians, over different samples: pairs, where there are any, are sharper."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from noisescope.estimate import NOT_MEASURABLE, Estimate
from noisescope.stats.continuous import bisect
from noisescope.stats.intervals import mean
from noisescope.stats.multiple_comparisons import simultaneous_level
from noisescope.stats.samples import Array

Centre = Callable[[Array, float], Estimate]  # of values [samples, seeds], at a level


def unpaired(x: Array, y: Array, *, level: float = 0.95, centre: Centre = mean) -> Estimate:
    """centre(y) - centre(x) of different samples [samples, seeds], from the interval of each.

    Each end is the value plus or minus the root of the squared distances to the ends that pull that way: with Wilson's
    intervals that is Newcombe's method 10, and it holds for skewed means and for medians, too. n is that of the smaller
    set.

    R. G. Newcombe (1998), Statistics in Medicine 17, 873-890; G. Y. Zou, A. Donner (2008), ibid. 27, 1693-1702.
    """
    first, second = centre(x, level), centre(y, level)
    n = min(first.n, second.n)
    if first.value is None or second.value is None:
        return Estimate(None, None, None, n, level, NOT_MEASURABLE)
    value, down, up = second.value - first.value, 0.0, 0.0
    if first.low is not None and first.high is not None and second.low is not None and second.high is not None:
        down = math.hypot(second.value - second.low, first.high - first.value)
        up = math.hypot(second.high - second.value, first.value - first.low)
    if not down and not up:  # unknown, or nothing varies: an interval without width would be certain of anything
        return Estimate(value, None, None, n, level, "unpaired")
    return Estimate(value, value - down, value + up, n, level, "unpaired")


def unpaired_p(x: Array, y: Array, *, centre: Centre = mean) -> float:
    """Two-sided p of "both are the same": 1 less the highest level at which the interval leaves 0 out."""

    def leaves_zero_out(exponent: float) -> bool:
        found = unpaired(x, y, level=1 - 10.0**exponent, centre=centre)
        return found.above(0.0) or found.below(0.0)

    lowest, highest = -12.0, -1e-9  # p as a power of ten
    if not leaves_zero_out(highest):
        return 1.0
    exponent, _ = bisect(lambda at: leaves_zero_out(float(at)), highest, lowest, steps=30)
    return min(1.0, float(10.0 ** float(exponent)))


def smallest_unpaired(difference: Estimate, comparisons: int, *, power: float = 0.8) -> float | None:
    """The smallest difference that would have been found with probability `power`, from the width of its interval."""
    if difference.low is None or difference.high is None:
        return None
    normal = NormalDist()
    error = (difference.high - difference.low) / 2 / normal.inv_cdf((1 + difference.level) / 2)
    wanted = normal.inv_cdf((1 + simultaneous_level(comparisons)) / 2) + normal.inv_cdf(power)
    return float(wanted * error) or None
