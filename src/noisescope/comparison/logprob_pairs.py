"""Aligned log-probabilities of two files, as arrays in which causes are found and corrected, and what a cause is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from noisescope import stats
from noisescope.comparison.logprob_files import Array, LogprobRow
from noisescope.comparison.roundoff import gap_between
from noisescope.estimate import Estimate

Flags = NDArray[np.bool_]
SENTINEL = -1000.0  # no log-probability of a sampled token is this low: -9999, -1e9, float16's lowest
_BINS = 8  # of surprise, by which the size of a difference is judged


@dataclass(frozen=True)
class Pair:
    """One sequence on both sides, token by token; NaN where there is nothing to compare."""

    a: Array
    b: Array
    row_a: LogprobRow
    row_b: LogprobRow
    first: int = 0  # position of its first value among the sequence's tokens

    @property
    def differences(self) -> Array:
        return self.b - self.a

    @property
    def usable(self) -> Flags:
        found: Flags = np.isfinite(self.a) & np.isfinite(self.b)
        return found

    @property
    def size(self) -> float:
        """Mean |difference|; NaN where nothing can be compared."""
        found = np.abs(self.differences[self.usable])
        return float(found.mean()) if len(found) else float("nan")

    @property
    def positions(self) -> Array:
        found: Array = self.first + np.arange(len(self.a), dtype=np.float64)
        return found

    @property
    def step(self) -> float | None:
        return self.row_a.step if self.row_b.step is None else self.row_b.step

    def with_differences(self, differences: Array) -> Pair:
        """The same pair with other differences: B as it would be."""
        return replace(self, b=self.a + differences)


Pairs = Sequence[Pair]


def gap(pairs: Pairs) -> Estimate:
    return gap_between([one.a for one in pairs], [one.b for one in pairs])


def removed(before: Pairs, after: Pairs) -> Estimate:
    """How much a correction reduces the gap, paired by sequence; one that was left out counts as the others do now."""
    now = {(one.row_a.number, one.row_b.number): one.size for one in after}
    sizes = np.array([size for size in now.values() if np.isfinite(size)])
    usual = float(sizes.mean()) if len(sizes) else 0.0
    gains = [one.size - now.get((one.row_a.number, one.row_b.number), usual) for one in before]
    known = [gain for gain in gains if np.isfinite(gain)]
    if not known:
        return Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE)
    return stats.mean(known, countable=False)


def joined(pairs: Pairs, of: Callable[[Pair], Array]) -> Array:
    """Values of all comparable tokens."""
    return np.concatenate([of(one)[one.usable] for one in pairs]) if pairs else np.zeros(0)


def middle(one: Pair) -> Array:
    """Between both sides: unlike either, it is not correlated with the noise of their difference."""
    found: Array = (one.a + one.b) / 2
    return found


def relative_sizes(pairs: Pairs) -> list[Array]:
    """|difference| of each token over what tokens of its surprise usually have; NaN where not comparable.

    An unlikely token moves more under any error, so sizes at different positions or steps compare only like this.
    """
    surprise, sizes = joined(pairs, middle), np.abs(joined(pairs, lambda one: one.differences))
    edges = np.unique(np.quantile(surprise, np.linspace(0, 1, _BINS + 1)[1:-1]))
    at = np.searchsorted(edges, surprise)
    usual = np.array([sizes[at == bin_].mean() if (at == bin_).any() else 0.0 for bin_ in range(len(edges) + 1)])
    found = []
    for one in pairs:
        bins = np.searchsorted(edges, np.nan_to_num(middle(one), nan=0.0, posinf=0.0, neginf=SENTINEL))
        level = usual[bins]
        relative = np.divide(np.abs(one.differences), level, out=np.zeros(len(one.a)), where=level > 0)
        found.append(np.where(one.usable, relative, np.nan))
    return found


def t_statistic(values: Iterable[float]) -> float:
    """Student's t of "the mean is 0", over sequences; 0 for fewer than 5."""
    known = np.array([value for value in values if np.isfinite(value)])
    if len(known) < 5:
        return 0.0
    error = float(known.std(ddof=1)) / len(known) ** 0.5
    return float(known.mean()) / error if error > 0 else (np.inf if known.mean() else 0.0)


# -- the result of a cause function, and the significance test that several of them share

ALARM = 0.01  # chance that a healthy pair of files shows any of the tested causes
_TESTS = 5
ONE_TEST = ALARM / _TESTS


@dataclass(frozen=True)
class Found:
    """A cause: what was observed, where to look, and the corrected pairs."""

    name: str
    statement: str
    next_step: str
    mended: tuple[Pair, ...]
    tokens: int  # that show it
    whole: bool = False  # it may be all of the gap: correcting it removes only the part known to be its own


Cause = Callable[[Pairs], Found | None]


def significant(t: float, sequences: int) -> bool:
    """Whether Student's t over that many sequences is significant at the level of one test."""
    return bool(2 * special.stdtr(max(sequences - 1, 1), -abs(t)) < ONE_TEST)
