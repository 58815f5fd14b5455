"""Intervals for the mean of a continuous score, and for a ratio of two such means.

Everything here works on the last axis (samples), so that coverage can be simulated over thousands of runs at once.

Student's t covers well when the values are symmetric, with heavy tails too, and too rarely when they are skewed, as KL
is (91.7 % instead of 95 % for lognormal values with sigma 1 and n = 100). Hall's transformation corrects for skewness
and covers too rarely under heavy tails (92.8 % for t with 3 degrees of freedom). So an interval here is the smallest
that holds both; at n = 100 it covers 95.0 to 96.1 % in all these cases.

P. Hall (1992), "On the removal of skewness by transformation", J. R. Stat. Soc. B 54, 221-228.
E. C. Fieller (1954), "Some problems in interval estimation", J. R. Stat. Soc. B 16, 175-185.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from noisescope.stats.score_arrays import Array

LARGEST = 1e6  # statistics beyond this are as good as infinite, and their cubes still fit a float


def student_quantile(n: int, level: float) -> float:
    return float(special.stdtrit(n - 1, (1 + level) / 2))


def student_p(statistic: float, n: int) -> float:
    """Two-sided p of a t statistic of n values."""
    return float(2 * special.stdtr(n - 1, -abs(statistic)))


def moments(values: Array) -> tuple[Array, Array, Array]:
    """Mean, standard error and skewness over the last axis."""
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    centred = values - mean[..., np.newaxis]
    variance = np.mean(centred**2, axis=-1)
    skewness = np.mean(centred**3, axis=-1) / np.maximum(variance, 1e-200) ** 1.5
    return mean, np.sqrt(variance / (n - 1)), skewness


def agreed_statistic(t: Array, skewness: Array, n: int) -> Array:
    """The nearer to 0 of t and Hall's corrected t, and 0 where they differ in sign: what both agree on.

    Hall: t + g t^2 / (3 sqrt n) + g^2 t^3 / (27 n) + g / (6 sqrt n), where g is the skewness.
    """
    t = np.clip(t, -LARGEST, LARGEST)
    a = np.clip(skewness / np.sqrt(n), -1, 1)  # no n values are more skewed than sqrt(n); rounding may say otherwise
    hall = t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6
    nearer = np.where(np.abs(hall) < np.abs(t), hall, t)
    return np.where(np.sign(hall) == np.sign(t), nearer, 0.0)


def mean_statistic(values: Array) -> Array:
    """The statistic of "the mean is 0"."""
    mean, error, skewness = moments(values)
    return agreed_statistic(mean / np.maximum(error, 1e-200), skewness, values.shape[-1])


def mean_limits(values: Array, level: float) -> tuple[Array, Array]:
    """The ends of the interval of the mean: the smallest that contains both Student's and Hall's."""
    n = values.shape[-1]
    mean, error, skewness = moments(values)
    quantile = student_quantile(n, level)
    a = skewness / np.sqrt(n)
    safe = np.where(np.abs(a) < 1e-6, 1e-6, a)

    def inverse(x: float) -> Array:
        exact: Array = 3 / safe * (np.cbrt(1 + safe * (x - safe / 6)) - 1)
        return np.where(np.abs(a) < 1e-6, x - a * x**2 / 3 - a / 6, exact)

    low = mean - error * np.maximum(quantile, inverse(quantile))
    high = mean - error * np.minimum(-quantile, inverse(-quantile))
    return low, high


def ratio_statistic(x: Array, y: Array) -> Callable[[Any], Array]:
    """The statistic of "mean(y) = theta mean(x)" as a function of theta, by Fieller: the mean of y - theta x is 0.

    The moments of y - theta x are polynomials in theta, so each theta costs a few numbers and not a pass over samples.
    """
    n = x.shape[-1]
    mean_x, mean_y = x.mean(axis=-1), y.mean(axis=-1)
    u, v = x - mean_x[..., np.newaxis], y - mean_y[..., np.newaxis]
    uu, uv, vv = (np.mean(product, axis=-1) for product in (u * u, u * v, v * v))
    uuu, uuv, uvv, vvv = (np.mean(product, axis=-1) for product in (u**3, u * u * v, u * v * v, v**3))

    def statistic(theta: Any) -> Array:
        variance = np.maximum(vv - 2 * theta * uv + theta**2 * uu, 1e-200)
        third = vvv - 3 * theta * uvv + 3 * theta**2 * uuv - theta**3 * uuu
        t = (mean_y - theta * mean_x) / np.sqrt(variance / (n - 1))
        skewness = np.clip(third / variance**1.5, -np.sqrt(n), np.sqrt(n))  # beyond is rounding, where nothing varies
        return agreed_statistic(t, skewness, n)

    return statistic


def ratio_limits(x: Array, y: Array, level: float) -> tuple[Array, Array]:
    """The ends of the interval of mean(y) / mean(x); -inf or inf where Fieller's set has no end on that side."""
    statistic = ratio_statistic(x, y)
    quantile = student_quantile(x.shape[-1], level)
    centre = y.mean(axis=-1) / x.mean(axis=-1)
    error = moments(y - centre[..., np.newaxis] * x)[1] / np.abs(x.mean(axis=-1))

    def end(side: int) -> Array:
        def at(w: Any) -> Array:  # w in [0, 1) runs over all distances from the centre
            point: Array = centre + side * quantile * error * w / (1 - w)
            return point

        last = 1 - 1e-9
        w, _ = bisect(lambda w: np.abs(statistic(at(w))) <= quantile, centre * 0, centre * 0 + last)
        return np.where(w > last - 1e-7, side * np.inf, at(w))

    return end(-1), end(1)


def bisect(accepts: Callable[[Any], Any], inside: Any, outside: Any, *, steps: int = 50) -> tuple[Any, Any]:
    """The last accepted and the first refused point on the way from `inside` to `outside`, elementwise."""
    for _ in range(steps):
        middle = (inside + outside) / 2
        accepted = accepts(middle)
        inside, outside = np.where(accepted, middle, inside), np.where(accepted, outside, middle)
    return inside, outside
