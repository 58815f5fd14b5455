"""Which rows of an output are wrong: tokens, sequences, tiles, tails, and rows that hold another row's values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ATTENTION_OPERATORS = ("attention", "matmul", "bmm", "softmax")  # their outputs are [B, H, T, ...], others' [B, T, ...]
_MOST_NAMED = 4096  # rows that are listed one by one
_DENSE = 0.25  # of the elements between the first and the last wrong channel of the wrong rows
_WIDE = 0.75  # of the channels: rows that are wrong as a whole
_FEWEST = 4  # wrong elements of a region; fewer are spikes
_MOST_COMPARED = 64  # wrong rows that are looked for elsewhere
_SAME = 0.95  # of a row's elements that must fit


@dataclass(frozen=True)
class RowPlaces:
    """The origin of each row of an output, [R] each; without `tokens`, rows are only counted."""

    sequence: Tensor
    head: Tensor
    token: Tensor
    shape: tuple[int, int, int]  # sequences, heads and tokens of the whole output
    tokens: bool

    @classmethod
    def of(cls, lead: tuple[int, ...], index: Tensor, operator: str, batch: tuple[int, int] | None = None) -> RowPlaces:
        """For rows `index` of an output with this shape before its last dimension; `batch` is [B, T] of the input."""
        axes = _axes(lead, operator, batch)
        if axes is None:
            none = torch.zeros_like(index)
            return cls(none, none, index, (1, 1, math.prod(lead) if lead else int(index.max()) + 1), False)
        shape, order = axes
        at = dict(
            zip(order, torch.unravel_index(index, tuple(shape["BHT".index(axis)] for axis in order)), strict=True)
        )
        return cls(at["B"], at["H"], at["T"], shape, True)

    def __getitem__(self, rows: Tensor) -> RowPlaces:
        return RowPlaces(self.sequence[rows], self.head[rows], self.token[rows], self.shape, self.tokens)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(sequence, token), sorted, each once."""
        found = set(zip(self.sequence.tolist(), self.token.tolist(), strict=True))
        return tuple(sorted(found)[:_MOST_NAMED])


def _axes(
    lead: tuple[int, ...], operator: str, batch: tuple[int, int] | None
) -> tuple[tuple[int, int, int], str] | None:
    """Sequences, heads and tokens, and the order in which the leading dimensions have them; None where rows are none.

    Two dimensions are [B, T]. Three are [B, H, T] or [B, T, H]: the input's T tells, else the operator. Where heads
    or tokens are folded into the first dimension, only the input's shape tells them apart.
    """
    if len(lead) == 3:
        heads_first = operator in ATTENTION_OPERATORS
        if batch is not None and (lead[1] == batch[1]) != (lead[2] == batch[1]):
            heads_first = lead[2] == batch[1]
        sequences, heads, tokens = lead if heads_first else (lead[0], lead[2], lead[1])
        return (sequences, heads, tokens), "BHT" if heads_first else "BTH"
    if len(lead) == 2:
        if batch is not None and lead[0] != batch[0] and lead[1] == batch[1] and lead[0] % batch[0] == 0:
            return (batch[0], lead[0] // batch[0], lead[1]), "BHT"
        return (lead[0], 1, lead[1]), "BHT"
    if len(lead) == 1 and batch is not None and lead[0] == batch[0] * batch[1]:
        return (batch[0], 1, batch[1]), "BHT"
    return None


@dataclass(frozen=True)
class Region:
    """The wrong part of an otherwise correct output."""

    rows: Tensor  # bool, [R]
    channels: tuple[int, int]  # [start, stop)
    kind: str  # "tile", "tail", "batch", "heads" or "rows"
    words: str
    sure: bool  # rows that belong together, not just some


def find_region(loud: Tensor, bad: Tensor, healthy: Tensor, places: RowPlaces) -> Region | None:
    """The wrong rows where all others are right.

    bad: [R, C], elements beyond tolerance
    loud: the same, with those that are unlikely beside so many others of their kind
    healthy: bool [R], rows without any trace of an error
    """
    wrong = ~healthy
    if not bool(wrong.any()) or not bool(healthy.any()) or int(bad.sum()) < _FEWEST:
        return None
    columns = bad[wrong].any(0).nonzero().flatten()
    start, stop, width = int(columns[0]), int(columns[-1]) + 1, bad.shape[1]
    if float(loud[wrong, start:stop].double().mean()) < _DENSE:
        return None
    wide = stop - start > _WIDE * width
    kind, words = _rows_words(wrong, places)
    few = int(wrong.sum()) * 2 <= len(wrong)
    if not kind and not (few and wide):
        return None  # some channels of some rows: that may be anything
    if not wide and kind != "batch":
        kind = "tail" if kind == "tail" and stop == width else "tile"
        single = int(wrong.sum()) < 2 or stop - start < 2
        if kind == "tile" and single:
            return None
        words = f"channels {start} to {stop - 1} of {words}"
    return Region(wrong, (start, stop), kind or "rows", words, bool(kind))


def row_words(wrong: Tensor, places: RowPlaces) -> str:
    """The wrong rows as text; empty if all rows are wrong."""
    return "" if bool(wrong.all()) or not bool(wrong.any()) else _rows_words(wrong, places)[1]


def _rows_words(wrong: Tensor, places: RowPlaces) -> tuple[str, str]:
    """What the rows have in common ("" for nothing), and a text for them."""
    sequences, heads, tokens = places.shape
    bad = places[wrong]
    right = places[~wrong]
    wrong_sequences, right_sequences = _values(bad.sequence), _values(right.sequence)
    wrong_heads = _values(bad.head)
    if places.tokens and sequences > 1 and not wrong_sequences & right_sequences:
        after = wrong_sequences == set(range(1, sequences))
        named = _numbers("sequence", wrong_sequences) + (", all after the first," if after and sequences > 2 else "")
        return "batch", f"{named} of {sequences}, all tokens"
    if heads > 1 and not wrong_heads & _values(right.head):
        return "heads", f"{_numbers('head', wrong_heads)} of {heads}"
    runs = dict(_runs(bad, right))
    if None in runs.values():
        return "", _some(bad)
    distinct = set(runs.values())
    where = f" of {_numbers('sequence', wrong_sequences)}" if places.tokens and sequences > 1 else ""
    if heads > 1 and len(wrong_heads) < heads:
        where = f" of {_numbers('head', wrong_heads)}{where}"
    if len(distinct) > 1:
        return "", _some(bad)
    first, last = next(item for item in distinct if item is not None)
    unit = "token" if places.tokens else "row"
    every = len(wrong_sequences) == sequences > 1 and places.tokens
    words = f"{_numbers(unit, set(range(first, last + 1)))}{' of every sequence' if every else where}"
    at_end = last == tokens - 1 and first > 0 and (every or max(wrong_sequences) == sequences - 1)
    return ("tail" if at_end else "rows"), f"{words}, of {tokens} {unit}s"


def _runs(bad: RowPlaces, right: RowPlaces) -> Iterator[tuple[tuple[int, int], tuple[int, int] | None]]:
    """For each sequence and head the first and the last wrong token; None if a correct one lies between."""
    for sequence in _values(bad.sequence):
        for head in _values(bad.head[bad.sequence == sequence]):
            here = bad.token[(bad.sequence == sequence) & (bad.head == head)]
            first, last = int(here.min()), int(here.max())
            fine = right.token[(right.sequence == sequence) & (right.head == head)]
            between = bool(((fine > first) & (fine < last)).any())
            yield (sequence, head), None if between else (first, last)


def _values(numbers: Tensor) -> set[int]:
    return set(numbers.tolist())


def _numbers(unit: str, numbers: set[int]) -> str:
    """ "token 5", "tokens 4 to 7", "tokens 1, 3 and 9"."""
    found = sorted(numbers)
    if len(found) == 1:
        return f"{unit} {found[0]}"
    if found[-1] - found[0] == len(found) - 1:
        return f"{unit}s {found[0]} to {found[-1]}"
    named = [str(number) for number in found[:6]]
    more = f" and {len(found) - 6} more" if len(found) > 6 else f" and {named.pop()}"
    return f"{unit}s {', '.join(named)}{more}"


def _some(bad: RowPlaces) -> str:
    """Rows that have nothing in common."""
    if not bad.tokens:
        return _numbers("row", _values(bad.token))
    pairs = bad.pairs()
    if len({sequence for sequence, _ in pairs}) == 1 and bad.shape[0] > 1:
        return f"{_numbers('token', {token for _, token in pairs})} of sequence {pairs[0][0]}"
    if bad.shape[0] == 1:
        return _numbers("token", {token for _, token in pairs})
    named = ", ".join(f"({sequence}, {token})" for sequence, token in pairs[:4])
    return f"{len(pairs)} tokens, such as (sequence, token) {named}"


def moved_rows(y: Tensor, values: Tensor, limit: Tensor, wrong: Tensor) -> dict[int, int]:
    """Wrong rows that hold the values of another row: row -> that row. Empty if most hold something else."""
    candidates = wrong.nonzero().flatten()
    some = candidates[:: max(1, -(-len(candidates) // _MOST_COMPARED))].tolist()
    found: dict[int, int] = {}
    for row in some:
        if bool((y[row] == y[row, 0]).all()):
            continue  # a constant fits too well
        fits = ((y[row] - values).abs() <= limit).double().mean(1)
        own, fits[row] = float(fits[row]), 0.0
        best = float(fits.max())
        if own < 0.5 and best > _SAME:  # of copies, the nearest
            alike = (fits == best).nonzero().flatten()
            found[row] = int(alike[(alike - row).abs().argmin()])
    return found if len(found) >= max(1, 0.9 * len(some)) else {}
