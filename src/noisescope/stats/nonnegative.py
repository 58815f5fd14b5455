"""The mean of values of at least 0, such as KL: a lower bound for any tail, an upper end where one can be given.

A mean is decided by its tail, and the tail by samples that a run may not contain: of a lognormal with sigma 3 half of
the mean comes from values that 98 % of all sets of 16 do not hold. So no upper end can hold for all distributions
(Bahadur and Savage 1956). A lower end can.

**Lower end.** Let m be a candidate for the mean of X >= 0. For 0 < c < 1 the product of 1 + c (x_i / m - 1) over n
independent samples has expectation at most 1 if the mean is at most m; so has its average over a fixed set of c. By
Markov's inequality it passes 1 / alpha with probability at most alpha. The lower end is the m at which it equals
1 / alpha. It holds for every distribution and every n and is independent of the order of the samples.

**Upper end.** Student's and Hall's (`continuous.py`), plus an allowance for what n samples can't have seen: a share of
1 / n of all values that average 100 times the mean and 20 times the largest value seen,

    high = Hall's end + (100 mean + 20 largest) / n.

This is an allowance, not a law: a rarer or larger part of the population that shows in no sample is not covered, and
nothing computed from the samples could. Where high / low passes 80 (for n < 100: 0.8 n, since a few samples that look
harmless prove little) the interval says nothing of use and is refused; the lower end stays, with the whole of alpha.

The constants are a trade: the bundled model's KL at n = 100 can't be told from a lognormal with sigma 3 by its tail, so
an upper end that is given for the one must hold for the other. They were tuned on other distributions and other samples
than those in the table of benchmarks/README.md ("Coverage of intervals"), which shows what they achieve.

R. R. Bahadur, L. J. Savage (1956), Annals of Mathematical Statistics 27, 1115-1122.
I. Waudby-Smith, A. Ramdas (2024), "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86,
1-27.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from noisescope.stats import continuous
from noisescope.stats.estimate import Array, Estimate, checked_level, nonnegative, scores

UNSEEN = 100.0  # an unseen 1 / n of the values averages so many times the mean ...
BEYOND = 20.0  # ... and so many times the largest value seen
WIDEST = 80.0  # high / low beyond which an interval is refused, from 100 samples on; in proportion to n below
AT_LEAST = "the largest values decide the mean; only a lower bound holds"


def nonnegative_mean(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The mean of values of at least 0: two-sided where the tail allows it, else "at least" (`high` is None).

    >>> estimate = nonnegative_mean([0.1, 0.3, 0.2, 0.1, 40.0, 0.2])
    >>> estimate.high, estimate.method, estimate.note
    (None, 'at least', 'the largest values decide the mean; only a lower bound holds')
    """
    y, level = nonnegative(scores(values, "values"), "values").mean(axis=1), checked_level(level)
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

    def rejected(shrunk: Array) -> Array:  # whether m = mean / shrunk is too small to be the mean
        gains = relative * shrunk[..., np.newaxis] - 1
        products = np.stack([np.log1p(bet * gains).sum(axis=-1) for bet in bets])
        enough: Array = np.logaddexp.reduce(products, axis=0) >= wanted
        return enough

    # at log 0 no product passes 1; at the other end that of the smallest bet and the largest value does
    inside, outside = np.zeros_like(mean), np.full_like(mean, math.log(100 * n * len(bets) / alpha))
    for _ in range(40):
        middle = (inside + outside) / 2
        too_small = rejected(np.exp(middle))
        inside, outside = np.where(too_small, inside, middle), np.where(too_small, middle, outside)
    bound: Array = mean * np.exp(-outside)
    return bound
