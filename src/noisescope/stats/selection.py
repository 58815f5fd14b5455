"""The largest of several effects: an interval and a size that allow for its having been picked because it is largest.

The largest of k estimates is too large on average, and its ordinary interval lies too high: of fourteen equal windows
the one picked is covered by its 95 % interval in 67 % of runs.

**Interval.** Only the lower end suffers from the choice. It is taken at 1 - alpha / (2 k) (Bonferroni: all k lower ends
hold together with probability 1 - alpha / 2, for any dependence between windows that share samples), the upper end at
1 - alpha / 2.

**Size.** Cross-fitting: the samples are split into ten folds (sample i is in fold i modulo ten). For each fold the
candidate is chosen on the other nine and measured on the fold. No sample takes part in choosing what it measures, so
nothing is inflated; where the folds choose differently, the size is that of what would be chosen on average.

C. Fuentes, G. Casella, M. T. Wells (2018), "Confidence intervals for the means of the selected populations", Electronic
Journal of Statistics 12, 58-79.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.stats.estimate import Array, Estimate, checked_level, pairs
from noisescope.stats.intervals import degradation
from noisescope.stats.looks import simultaneous_level

FOLDS = 10
SELECTED = "simultaneous"  # the method of an estimate whose size and lower end allow for the choice


@dataclass(frozen=True)
class Picked:
    """The candidate with the largest effect.

    `estimate` has the cross-fitted size and the interval that allows for the choice; `observed` is what the candidate
    showed on the samples that it was picked on, with its ordinary interval. `agreement` is the share of folds that
    choose the same candidate.
    """

    index: int
    estimate: Estimate
    observed: Estimate
    candidates: int
    agreement: float


def picked(clean: ArrayLike, candidates: Sequence[ArrayLike], *, chance: float = 0.0, level: float = 0.95) -> Picked:
    """The candidate with the largest `degradation`: `candidates` holds the noisy scores of each, same samples.

    >>> clean = [1] * 40
    >>> found = picked(clean, [[1] * 39 + [0], [0, 1] * 20, [1] * 40])
    >>> found.index, found.estimate.value, found.candidates
    (1, 0.5, 3)
    """
    checked_level(level)
    raw = [pairs(clean, noisy) for noisy in candidates]
    if not raw:
        raise InvalidInput("nothing to pick from: no candidate was given")
    x, data = raw[0][0], [noisy for _, noisy in raw]
    losses = np.stack([x.mean(axis=1) - noisy.mean(axis=1) for noisy in data])

    def effect(noisy: Array, level: float) -> Estimate:
        return degradation(x, noisy, chance=chance, level=level)

    k, n = losses.shape
    index = int(np.argmax(losses.mean(axis=1)))
    observed = effect(data[index], level)
    folds = np.arange(n) % min(FOLDS, n)
    if n < 2 or k == 1 or observed.value is None:
        return Picked(index, observed, observed, k, 1.0)
    choices = np.array([int(np.argmax(losses[:, folds != fold].mean(axis=1))) for fold in range(folds.max() + 1)])
    columns = min(values.shape[1] for values in data)
    fitted = np.stack([data[choices[folds[i]]][i, :columns] for i in range(n)])
    low = effect(data[index], simultaneous_level(k, level)).low
    value = effect(fitted, level).value
    if value is not None:  # what the folds say of others can't leave the interval of this one
        value = min(max(value, value if low is None else low), value if observed.high is None else observed.high)
    estimate = Estimate(value, low, observed.high, observed.n, level, observed.note, SELECTED)
    return Picked(index, estimate, observed, k, float(np.mean(choices == index)))
