"""Many looks at the same data: p values, their correction, and the smallest effect a run could have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.stats import continuous, counted
from noisescope.stats.estimate import are_counted, checked_level, pairs
from noisescope.stats.intervals import unchanged, unseen_error


def p_no_difference(clean: ArrayLike, noisy: ArrayLike) -> float:
    """Two-sided p of "noise changes nothing". Below 1 - level exactly where the interval of `difference` leaves 0 out.

    The interval of `degradation` leaves 0 out in the same cases, since both statistics are the same at "no change";
    below 10 continuous samples a few skewed sets are exceptions, where its interval is the wider one.
    """
    raw_x, raw_y = pairs(clean, noisy)
    x, y = raw_x.mean(axis=1), raw_y.mean(axis=1)
    n = len(x)
    if are_counted(raw_x, raw_y):
        return counted.normal_p(float(counted.difference_statistic(counted.Table.of(x, y))(0.0)))
    if n < 2:
        return 1.0
    if unchanged(x, y):
        error, d = unseen_error(x), float((x - y).mean())
        return continuous.student_p(d / error, n) if error else 1.0
    return continuous.student_p(float(continuous.mean_statistic(x - y)), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for the number of looks (Holm 1979), in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise InvalidInput(f"p values lie between 0 and 1; got {list(p_values)}")
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, look in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[look]))
        corrected[look] = largest
    return corrected


def simultaneous_level(looks: int, level: float = 0.95) -> float:
    """The level each of several intervals needs so that all hold together with `level` (Bonferroni).

    Windows that overlap and share samples depend on each other; Bonferroni holds for any dependence, and Sidak's level
    for independent looks is the same to three digits.
    """
    if looks < 1:
        raise InvalidInput(f"looks must be at least 1, got {looks}")
    return 1 - (1 - checked_level(level)) / looks


def smallest_detectable(
    clean: ArrayLike,
    noisy: ArrayLike,
    *,
    looks: int = 1,
    level: float = 0.95,
    power: float = 0.8,
    relative: bool = False,
) -> float | None:
    """The smallest mean loss that this run would have found with probability `power`, corrected for `looks`.

    Continuous scores: (z_{1 - alpha / 2m} + z_power) standard errors; where all pairs changed alike, the error of
    `unseen_error`. 0/1 scores: see `_smallest_count`. `relative` divides by the clean mean, to be set beside
    `degradation`. None where no loss could be found: fewer than two samples, or not even a loss of every right answer.
    """
    raw_x, raw_y = pairs(clean, noisy)
    x, y = raw_x.mean(axis=1), raw_y.mean(axis=1)
    z_alpha = counted.normal_quantile(simultaneous_level(looks, level))
    z_power = NormalDist().inv_cdf(power)
    top = float(x.mean())
    if len(x) < 2 or (relative and top <= 0):
        return None
    if are_counted(raw_x, raw_y):
        smallest = _smallest_count(counted.Table.of(x, y), z_alpha, z_power, top)
    else:
        error = unseen_error(x) if unchanged(x, y) else float(np.std(x - y, ddof=1)) / math.sqrt(len(x))
        smallest = (z_alpha + z_power) * error if error else None
    return smallest / top if smallest is not None and relative else smallest


def _smallest_count(table: counted.Table, z_alpha: float, z_power: float, top: float) -> float | None:
    """The smallest d = lost - gained that McNemar's statistic finds.

    A fixed standard error is wrong here, most of all where nothing changed: a loss of d can't come without changed
    samples, so the error grows with d. Gains are taken as seen; losses are gains + d. At the unlucky end of D = lost -
    gained (its 1 - power quantile), the number of changed samples C is what goes with that D on average, and D must
    still pass z_alpha sqrt(C):
        D = n d - z_power sqrt(n (q - d^2)),  C = n q - z_power sqrt(n) d (1 - q) / sqrt(q - d^2),  q = 2 gained + d.
    With no change seen in 100 samples that is 0.058 (six answers), where pseudo-pairs would claim 0.027.
    """
    n, gained = float(table.effective_n()), float(table.gained)

    def found(d: float) -> bool:
        q = 2 * gained + d
        spread = math.sqrt(max(q - d * d, 1e-12))
        net = n * d - z_power * math.sqrt(n) * spread
        changed = n * q - z_power * math.sqrt(n) * d * (1 - q) / spread
        return net > 0 and net > z_alpha * math.sqrt(max(changed, 0.0))

    top = min(top, 1 - 2 * gained)
    if top <= 0 or not found(top):
        return None
    low, high = 0.0, top
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
