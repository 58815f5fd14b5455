"""Rows of an output by sequence, head and token; regions that are wrong, in words; rows that hold what is another's."""

from __future__ import annotations

import pytest
import torch

from noisescope.localization.row_pattern import RowPlaces, find_region, moved_rows, row_words

WIDTH = 32


def places(*lead: int, operator: str = "linear", batch: tuple[int, int] | None = None) -> RowPlaces:
    return RowPlaces.of(lead, torch.arange(int(torch.tensor(lead).prod())), operator, batch)


def region(where, lead=(2, 16), operator="linear"):
    """The region of an output that is wrong in `where` of [*lead, WIDTH]."""
    bad = torch.zeros(*lead, WIDTH, dtype=torch.bool)
    bad[where] = True
    bad = bad.reshape(-1, WIDTH)
    return find_region(bad, bad, ~bad.any(1), places(*lead, operator=operator))


@pytest.mark.parametrize(
    ("lead", "operator", "batch", "expected"),
    [
        ((2, 5), "linear", None, (1, 0, 2)),
        ((2, 3, 5), "attention", None, (0, 1, 2)),
        ((2, 5, 3), "norm", None, (0, 1, 2)),  # a norm of each head, before heads are moved to the front
        ((2, 3, 5), "norm", (2, 5), (0, 1, 2)),  # and after
        ((10,), "linear", (2, 5), (1, 0, 2)),
        ((6, 5), "bmm", (2, 5), (0, 1, 2)),
    ],
)
def test_a_row_is_a_sequence_a_head_and_a_token(lead, operator, batch, expected):
    """The 8th row, whichever way the leading dimensions are laid out."""
    found = places(*lead, operator=operator, batch=batch)
    assert found.tokens
    assert (int(found.sequence[7]), int(found.head[7]), int(found.token[7])) == expected


def test_rows_that_are_no_tokens_are_counted():
    """Without the input's shape a flat output has rows only."""
    found = places(10)
    assert not found.tokens and int(found.token[7]) == 7


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ((slice(None), slice(8, 12), slice(4, 8)), "tile", "channels 4 to 7 of tokens 8 to 11 of every sequence"),
        ((0, slice(8, 12), slice(4, 8)), "tile", "channels 4 to 7 of tokens 8 to 11 of sequence 0"),
        ((slice(None), slice(13, 16)), "tail", "tokens 13 to 15 of every sequence"),
        ((1, 15, slice(-5, None)), "tail", "channels 27 to 31 of token 15 of sequence 1"),
        ((1,), "batch", "sequence 1 of 2, all tokens"),
        ((slice(None), 3), "rows", "token 3 of every sequence"),
        ((0, [2, 5, 11]), "rows", "tokens 2, 5 and 11 of sequence 0"),
    ],
)
def test_a_region_in_words(where, kind, words):
    """Tiles, tails, sequences and single tokens, each by its name."""
    found = region(where)
    assert found is not None and found.kind == kind and found.words.startswith(words)


def test_sequences_after_the_first():
    """More than half of all rows, and still a region: sequences belong together."""
    found = region((slice(1, None),), lead=(4, 8))
    assert found.kind == "batch" and found.words == "sequences 1 to 3, all after the first, of 4, all tokens"


def test_heads():
    found = region((slice(None), 2), lead=(2, 4, 8), operator="attention")
    assert found.kind == "heads" and found.words == "head 2 of 4"


@pytest.mark.parametrize(
    "where",
    [
        (slice(None),),  # everything
        (torch.tensor([0, 0, 1, 1]), torch.tensor([3, 9, 2, 14]), torch.tensor([1, 30, 12, 20])),  # four elements
        (0, slice(0, 16, 3), slice(4, 8)),  # some channels of some rows
    ],
)
def test_what_is_no_region(where):
    assert region(where) is None


def test_rows_in_words():
    wrong = torch.zeros(32, dtype=torch.bool)
    assert row_words(wrong, places(2, 16)) == row_words(~wrong, places(2, 16)) == ""
    wrong[[3, 20]] = True
    assert row_words(wrong, places(2, 16)) == "2 tokens, such as (sequence, token) (0, 3), (1, 4)"


def test_moved_rows():
    """Rows one late are found; a constant row, noise, and a row that is nearly right are not."""
    values = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    limit = torch.full_like(values, 1e-3)
    late = torch.cat([values[:1], values[:-1]])
    wrong = torch.arange(12) > 0
    assert moved_rows(late, values, limit, wrong) == {row: row - 1 for row in range(1, 12)}
    assert not moved_rows(torch.zeros_like(values), torch.zeros_like(values), limit, wrong)
    assert not moved_rows(values * 1.3, values, limit, wrong)
    assert not moved_rows(values + (torch.arange(WIDTH) < 4) * 0.1, values, limit, wrong)
