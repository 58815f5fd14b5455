"""The difference of two means over different samples. For the same samples stats.difference is sharper."""

from __future__ import annotations

import math
from statistics import NormalDist

from noisescope import stats
from noisescope.diagnosis.frame import Array


def unpaired(x: Array, y: Array, *, level: float = 0.95) -> stats.Estimate:
    """mean(y) - mean(x) of different samples [samples, seeds], from the interval of each mean.

    Each end is the value plus or minus the root of the squared distances to the ends that pull that way: with Wilson's
    intervals that is Newcombe's method 10, and it holds for skewed means, too. n is that of the smaller set.

    R. G. Newcombe (1998), Statistics in Medicine 17, 873-890; G. Y. Zou, A. Donner (2008), ibid. 27, 1693-1702.
    """
    first, second = stats.mean(x, level=level), stats.mean(y, level=level)
    n = min(first.n, second.n)
    if first.value is None or second.value is None or None in (first.low, first.high, second.low, second.high):
        return stats.Estimate(float(y.mean() - x.mean()), None, None, n, level, "unpaired")
    value = second.value - first.value
    down = math.hypot(second.value - (second.low or 0.0), (first.high or 0.0) - first.value)
    up = math.hypot((second.high or 0.0) - second.value, first.value - (first.low or 0.0))
    if not down and not up:  # nothing varies: an interval without width would be sure of anything
        return stats.Estimate(value, None, None, n, level, "unpaired")
    return stats.Estimate(value, value - down, value + up, n, level, "unpaired")


def unpaired_p(x: Array, y: Array) -> float:
    """Two-sided p of "both means are the same": 1 less the highest level at which the interval leaves 0 out."""

    def leaves_zero_out(exponent: float) -> bool:
        found = unpaired(x, y, level=1 - 10.0**exponent)
        return found.low is not None and found.high is not None and not found.low <= 0 <= found.high

    low, high = -12.0, -1e-9  # p as a power of ten
    if not leaves_zero_out(high):
        return 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if leaves_zero_out(middle) else (middle, high)
    return min(1.0, float(10.0**high))


def smallest_unpaired(difference: stats.Estimate, looks: int, *, power: float = 0.8) -> float | None:
    """The smallest difference of means that would have been found with probability `power`: as for pairs."""
    if difference.low is None or difference.high is None:
        return None
    normal = NormalDist()
    error = (difference.high - difference.low) / 2 / normal.inv_cdf((1 + difference.level) / 2)
    wanted = normal.inv_cdf((1 + stats.simultaneous_level(looks)) / 2) + normal.inv_cdf(power)
    return float(wanted * error) or None
