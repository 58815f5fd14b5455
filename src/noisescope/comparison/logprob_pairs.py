"""Matches the sequences of two files, and aligns their tokens: arrays in which causes are found and corrected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from noisescope import stats
from noisescope.comparison.logprob_files import Array, LogprobFile, LogprobRow
from noisescope.comparison.roundoff import gap_between
from noisescope.errors import InvalidInput
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


_MOST_ROWS = 2000  # rows that are compared each with each
_HEAD = 24  # tokens by which rows are recognised
_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
_CLIPPED = 5.0  # nats: a value that stands for none must not decide how rows line up
_OWN_SHIFT = 0.1  # of the gap: what the shift of some sequences alone may leave
_SAME = 8  # values that must be equal for two rows to be copies


@dataclass(frozen=True)
class Matched:
    """Pairs of rows by their numbers in A and B; `how` says by what."""

    pairs: tuple[tuple[int, int], ...]
    how: str


def match_rows(a: LogprobFile, b: LogprobFile) -> Matched:
    """By name if names are unique, else by tokens, else in order."""
    for how, names in (("name", _keys), ("tokens", _token_names)):
        left, right = names(a.rows), names(b.rows)
        if left is None or right is None:
            continue
        found = [(left[name], right[name]) for name in left if name in right]
        if len(found) >= max(1, min(len(left), len(right)) // 2):
            return Matched(tuple(found), how)
    count = min(len(a.rows), len(b.rows))
    if not count:
        raise InvalidInput(f"{a.path} and {b.path} have no sequence in common: one of them is empty")
    return Matched(tuple((n, n) for n in range(count)), "order")


def _keys(rows: Sequence[LogprobRow]) -> dict[object, int] | None:
    found: dict[object, int] = {row.key: row.number for row in rows if row.key is not None}
    return found if len(found) == len(rows) else None


def _token_names(rows: Sequence[LogprobRow]) -> dict[object, int] | None:
    found: dict[object, int] = {row.tokens: row.number for row in rows if row.tokens}
    return found if len(found) == len(rows) else None


def reorder(a: Sequence[LogprobRow], b: Sequence[LogprobRow]) -> list[tuple[int, int]] | None:
    """Other pairs of rows that are matched one by one, where many of B belong to others of A; None where they don't.

    By tokens where both have them, else by their first values: a sequence's log-probabilities are its fingerprint.
    """
    tokens = {row.tokens: row.number for row in a if row.tokens}
    if len(tokens) == len(a) and all(row.tokens for row in b):
        found = [(tokens[row.tokens], row.number) for row in b if row.tokens in tokens]
    else:
        found = _by_values(a, b)
    before = {(left.number, right.number) for left, right in zip(a, b, strict=True)}
    moved = [pair for pair in found if pair not in before]
    distinct = len({left for left, _ in found})
    if len(moved) < max(2, len(before) // 10) or distinct < len(found) or len(found) < 0.5 * len(b):
        return None
    return sorted(found)


def _by_values(a: Sequence[LogprobRow], b: Sequence[LogprobRow]) -> list[tuple[int, int]]:
    """Rows of B with the row of A they are clearly nearest to."""
    left = [row for row in a if len(row.values) >= _HEAD][:_MOST_ROWS]
    right = [row for row in b if len(row.values) >= _HEAD][:_MOST_ROWS]
    if len(left) < 3 or len(right) < 3:
        return []
    x, y = (np.nan_to_num(np.stack([row.values[:_HEAD] for row in side]), nan=0.0) for side in (left, right))
    found = []
    for number, row in enumerate(y):
        gaps = np.median(np.abs(x - row), axis=1)
        nearest, second = np.argsort(gaps)[:2]
        if gaps[nearest] < 0.2 * gaps[second]:
            found.append((left[nearest].number, right[number].number))
    return found


def copies(rows: Sequence[LogprobRow]) -> set[int]:
    """Indices of rows whose values all occur in another row too."""
    names = [row.values.tobytes() if len(row.values) >= _SAME else b"" for row in rows]
    counts = Counter(names)
    return {row.number for row, name in zip(rows, names, strict=True) if name and counts[name] > 1}


def row_shifts(pairs: Sequence[tuple[Array, Array]]) -> list[int]:
    """For each sequence the shift s for which b[t + s] is a[t]; 0 unless another is clearly better.

    Besides small shifts the difference of lengths is tried: one side may hold the prompt's tokens, too. A shift that
    half of the sequences have is that of all. Otherwise sequences have their own, and must fit far better with them.
    """
    found = [_row_shift(a, b) for a, b in pairs]
    usable = [one for one in found if one is not None]
    votes = Counter(shift for shift, _ in usable if shift)
    if not votes:
        return [0] * len(found)
    shift, count = votes.most_common(1)[0]
    if count >= max(2, 0.5 * len(usable)) or len(usable) == 1:
        return [shift] * len(found)
    own = [one[0] if one is not None and one[1] < _OWN_SHIFT else 0 for one in found]
    return own if sum(map(bool, own)) >= 2 else [0] * len(found)


def _row_shift(a: Array, b: Array) -> tuple[int, float] | None:
    """The nearest shift, and the gap it leaves as a share of the gap without it; None for a short sequence."""
    if min(len(a), len(b)) < _SAME:
        return None
    extra = {len(b) - len(a)} if 0 < abs(len(b) - len(a)) <= len(a) + len(b) else set()
    padded = _zeros_before(b) - _zeros_before(a)  # padded on the left on one side, on the right on the other
    gaps = {shift: _gap(a, b, shift) for shift in {*_SHIFTS, *extra, padded}}
    nearest = min(gaps, key=lambda shift: (gaps[shift], abs(shift)))
    better = bool(nearest) and gaps[nearest] < 0.4 * gaps[0]
    return (nearest, gaps[nearest] / gaps[0]) if better else (0, 1.0)


def _zeros_before(values: Array) -> int:
    known = np.flatnonzero(values)
    return int(known[0]) if len(known) else 0


def _gap(a: Array, b: Array, shift: int) -> float:
    left, right = overlapping(a, b, shift)
    size = np.minimum(np.abs(left - right), _CLIPPED)
    size = size[np.isfinite(size)]
    return float(size.mean()) if len(size) >= _SAME // 2 else float("inf")


def overlapping(a: Array, b: Array, shift: int) -> tuple[Array, Array]:
    """The values that coincide when b[t + shift] is a[t]."""
    if shift < 0:
        a = a[-shift:]
    else:
        b = b[shift:]
    length = min(len(a), len(b))
    return a[:length], b[:length]
