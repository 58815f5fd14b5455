"""Means without the highest and the lowest fifth: of log values (`typical`), and how far one set lies above another.

For values with a few far out, such as log KL: those rule a mean's error, and an interval that allows for skewness grows
without bound. Drawn from 6,500 log KLs of the bundled model (noise in all products, skewness 2.3, kurtosis 15), 50
against 50, 4,000 times: coverage of nominal 95 and 99 % is 95.1 and 99.1 % here, 95.2 and 99.3 % for plain means, but
the standard error is 0.036 in place of 0.048. For softmax and norms it is 27 and 41 % smaller.

K. K. Yuen (1974), "The two-sample trimmed t for unequal population variances", Biometrika 61, 165-170.
J. W. Tukey, D. H. McLaughlin (1963), "Less vulnerable confidence and significance procedures", Sankhya A 25, 331-352.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from noisescope.stats.estimate import Array, Estimate, checked_level, nonnegative, scores
from noisescope.stats.intervals import unseen_error
from noisescope.stats.quantiles import median

TRIM = 0.2  # at either end: Yuen's and Wilcox's choice
ZEROS = "more than a fifth of the samples are exactly 0: the median is given"


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


def typical(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The geometric mean of the middle three fifths of the samples: what a typical sample shows, for KL and the like.

    exp of the trimmed mean of log values, with Tukey and McLaughlin's interval (Student's with the winsorised variance
    and as many degrees of freedom as values are kept, less one). Its estimate and its interval depend on neither tail;
    between samples it varies less than a median. Zeros are among the lowest fifth and trimmed with it; where more
    samples are 0 than that, the median takes its place and the note says so.

    >>> estimate = typical([0.0, 1e-6, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 3.0, 5000.0])
    >>> round(estimate.value, 3), estimate.method
    (0.2, 'typical')
    """
    y, level = nonnegative(scores(values, "values"), "values").mean(axis=1), checked_level(level)
    n = len(y)
    if np.count_nonzero(y == 0) > int(TRIM * n):
        middle = median(y, level)
        return Estimate(middle.value, middle.low, middle.high, n, level, ZEROS, middle.method)
    with np.errstate(divide="ignore"):
        centre, variance, kept = _trimmed(np.log(y))
    if variance < 1e-24:  # of logarithms: nothing varied but rounding
        return Estimate(math.exp(centre), None, None, n, level)
    half = float(special.stdtrit(kept - 1, (1 + level) / 2)) * math.sqrt(variance)
    low, high = math.exp(centre - half), min(math.exp(min(centre + half, 700.0)), 1e300)
    return Estimate(math.exp(centre), low, high, n, level, "", "typical")


def typical_values(rows: Array) -> Array:
    """`typical` of each row, without intervals: for ranking."""
    n = rows.shape[1]
    cut = int(TRIM * n)
    with np.errstate(divide="ignore"):
        inner = np.log(np.sort(rows, axis=1)[:, cut : n - cut])
    mostly_zero = np.count_nonzero(rows == 0, axis=1) > cut
    found: Array = np.where(mostly_zero, np.median(rows, axis=1), np.exp(inner.mean(axis=1)))
    return found


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
