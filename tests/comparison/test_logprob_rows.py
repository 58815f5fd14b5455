"""Rows at other positions, in another order, or twice, of a model that is sure of most of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from noisescope.comparison.logprob_files import Array
from noisescope.comparison.logprobs import LogprobComparison

ZEROS = np.zeros(1)


@pytest.fixture
def rows() -> list[Array]:
    """Half of the tokens have a probability of nearly 1, as those of a trained policy."""
    draw = np.random.default_rng(3)
    lengths = draw.integers(20, 45, 24)
    return [-draw.exponential(2.5, n) * np.where(draw.random(n) < 0.5, 1e-3, 1.0) for n in lengths]


def names(found: LogprobComparison) -> list[str]:
    return [cause.name for cause in found.causes]


def test_a_shift_is_no_scale(rows: list[Array], compared: Any) -> None:
    """Most ratios are near 0 where sure tokens meet unsure ones, which is no constant ratio."""
    later = compared(rows, [np.concatenate([ZEROS, row[:-1]]) for row in rows])
    assert names(later) == ["misaligned"] and "1 position later than A." in later.causes[0].statement
    earlier = compared(rows, [np.concatenate([row[1:], row[-1:]]) for row in rows])
    assert names(earlier) == ["misaligned"] and "1 position earlier than A." in earlier.causes[0].statement


def test_some_rows_are_shifted(rows: list[Array], compared: Any) -> None:
    found = compared(rows, [np.concatenate([ZEROS, row[:-1]]) if n % 4 == 0 else row for n, row in enumerate(rows)])
    assert names(found) == ["misaligned"] and found.remainder.value == 0
    assert found.causes[0].statement == "B holds each token's value 1 position later than A in 6 of 24 sequences."


def test_rows_have_shifts_of_their_own(rows: list[Array], compared: Any) -> None:
    """Prompts of several lengths on one side, or padding on the left on one side and on the right on the other."""
    prompts = [np.full(3 + n % 7, -1.5) for n in range(len(rows))]
    found = compared(rows, [np.concatenate([prompt, row]) for prompt, row in zip(prompts, rows, strict=True)])
    assert names(found) == ["misaligned"] and found.remainder.value == 0
    assert "3 to 9 positions later than A." in found.causes[0].statement
    room = [np.zeros(45 - len(row)) for row in rows]
    padded = [[np.concatenate(pair) for pair in zip(*order, strict=True)] for order in ((room, rows), (rows, room))]
    assert names(compared(*padded)) == ["misaligned"]


def test_reordered_rows_are_no_scale(rows: list[Array], compared: Any) -> None:
    equal = [row[:20] for row in rows]
    longer = [np.concatenate([row, row[:10]]) for row in equal]
    assert names(compared(longer, longer[5:] + longer[:5])) == ["reordered rows"]


def test_a_copy_moves_the_rows_after_it(rows: list[Array], compared: Any) -> None:
    twice = [*rows[:4], rows[3], *rows[4:9], rows[2], *rows[9:]]
    found = compared(rows, twice)
    assert names(found) == ["duplicated rows"] and found.remainder.value == 0
    assert found.causes[0].statement.startswith("2 sequences of B duplicate")
    assert "2 sequences of A" in compared(twice, rows).causes[0].statement
