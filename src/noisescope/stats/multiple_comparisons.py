"""Many comparisons on the same data: p values, their correction, the smallest detectable effect, the largest of many.

The largest of k estimates is too large on average, and its ordinary interval lies too high: of fourteen equal windows
the one selected is covered by its 95 % interval in 67 % of runs. `select_largest` allows for the selection:

- Interval: only the lower end suffers. It is taken at 1 - alpha / (2 k) (Bonferroni: all k lower ends hold together
  with probability 1 - alpha / 2, for any dependence between windows that share samples), the upper at 1 - alpha / 2.
- Size, by cross-fitting: the samples are split into ten folds (sample i is in fold i modulo ten). For each fold the
  candidate is chosen on the other nine and measured on the fold. No sample takes part in choosing what it measures, so
  nothing is inflated; where the folds choose differently, the size is that of what would be chosen on average.

C. Fuentes, G. Casella, M. T. Wells (2018), "Confidence intervals for the means of the selected populations",
Electronic Journal of Statistics 12, 58-79.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.estimate import NOT_MEASURABLE, Estimate
from noisescope.stats import continuous, counted
from noisescope.stats.continuous import bisect
from noisescope.stats.score_arrays import Array, Paired, checked_level, pairs, unseen_error
from noisescope.stats.score_estimates import degradation, mean

FOLDS = 10
SELECTED = "simultaneous"  # the method of an estimate whose size and lower end allow for the selection


def p_no_difference(clean: ArrayLike, noisy: ArrayLike) -> float:
    """Two-sided p of "noise changes nothing". Below 1 - level exactly where the interval of `difference` leaves 0 out.

    The interval of `degradation` leaves 0 out in the same cases, since both statistics are the same at "no change";
    below 10 continuous samples a few skewed sets are exceptions, where its interval is the wider one.
    """
    data = Paired.of(clean, noisy)
    x, y, n = data.x, data.y, data.n
    if data.counted:
        return counted.normal_p(float(counted.difference_statistic(counted.Table.of(x, y))(0.0)))
    if n < 2:
        return 1.0
    if data.unchanged:
        error = unseen_error(x)
        return continuous.student_p(float((x - y).mean()) / error, n) if error else 1.0
    return continuous.student_p(float(continuous.mean_statistic(x - y)), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for the number of comparisons (Holm 1979), in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise InvalidInput(f"p values must be between 0 and 1; got {list(p_values)}")
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
    return corrected


def simultaneous_level(comparisons: int, level: float = 0.95) -> float:
    """The level each of several intervals needs so that all hold together with `level` (Bonferroni).

    Windows that overlap and share samples depend on each other; Bonferroni holds for any dependence, and Sidak's level
    for independent comparisons is the same to three digits.
    """
    if comparisons < 1:
        raise InvalidInput(f"comparisons must be at least 1, got {comparisons}")
    return 1 - (1 - checked_level(level)) / comparisons


def smallest_detectable(
    clean: ArrayLike,
    noisy: ArrayLike,
    *,
    comparisons: int = 1,
    level: float = 0.95,
    power: float = 0.8,
    relative: bool = False,
) -> float | None:
    """The smallest mean loss that this run would have found with probability `power`, corrected for `comparisons`.

    Continuous scores: (z_{1 - alpha / 2m} + z_power) standard errors; where all pairs changed alike, the error of
    `unseen_error`. 0/1 scores: see `_smallest_count`. `relative` divides by the clean mean, to be set beside
    `degradation`. None where no loss could be found: fewer than two samples, or not even a loss of every right answer.
    """
    data = Paired.of(clean, noisy)
    x, y = data.x, data.y
    z_alpha = counted.normal_quantile(simultaneous_level(comparisons, level))
    z_power = NormalDist().inv_cdf(power)
    top = float(x.mean())
    if data.n < 2 or (relative and top <= 0):
        return None
    if data.counted:
        smallest = _smallest_count(counted.Table.of(x, y), z_alpha, z_power, top)
    else:
        error = unseen_error(x) if data.unchanged else float(np.std(x - y, ddof=1)) / math.sqrt(data.n)
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
    smallest, _ = continuous.bisect(lambda d: found(float(d)), top, 0.0)
    return float(smallest)


@dataclass(frozen=True)
class Selected:
    """The candidate with the largest effect.

    `estimate` has the cross-fitted size and the interval that allows for the selection; `observed` is what the
    candidate showed on the samples that it was selected on, with its ordinary interval. `agreement` is the share of
    folds that choose the same candidate.
    """

    index: int
    estimate: Estimate
    observed: Estimate
    candidates: int
    agreement: float


def select_largest(
    clean: ArrayLike, candidates: Sequence[ArrayLike], *, chance: float = 0.0, level: float = 0.95
) -> Selected:
    """The candidate with the largest `degradation`: `candidates` holds the noisy scores of each, same samples.

    >>> clean = [1] * 40
    >>> found = select_largest(clean, [[1] * 39 + [0], [0, 1] * 20, [1] * 40])
    >>> found.index, found.estimate.value, found.candidates
    (1, 0.5, 3)
    """
    checked_level(level)
    raw = [pairs(clean, noisy) for noisy in candidates]
    if not raw:
        raise InvalidInput("no candidates were given")
    x, data = raw[0][0], [noisy for _, noisy in raw]
    losses = np.stack([x.mean(axis=1) - noisy.mean(axis=1) for noisy in data])

    def effect(noisy: Array, level: float) -> Estimate:
        return degradation(x, noisy, chance=chance, level=level)

    k, n = losses.shape
    index = int(np.argmax(losses.mean(axis=1)))
    observed = effect(data[index], level)
    folds = np.arange(n) % min(FOLDS, n)
    if n < 2 or k == 1 or observed.value is None:
        return Selected(index, observed, observed, k, 1.0)
    choices = np.array([int(np.argmax(losses[:, folds != fold].mean(axis=1))) for fold in range(folds.max() + 1)])
    columns = min(values.shape[1] for values in data)
    fitted = np.stack([data[choices[folds[i]]][i, :columns] for i in range(n)])
    low = effect(data[index], simultaneous_level(k, level)).low
    value = effect(fitted, level).value
    if value is not None:  # what the folds say of others can't leave the interval of this one
        value = min(max(value, value if low is None else low), value if observed.high is None else observed.high)
    estimate = replace(observed, value=value, low=low, method=SELECTED)
    return Selected(index, estimate, observed, k, float(np.mean(choices == index)))


# The difference of two means, or of two medians, over different samples: pairs, where there are any, are sharper.


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
