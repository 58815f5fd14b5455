"""Causes that concern whole rows: duplicated, in another order, at other positions, cut short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from noisescope.comparison.logprob_files import Array, LogprobFile, LogprobRow
from noisescope.comparison.logprob_pairs import (
    SENTINEL,
    Found,
    Matched,
    Pair,
    Pairs,
    copies,
    gap,
    overlapping,
    reorder,
    row_shifts,
)


def pair_rows(row_a: LogprobRow, row_b: LogprobRow) -> Pair:
    """Both to the length of the longer one, NaN where one side has ended."""
    x, y = row_a.values, row_b.values
    length = max(len(x), len(y))
    x, y = (np.concatenate([v, np.full(length - len(v), np.nan)]) for v in (x, y))
    return Pair(x, y, row_a, row_b)


# -- rows


def repeated(a: LogprobFile, b: LogprobFile, matched: Matched, pairs: Pairs) -> Found | None:
    """Rows that one file has twice, where files are matched in order: all rows after a copy are one too late."""
    more = len(b.rows) - len(a.rows)
    if matched.how != "order" or not more:
        return None
    longer = b if more > 0 else a
    seen: set[bytes] = set()
    kept = [row for row in longer.rows if len(row.values) < 2 or not _seen(row, seen)]
    if len(longer.rows) - len(kept) != abs(more):
        return None
    rows = (a.rows, kept) if more > 0 else (kept, b.rows)
    mended = tuple(pair_rows(left, right) for left, right in zip(*rows, strict=True))
    before, after = gap(pairs).value, gap(mended).value
    if after is None or (before is not None and after > 0.5 * before):
        return None
    return Found(
        "duplicated rows",
        f"{abs(more)} sequences of {'B' if more > 0 else 'A'} duplicate other sequences in the same file.",
        _GATHERED,
        mended,
        int(sum(len(row.values) for row in longer.rows) - sum(len(row.values) for row in kept)),
    )


def _seen(row: LogprobRow, seen: set[bytes]) -> bool:
    name = row.values.tobytes()
    known = name in seen
    seen.add(name)
    return known


def duplicated(pairs: Pairs) -> Found | None:
    """Rows of one file whose values another row duplicates, although the other file has two different rows."""
    doubled = {side: copies([row_of(one) for one in pairs]) for side, row_of in _SIDES.items()}
    sizes = np.array([one.size for one in pairs])
    usual = float(np.nanmedian(sizes)) if np.isfinite(sizes).any() else 0.0
    wrong = {
        at
        for at, one in enumerate(pairs)
        if (one.row_a.number in doubled["A"]) != (one.row_b.number in doubled["B"]) and not one.size <= 5 * usual
    }
    if not wrong:
        return None
    side = "A" if doubled["A"] else "B"
    return Found(
        "duplicated rows",
        f"{len(wrong)} sequences of {side} duplicate other sequences in the same file.",
        _GATHERED,
        tuple(one for at, one in enumerate(pairs) if at not in wrong),
        int(sum(len(pairs[at].a) for at in wrong)),
    )


_GATHERED = (
    "Check how batches are gathered: the last batch padded with earlier samples, a retry appended to the results, an "
    "index that does not advance."
)
_SIDES: dict[str, Callable[[Pair], LogprobRow]] = {"A": lambda one: one.row_a, "B": lambda one: one.row_b}


def reordered(pairs: Pairs) -> Found | None:
    left, right = ({row_of(one).number: one for one in pairs} for row_of in _SIDES.values())
    other = reorder([one.row_a for one in pairs], [one.row_b for one in pairs])
    if other is None:
        return None
    mended = [pair_rows(*_current(left[x].row_a, left[x].a, right[y].row_b, right[y].b)) for x, y in other]
    before, after = gap(pairs).value, gap(mended).value
    if before is None or after is None or after > 0.5 * before:
        return None
    moved = sum(left[x].row_b.number != y for x, y in other)
    return Found(
        "reordered rows",
        f"{moved} of {len(pairs)} sequences of B match other sequences of A than their names or order indicate.",
        "Match sequences by their tokens: load balancing between ranks, shuffling or sorting changed the order.",
        tuple(mended),
        int(sum(len(one.a) for one in mended)),
    )


def _current(row_a: LogprobRow, a: Array, row_b: LogprobRow, b: Array) -> tuple[LogprobRow, LogprobRow]:
    """Rows with their current values: earlier causes may have corrected them."""
    return replace(row_a, values=_ended(a)), replace(row_b, values=_ended(b))


# -- alignment and lengths


def misaligned(pairs: Pairs) -> Found | None:
    raw = [(_ended(one.a), _ended(one.b)) for one in pairs]
    shifts = row_shifts(raw)
    if not any(shifts):
        return None
    mended = []
    for one, (x, y), shift in zip(pairs, raw, shifts, strict=True):
        left, right = overlapping(x, y, shift)
        plain = replace(one.row_a, tokens=None), replace(one.row_b, tokens=None)
        mended.append(Pair(left, right, *plain, first=max(0, -shift)) if shift else one)
    return Found(
        "misaligned",
        _shifted(shifts),
        "Check the shift between logits and the tokens they predict (logits at t predict token t + 1), and whether "
        "one side includes prompt tokens or the first token.",
        tuple(mended),
        int(sum(len(one.a) for one, shift in zip(mended, shifts, strict=True) if shift)),
    )


def _shifted(shifts: Sequence[int]) -> str:
    counts = Counter(shift for shift in shifts if shift)
    moved = counts.total()
    rows = "" if moved == len(shifts) else f" in {moved} of {len(shifts)} sequences"
    shift = counts.most_common(1)[0][0]
    ahead = "later" if shift > 0 else "earlier"
    if len(counts) == 1:
        places = "position" if abs(shift) == 1 else "positions"
        return f"B holds each token's value {abs(shift)} {places} {ahead} than A{rows}."
    smallest, largest = min(counts, key=abs), max(counts, key=abs)
    return f"B holds each token's value {abs(smallest)} to {abs(largest)} positions {ahead} than A{rows}."


def _ended(values: Array) -> Array:
    """Without the NaN at the end that made both sides equally long."""
    known = np.flatnonzero(~np.isnan(values))
    return values[: known[-1] + 1] if len(known) else values[:0]


def truncated(pairs: Pairs) -> Found | None:
    """One side ends before the other, or has zeros to the end."""
    mended, lost, cut = [], {"A": 0, "B": 0}, 0
    lengths: dict[str, list[int]] = {"A": [], "B": []}
    for one in pairs:
        ends = {"A": _end(one.a, one.b), "B": _end(one.b, one.a)}
        shared = min(ends.values())
        for side, end in ends.items():
            lost[side] += max(ends.values()) - end
            lengths[side].append(end)
        cut += ends["A"] != ends["B"]
        mended.append(replace(one, a=one.a[:shared], b=one.b[:shared]))
    side = "A" if lost["A"] > lost["B"] else "B"
    whole = sum(len(one.a) for one in pairs)
    if lost[side] < 3 or lost[side] < 0.002 * whole:
        return None
    longest = max(lengths[side])
    at_limit = sum(length == longest for length in lengths[side])
    limit = (
        (f"; {at_limit} of its sequences stop at exactly {longest} tokens")
        if at_limit > max(2, len(pairs) // 4)
        else ""
    )
    return Found(
        "truncated",
        f"{side} lacks the last {lost[side]} of {whole} tokens, in {cut} of {len(pairs)} sequences{limit}.",
        "Compare the length limits (max_tokens, max_model_len, max_response_length) and how batches are padded.",
        tuple(mended),
        lost[side],
    )


def _end(mine: Array, other: Array) -> int:
    """Where values end: NaN from there on, or at least 3 zeros or placeholders where the other side has values."""
    empty = np.isnan(mine) | (mine <= SENTINEL) | ((mine == 0) & (np.isnan(other) | (other < -1e-3)))
    # likely tokens round to 0 here and there: zeros end a sequence only where the other side is not sure, too
    last = np.flatnonzero(~empty & ~((mine == 0) & (other > -1e-3)))
    end = int(last[-1]) + 1 if len(last) else 0
    nan_end = len(_ended(mine))
    return end if nan_end - end >= 3 else nan_end
