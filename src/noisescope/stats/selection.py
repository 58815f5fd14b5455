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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.stats.estimate import Array, Estimate, checked_level, nonnegative, pairs, scores
from noisescope.stats.intervals import degradation
from noisescope.stats.looks import simultaneous_level
from noisescope.stats.quantiles import median
from noisescope.stats.trimmed import typical, typical_values

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
    x = raw[0][0].mean(axis=1)
    losses = np.stack([x - noisy.mean(axis=1) for _, noisy in raw])

    def effect(noisy: Array, level: float) -> Estimate:
        return degradation(raw[0][0], noisy, chance=chance, level=level)

    return _picked(losses, [noisy for _, noisy in raw], effect, lambda rows: rows.mean(axis=1), level)


def picked_typical(candidates: Sequence[ArrayLike], *, level: float = 0.95) -> Picked:
    """The candidate with the largest `typical` value, for values of at least 0 such as KL; same samples in each.

    >>> found = picked_typical([[1, 2, 3] * 5, [4, 5, 6] * 5])
    >>> found.index, round(found.estimate.value, 2), found.estimate.method
    (1, 4.95, 'simultaneous')
    """
    raw = _columns(candidates)
    values = np.stack([candidate.mean(axis=1) for candidate in raw])
    return _picked(values, raw, typical, typical_values, checked_level(level))


def picked_median(candidates: Sequence[ArrayLike], *, level: float = 0.95) -> Picked:
    """The candidate with the largest median, for values of at least 0; same samples in each.

    >>> found = picked_median([[1, 2, 3] * 5, [4, 5, 6] * 5])
    >>> found.index, found.estimate.value, found.estimate.method
    (1, 5.0, 'simultaneous')
    """
    raw = _columns(candidates)
    values = np.stack([candidate.mean(axis=1) for candidate in raw])
    return _picked(values, raw, median, lambda rows: np.median(rows, axis=1), checked_level(level))


def _columns(candidates: Sequence[ArrayLike]) -> list[Array]:
    raw = [nonnegative(scores(values, f"candidate {at}"), f"candidate {at}") for at, values in enumerate(candidates)]
    if not raw:
        raise InvalidInput("nothing to pick from: no candidate was given")
    lengths = sorted({len(values) for values in raw})
    if len(lengths) > 1:
        raise InvalidInput(f"the candidates have {lengths} samples: they need the same samples in the same order")
    return raw


def _picked(
    ranked_by: Array,
    data: Sequence[Array],
    effect: Callable[[Array, float], Estimate],
    size: Callable[[Array], Array],
    level: float,
) -> Picked:
    """`ranked_by` [candidates, samples] decides; `effect` turns a candidate's data into an estimate."""
    k, n = ranked_by.shape
    index = int(np.argmax(size(ranked_by)))
    observed = effect(data[index], level)
    folds = np.arange(n) % min(FOLDS, n)
    if n < 2 or k == 1 or observed.value is None:
        return Picked(index, observed, observed, k, 1.0)
    choices = np.array([int(np.argmax(size(ranked_by[:, folds != fold]))) for fold in range(folds.max() + 1)])
    columns = min(values.shape[1] for values in data)
    fitted = np.stack([data[choices[folds[i]]][i, :columns] for i in range(n)])
    low = effect(data[index], simultaneous_level(k, level)).low
    value = effect(fitted, level).value
    if value is not None:  # what the folds say of others can't leave the interval of this one
        value = min(max(value, value if low is None else low), value if observed.high is None else observed.high)
    estimate = Estimate(value, low, observed.high, observed.n, level, observed.note, SELECTED)
    return Picked(index, estimate, observed, k, float(np.mean(choices == index)))
