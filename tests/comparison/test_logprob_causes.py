"""Patterns of values: placeholders, other quantities, and what must not be read into rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from noisescope.comparison import logprob_causes
from noisescope.comparison.logprob_files import Array
from noisescope.comparison.logprob_pairs import Found, Pairs


@pytest.fixture
def rows() -> list[Array]:
    draw = np.random.default_rng(4)
    return [-draw.exponential(2.5, 40) * np.where(draw.random(40) < 0.5, 1e-3, 1.0) for _ in range(24)]


@pytest.mark.parametrize("factor", [1 / math.log(2), 1 / math.log(10), -1.0])
def test_undoing_a_factor_leaves_no_other_cause(rows: list[Array], compared: Any, factor: float) -> None:
    """float64's rounding of the factor must not look like top-k."""
    found = compared(rows, [row * factor for row in rows])
    assert [cause.name for cause in found.causes] == ["scale"] and found.roundoff == "identical"
    assert found.words == "Cause found: scale. After correction, nothing remains."


def test_running_sums_and_logits_are_named(rows: list[Array], compared: Any) -> None:
    sums = compared(rows, [np.cumsum(row) for row in rows])
    assert [cause.statement for cause in sums.causes] == ["B holds running sums of log-probabilities."]
    logits = compared(rows, [row + 12 for row in rows])
    assert [cause.name for cause in logits.causes] == ["scale"] and "logits" in logits.causes[0].statement


def test_a_repeated_low_value_stands_for_none(rows: list[Array], compared: Any) -> None:
    found = compared(rows, [np.where(np.arange(40) % 13 == n % 13, -100.0, row) for n, row in enumerate(rows)])
    assert [cause.name for cause in found.causes] == ["missing values"] and found.remainder.value == 0
    assert "tokens exactly -100 in B" in found.causes[0].statement


def test_no_trend_is_read_into_what_a_temperature_leaves(compared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its curve removes a part only, and the rest depends on how sure the model is along a text."""
    draw = np.random.default_rng(5)
    logits = [draw.normal(size=(40, 50)) * 3 for _ in range(24)]
    tokens = [(one + draw.gumbel(size=one.shape)).argmax(1)[:, None] for one in logits]

    def values(temperature: Array) -> list[Array]:
        tables = [one / temperature[:, None] for one in logits]
        whole = [one - np.log(np.exp(one).sum(1, keepdims=True)) for one in tables]
        return [np.take_along_axis(one, at, 1)[:, 0] for one, at in zip(whole, tokens, strict=True)]

    def trend(pairs: Pairs) -> Found:
        return Found("a trend", "", "", tuple(pairs), 1)

    monkeypatch.setattr(logprob_causes, "CAUSES", (logprob_causes.processed, trend))
    monkeypatch.setattr(logprob_causes, "BY_POSITION", (trend,))
    found = compared(values(np.ones(40)), values(np.full(40, 0.7)))
    assert [cause.name for cause in found.causes] == ["temperature"]


def test_a_large_gap_is_no_round_off_without_a_band(rows: list[Array], compared: Any) -> None:
    found = compared(rows, [row[::-1] for row in rows])
    assert (found.verdict, found.outcome, found.causes) == ("diverged", "fail", ())
    assert "far above round-off in 16 or 32 bits" in found.words
