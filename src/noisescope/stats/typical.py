"""Centres of skewed, heavy-tailed values such as KL: a typical value, medians (also of waiting times that a run may not
observe fully), and means with valid intervals.

**Typical value and shift** (`typical`, `trimmed_shift`): means without the highest and the lowest fifth. A few extreme
values dominate a mean's error, and an interval that allows for skewness is unbounded. Drawn from 6,500 log KLs of
the bundled model (noise in all products, skewness 2.3, kurtosis 15), 50 against 50, 4,000 times: coverage of nominal 95
and 99 % is 95.1 and 99.1 % here, 95.2 and 99.3 % for plain means, but the standard error is 0.036 in place of 0.048.
For softmax and norms it is 27 and 41 % smaller.

**Median** (`median`, `typical_ratio`): of n independent samples the number that lie at or below the true median is
binomial (n, 1/2), whatever the values are. So the order statistics X(l) and X(u) enclose the median:

    P(X(l) > median) <= P(B <= l - 1) <= alpha / 2, P(X(u) < median) <= P(B >= u) <= alpha / 2.

l is the largest rank for which this holds, and u = n + 1 - l the smallest. No tail can break the interval, neither can
ties (they only make it hold more often). Whole ranks make the true level a little higher than the nominal one: at
nominal 95 % it is 97.9, 96.7, 96.5 and 95.7 % at n = 16, 50, 100 and 300, and above 99 % at n = 8 alone.

**Mean of values of at least 0** (`nonnegative_mean`): it is decided by its tail, and the tail by samples that a run may
not contain: of a lognormal with sigma 3 half of the mean comes from values that 98 % of all sets of 16 do not hold. So
no upper end can hold for all distributions (Bahadur and Savage). A lower end can: let m be a candidate for the mean of
X >= 0. For 0 < c < 1 the product of 1 + c (x_i / m - 1) over n independent samples has expectation at most 1 if the
mean is at most m; so has its average over a fixed set of c. By Markov's inequality it passes 1 / alpha with probability
at most alpha. The lower end is the m at which it equals 1 / alpha (Waudby-Smith and Ramdas). It holds for every
distribution and every n and is independent of the order of the samples. The upper end is Student's and Hall's
(`continuous.py`), plus an allowance for what n samples can't have seen: a share of 1 / n of all values that average 100
times the mean and 20 times the largest value seen,

    high = Hall's end + (100 mean + 20 largest) / n.

This is an allowance, not a law: a rarer or larger part of the population that shows in no sample is not covered, and
nothing computed from the samples could. Where high / low passes 80 (for n < 100: 0.8 n, since a few samples that look
harmless prove little) the interval says nothing of use and is refused; the lower end stays, with the whole of alpha.
The constants are a trade: by its tail the bundled model's KL at n = 100 is indistinguishable from a lognormal with
sigma 3, so an upper end that is given for the one must hold for the other. They were tuned on other distributions and
other samples than those in the table of benchmarks/README.md ("Coverage of intervals"), which shows what they achieve.

R. R. Bahadur, L. J. Savage (1956), Annals of Mathematical Statistics 27, 1115-1122.
W. R. Thompson (1936), Annals of Mathematical Statistics 7, 122-128 (confidence ranges for the median).
J. W. Tukey, D. H. McLaughlin (1963), "Less vulnerable confidence and significance procedures", Sankhya A 25, 331-352.
I. Waudby-Smith, A. Ramdas (2024), "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86,
1-27.
K. K. Yuen (1974), "The two-sample trimmed t for unequal population variances", Biometrika 61, 165-170.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from noisescope.errors import InvalidInput
from noisescope.estimate import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats import continuous
from noisescope.stats.score_arrays import Array, checked_level, nonnegative_means, pairs, scores, unseen_error

TRIM = 0.2  # at either end: Yuen's and Wilcox's choice
_WIDENED = 2  # few skewed logarithms: 95 % intervals of 16 covered 91 to 95 %; 1 + 2 / n times as wide, 93 to 97 %
ZEROS = "more than a fifth of the samples are exactly 0, so the median is given"
UNSEEN = 100.0  # an unseen 1 / n of the values averages so many times the mean ...
BEYOND = 20.0  # ... and so many times the largest value seen
WIDEST = 80.0  # high / low beyond which an interval is refused, from 100 samples on; in proportion to n below
AT_LEAST = "a few large values dominate the mean, so only a lower bound can be given"


def typical(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The geometric mean of the middle three fifths of the samples: the value of a typical sample, for KL and similar.

    exp of the trimmed mean of log values, with Tukey and McLaughlin's interval (Student's with the winsorised variance
    and as many degrees of freedom as values are kept, less one). Its estimate and its interval depend on neither tail;
    between samples it varies less than a median. Zeros are among the lowest fifth and trimmed with it; where more
    samples are 0 than that, the median takes its place and the note says so.

    >>> estimate = typical([0.0, 1e-6, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 3.0, 5000.0])
    >>> round(estimate.value, 3), estimate.method
    (0.2, 'typical')
    """
    y, level = nonnegative_means(scores(values, "values"), "values"), checked_level(level)
    n = len(y)
    if np.count_nonzero(y == 0) > int(TRIM * n):
        return replace(median(y, level), note=ZEROS)
    with np.errstate(divide="ignore"):
        centre, variance, kept = _trimmed(np.log(y))
    if variance < 1e-24:  # of logarithms: nothing varied but rounding
        return Estimate(math.exp(centre), None, None, n, level)
    half = (1 + _WIDENED / n) * float(special.stdtrit(kept - 1, (1 + level) / 2)) * math.sqrt(variance)
    low, high = math.exp(centre - half), min(math.exp(min(centre + half, 700.0)), 1e300)
    return Estimate(math.exp(centre), low, high, n, level, "", "typical")


@dataclass(frozen=True)
class Shift:
    """A difference of trimmed means with its standard error and degrees of freedom; n is that of the smaller set."""

    value: float
    error: float
    freedom: float
    n: int

    def estimate(self, level: float = 0.95) -> Estimate:
        """With Student's interval; none where nothing varied."""
        if not self.error:
            return Estimate(self.value, None, None, self.n, level)
        half = self._quantile((1 + checked_level(level)) / 2) * self.error
        return Estimate(self.value, self.value - half, self.value + half, self.n, level)

    def smallest_detectable(self, level: float = 0.95, power: float = 0.8) -> float | None:
        """The smallest difference whose interval would leave 0 out with probability `power`."""
        return (self._quantile((1 + level) / 2) + self._quantile(power)) * self.error or None

    def excess(self, power: float = 0.8) -> float:
        """How far above a limit the truth must lie for the value to pass that limit with probability `power`."""
        return self._quantile(power) * self.error

    def _quantile(self, share: float) -> float:
        return float(special.stdtrit(self.freedom, share))


def trimmed_shift(x: Array, y: Array, *, paired: bool) -> Shift:
    """The trimmed mean of y - x over pairs, or of y less that of x over different samples."""
    if paired:
        value, variance, kept = _trimmed(y - x)
        error = math.sqrt(variance) or (unseen_error(x) if len(x) > 1 else 0.0)  # all alike: no error of 0 is honest
        return Shift(value, error, max(kept - 1, 1), len(x))
    (first, a, m), (second, b, k) = _trimmed(x), _trimmed(y)
    spread = a * a / max(m - 1, 1) + b * b / max(k - 1, 1)
    freedom = (a + b) ** 2 / spread if spread else 1.0  # Welch and Satterthwaite
    return Shift(second - first, math.sqrt(a + b), freedom, min(len(x), len(y)))


def _trimmed(values: Array) -> tuple[float, float, int]:
    """Trimmed mean, its variance from the winsorised values, and how many values it is of."""
    n = len(values)
    cut = int(TRIM * n)
    kept = n - 2 * cut
    ordered = np.sort(values)
    inner = ordered[cut : n - cut]
    if kept < 2:
        return float(inner.mean()), 0.0, kept
    winsorised = np.clip(ordered, inner[0], inner[-1])
    return float(inner.mean()), (n - 1) * float(winsorised.var(ddof=1)) / (kept * (kept - 1)), kept


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
    (2.0, 6, '1 of 7 samples excluded: 0 on both sides')
    """
    raw_x, raw_y = pairs(below, above, ("below", "above"))
    x, y = nonnegative_means(raw_x, "below"), nonnegative_means(raw_y, "above")
    known = (x > 0) | (y > 0)
    with np.errstate(divide="ignore", over="ignore"):
        ratios = np.sort(y[known] / x[known])
    dropped = len(x) - len(ratios)
    note = f"{dropped} of {len(x)} samples excluded: 0 on both sides" if dropped else ""
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
        notes.append(f"an interval at {100 * level:.4g} % needs {needed} samples")
        return Estimate(value, None, None, n, level, "; ".join(filter(None, notes)))
    low, high = (None if ordered[rank - 1] == np.inf else float(ordered[rank - 1]) for rank in ranks)
    named = method if low is not None or high is not None else ""
    return Estimate(value, low, high, n, level, "; ".join(filter(None, notes)), named)


def nonnegative_mean(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The mean of values of at least 0: two-sided where the tail allows it, else "at least" (`high` is None).

    >>> estimate = nonnegative_mean([0.1, 0.3, 0.2, 0.1, 40.0, 0.2])
    >>> estimate.high, estimate.method, estimate.note
    (None, 'at least', 'a few large values dominate the mean, so only a lower bound can be given')
    """
    y, level = nonnegative_means(scores(values, "values"), "values"), checked_level(level)
    low, high = nonnegative_limits(y, level)
    if np.isfinite(high):
        return Estimate(float(y.mean()), float(low), float(high), len(y), level, "", "mean")
    return Estimate(float(y.mean()), float(low), None, len(y), level, AT_LEAST, "at least")


def nonnegative_limits(values: Array, level: float) -> tuple[Array, Array]:
    """Both ends over the last axis; the upper one is infinite where it is refused."""
    n, alpha = values.shape[-1], 1 - level
    low, alone = lower_bound(values, alpha / 2), lower_bound(values, alpha)
    if n < 2:
        return alone, alone * 0 + np.inf
    upper = continuous.mean_limits(values, level)[1]
    high = upper + (UNSEEN * values.mean(axis=-1) + BEYOND * values.max(axis=-1)) / n
    useful = (low > 0) & (high <= WIDEST * min(n / 100, 1.0) * low)
    return np.where(useful, low, alone), np.where(useful, high, np.inf)


def lower_bound(values: Array, alpha: float) -> Array:
    """The largest m that the mean exceeds with probability 1 - alpha, for any distribution on [0, inf); last axis."""
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    bets = 0.75 * 2.0 ** -np.arange(math.ceil(math.log2(n)) + 1)
    wanted = math.log(len(bets) / alpha)
    relative = values / np.where(mean > 0, mean, 1.0)[..., np.newaxis]

    def possible(log_shrunk: Array) -> Array:  # whether m = mean / shrunk may be the mean, and is not too small
        gains = relative * np.exp(log_shrunk)[..., np.newaxis] - 1
        products = np.stack([np.log1p(bet * gains).sum(axis=-1) for bet in bets])
        below: Array = ~(np.logaddexp.reduce(products, axis=0) >= wanted)
        return below

    # at log 0 no product passes 1; at the other end that of the smallest bet and the largest value does
    last = np.full_like(mean, math.log(100 * n * len(bets) / alpha))
    _, outside = continuous.bisect(possible, np.zeros_like(mean), last, steps=40)
    bound: Array = mean * np.exp(-outside)
    return bound


_RESAMPLES = 1000


def median_wait(steps: ArrayLike, happened: ArrayLike, level: float = 0.95) -> Estimate:
    """The number of steps after which half have met the event; n counts groups (rows).

    `steps` [groups, members] are waiting times, at least 1; where `happened` is False the event had not come by then.
    Value None with the note "unbounded": fewer than half met it while they were watched.

    >>> median_wait([[1], [2], [3], [9], [9]], [[True], [True], [True], [False], [False]]).value
    3.0
    """
    waits, events = np.asarray(steps, dtype=np.float64), np.asarray(happened, dtype=bool)
    if waits.ndim != 2 or waits.shape != events.shape or not waits.size or waits.min() < 1:
        raise InvalidInput(
            f"waiting times must be a table [groups, members] of steps of at least 1, with one flag each; got "
            f"{waits.shape} and {events.shape}"
        )
    groups = len(waits)
    value = _crossing(waits, events)
    if groups < 2:
        return _estimate(value, None, None, groups, checked_level(level))
    drawn = np.random.default_rng(0).integers(0, groups, (_RESAMPLES, groups))
    medians = np.sort([_crossing(waits[rows], events[rows]) for rows in drawn])
    tail = (1 - checked_level(level)) / 2
    low, high = (float(np.quantile(medians, share, method="nearest")) for share in (tail, 1 - tail))
    return _estimate(value, low, high, groups, level)


def _estimate(value: float, low: float | None, high: float | None, groups: int, level: float) -> Estimate:
    middle, left, right = (None if end is None or not np.isfinite(end) else end for end in (value, low, high))
    return Estimate(middle, left, right, groups, level, "" if np.isfinite(value) else UNBOUNDED, "Kaplan-Meier")


def _crossing(waits: Array, events: Array) -> float:
    """The first step at which the product falls to a half; inf where it does not."""
    times, at = np.unique(waits, return_inverse=True)
    met = np.bincount(at.ravel(), weights=events.ravel(), minlength=len(times))
    all_here = np.bincount(at.ravel(), minlength=len(times))
    at_risk = np.cumsum(all_here[::-1])[::-1]
    left = np.cumprod(1 - met / at_risk)
    below = np.flatnonzero(left <= 0.5 + 1e-12)
    return float(times[below[0]]) if len(below) else float("inf")
