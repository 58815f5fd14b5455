"""Means, differences, degradations and ratios of scores, each with an interval.

Data are per-sample scores: shape (samples,), or (samples, seeds) for noisy runs. Noise draws are independent across
samples, so the sample is the cluster: seeds are averaged within a sample, and n is the number of samples. Scores that
are all 0 or 1 are treated as counts (`counted.py`), all others as continuous (`continuous.py`). For a ratio of
divergences see `typical_ratio` (typical.py), which holds for every tail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.estimate import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats import continuous, counted
from noisescope.stats.score_arrays import (
    Array,
    Paired,
    checked_level,
    is_binary,
    is_multiple,
    pairs,
    scores,
    unseen_error,
)

NO_LOSS_BELOW = "the loss it is compared with is not significantly different from 0"


def mean(values: ArrayLike, level: float = 0.95, *, countable: bool = True) -> Estimate:
    """The mean over samples: Wilson's interval for 0/1 scores, Student's widened for skewness otherwise.

    With `countable` False zeros and ones are numbers like others (a KL in nats). If all of them are 0 there is no
    interval then: nothing tells how large the next one might be.

    >>> mean([1, 1, 1, 0]).value
    0.75
    """
    raw = scores(values, "values")
    if countable and is_binary(raw):
        return proportion(raw, level=level)
    y, level = raw.mean(axis=1), checked_level(level)
    value, n = float(y.mean()), len(y)
    if n < 2 or not y.any():
        return Estimate(value, None, None, n, level)
    return _estimate(value, continuous.mean_limits(y, level), n, level, "mean")


def proportion(values: ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of proportions between 0 and 1, such as the share of tokens on which two models agree, per sample.

    Wilson's interval with the effective number of samples (`counted.proportion_limits`). Most such values are exactly
    1: Student's interval would have no width where all are, and too little where a few are not.

    >>> full = proportion([1.0] * 20)
    >>> full.value, round(full.low, 3), full.high, full.method
    (1.0, 0.839, 1.0, 'wilson')
    """
    raw, level = scores(values, "values"), checked_level(level)
    if raw.min() < 0 or raw.max() > 1:
        raise InvalidInput(f"shares must be between 0 and 1; got values from {raw.min():.3g} to {raw.max():.3g}")
    y = raw.mean(axis=1)
    return _estimate(float(y.mean()), counted.proportion_limits(y, level), len(y), level, "wilson")


def difference(clean: ArrayLike, noisy: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean of clean - noisy over pairs. Its width is never 0 where nothing changed (`unseen_error`)."""
    data, level = Paired.of(clean, noisy), checked_level(level)
    d = data.x - data.y
    if data.counted:
        limits = counted.difference_limits(counted.Table.of(data.x, data.y), level)
        return _estimate(float(d.mean()), limits, data.n, level, "paired difference")
    return _mean_difference(d, data.x, level, constant=data.unchanged)


def measurable(clean: ArrayLike, chance: float = 0.0, *, level: float = 0.95) -> bool:
    """Whether the clean score is significantly above chance, so that a share of it can be lost.

    The interval of its mean must stay above `chance` (1 / choices for multiple choice, 0 for free generation), and the
    mean must exceed its own error t times, or a ratio to it has no bound (Fieller's condition; for 0/1 scores with
    chance 0 it asks for 4 right answers, where Wilson's lower end is above 0 from the first on).
    """
    estimate = mean(clean, level)
    if estimate.value is None or not estimate.above(chance) or estimate.n < 2:
        return False
    error = float(np.std(scores(clean, "clean").mean(axis=1), ddof=1)) / math.sqrt(estimate.n)
    return estimate.value > continuous.student_quantile(estimate.n, level) * error


def retention(clean: ArrayLike, noisy: ArrayLike, *, chance: float = 0.0, level: float = 0.95) -> Estimate:
    """mean(noisy) / mean(clean), paired; value None and a note where the clean score is not `measurable`."""
    data = Paired.of(clean, noisy)
    if not measurable(clean, chance, level=level):
        return Estimate(None, None, None, data.n, level, NOT_MEASURABLE)
    x, y, n, level, method = data.x, data.y, data.n, checked_level(level), "paired ratio"
    value = float(y.mean() / x.mean())
    if data.counted:
        return _estimate(value, counted.ratio_limits(counted.Table.of(x, y), level), n, level, method)
    if n < 2:
        return Estimate(value, None, None, n, level)
    if is_multiple(x, y, value):
        half = continuous.student_quantile(n, level) * unseen_error(x) / abs(float(x.mean()))
        return _around(value, half, n, level, method)
    low, high = continuous.ratio_limits(x, y, level)
    if min(x.min(), y.min()) >= 0:
        low = np.maximum(low, 0.0)
    return _estimate(value, (low, high), n, level, method)


def degradation(clean: ArrayLike, noisy: ArrayLike, *, chance: float = 0.0, level: float = 0.95) -> Estimate:
    """1 - mean(noisy) / mean(clean), the share of the clean score that noise takes, paired."""
    kept = retention(clean, noisy, chance=chance, level=level)
    value, low, high = (None if end is None else 1 - end for end in (kept.value, kept.high, kept.low))
    return replace(kept, value=value, low=low, high=high)


def degradation_ratio(clean: ArrayLike, noisy: ArrayLike, beside: ArrayLike, *, level: float = 0.95) -> Estimate:
    """(clean - noisy) / (clean - beside): how many times the loss of `beside` the loss of `noisy` is, same samples.

    Fieller's interval of the paired losses. Seeds are averaged within a sample, so `beside` may hold the columns of
    several neighbours. If the loss of `beside` is not significantly above 0 there is no interval: use
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
    if value is not None and is_multiple(below, above, value):
        half = continuous.student_quantile(n, level) * unseen_error(x) / float(below.mean())
        return _around(value, half, n, level, "paired ratio")
    return _estimate(value, continuous.ratio_limits(below, above, level), n, level, "paired ratio")


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
    d = (x - a) - factor * (x - b)
    return _mean_difference(d, x, level, constant=bool(np.ptp(d) <= 1e-12 * (np.abs(x).max() + 1)))


def noise_tolerance(degradation: Estimate) -> Estimate:
    """The noise tolerance index 1 / degradation; ends by transforming the ends.

    Without a loss (degradation <= 0) the index is unbounded: value None with that note. An interval of the degradation
    that reaches 0 leaves the index without an upper end, one that lies at or below 0 leaves no lower end either.
    """
    if degradation.value is None:
        return Estimate(None, None, None, degradation.n, degradation.level, degradation.note or NOT_MEASURABLE)
    dust = 1e-12  # a loss of rounding errors is no loss
    ends = (degradation.value, degradation.high, degradation.low)  # 1 / x exchanges the ends
    value, low, high = (None if d is None or d <= dust else 1 / d for d in ends)
    return replace(degradation, value=value, low=low, high=high, note=UNBOUNDED if value is None else "")


def _losses(clean: ArrayLike, noisy: ArrayLike, beside: ArrayLike, level: float) -> tuple[Array, Array, Array, float]:
    x, a = pairs(clean, noisy)
    _, b = pairs(clean, beside, ("clean", "beside"))
    return x.mean(axis=1), a.mean(axis=1), b.mean(axis=1), checked_level(level)


def _mean_difference(d: Array, clean: Array, level: float, *, constant: bool) -> Estimate:
    """The mean of continuous paired differences; `constant` where they are all the same up to rounding."""
    value, n, method = float(d.mean()), len(d), "paired difference"
    if n < 2:
        return Estimate(value, None, None, n, level)
    if constant:
        return _around(value, continuous.student_quantile(n, level) * unseen_error(clean), n, level, method)
    return _estimate(value, continuous.mean_limits(d, level), n, level, method)


def _around(value: float, half: float, n: int, level: float, method: str) -> Estimate:
    """value +- half; no interval where half is 0."""
    if not half:
        return Estimate(value, None, None, n, level)
    return Estimate(value, value - half, value + half, n, level, "", method)


def _estimate(value: float | None, limits: tuple[Any, Any], n: int, level: float, method: str) -> Estimate:
    low, high = (float(end) if math.isfinite(end) else None for end in limits)
    return Estimate(value, low, high, n, level, "", method)
