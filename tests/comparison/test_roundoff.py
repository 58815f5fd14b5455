"""The round-off band as a value: its ends, its false alarms, other tokens, and greedy texts."""

from __future__ import annotations

import numpy as np
import pytest

from noisescope.comparison.roundoff import FALSE_ALARM, KERNEL_SPREAD, band_of, digits_of, forecast, gap_between
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate


def population(draw: np.random.Generator, sequences: int = 30, scale: float = 0.02) -> tuple[list, list]:
    """Log-probabilities, and differences of two seeds that grow with surprise."""
    logprobs = [-draw.gamma(0.7, 2.0, 40) for _ in range(sequences)]
    differences = [scale * (1 - np.exp(row)) * draw.normal(size=(2, 40)) for row in logprobs]
    return logprobs, differences


def test_healthy_pairs_pass_at_the_stated_rate_and_faults_do_not() -> None:
    """Kernels that differ by the stated spread raise as many alarms as stated; three times the size, nearly all."""
    draw = np.random.default_rng(0)
    logprobs, differences = population(draw)
    band = band_of(logprobs, differences, dtype="bfloat16")
    alarms = {1.0: 0, 3.0: 0}
    for factor in alarms:
        for _ in range(400):
            kernels = factor * np.exp(KERNEL_SPREAD["bfloat16"] * draw.normal())
            other = [a + kernels * 0.02 * (1 - np.exp(a)) * draw.normal(size=40) for a in logprobs]
            alarms[factor] += band.judge(gap_between(logprobs, other)) == "more than round-off"
    assert alarms[1.0] <= 400 * FALSE_ALARM + 3 * (400 * FALSE_ALARM) ** 0.5 and alarms[3.0] > 380


def test_a_band_moves_to_other_tokens_by_their_surprise() -> None:
    """Likelier tokens have a narrower band, near the one that is measured on them."""
    draw = np.random.default_rng(1)
    band = band_of(*population(draw), dtype="bfloat16")
    sure = [row * 0.1 for row in population(draw)[0]]
    moved = band.for_tokens(sure)
    measured = band_of(sure, [0.02 * (1 - np.exp(row)) * draw.normal(size=(2, 40)) for row in sure], dtype="bfloat16")
    assert moved.expected.value < 0.5 * band.expected.value
    assert moved.expected.value == pytest.approx(measured.expected.value, rel=0.25)
    assert moved.high / moved.expected.value == pytest.approx(band.high / band.expected.value, rel=0.05)
    with pytest.raises(InvalidInput, match="all are missing"):
        band.for_tokens([np.full(3, np.nan)])


def test_what_says_too_little_is_undecided() -> None:
    band = band_of(*population(np.random.default_rng(2)), dtype="float16")
    assert band.judge(Estimate(0.1, None, None, 1), tokens=10) == "undecided"
    assert band.judge(Estimate(None, None, None, 0)) == "undecided"
    with pytest.raises(InvalidInput, match="finite differences"):
        band_of([np.zeros(2)], [np.array([[np.nan, 0.1]])], dtype="float32")


def test_gaps_leave_missing_tokens_out() -> None:
    mine, other = [[-1.0, np.nan, -2.0], [-1.0]], [[-1.5, -1.0, -2.0], [-1.0]]
    gap = gap_between([np.array(row) for row in mine], [np.array(row) for row in other])
    assert gap.value == pytest.approx(0.125) and gap.n == 2
    assert gap_between([np.array([np.nan])], [np.array([0.0])]).value is None


def test_greedy_texts_and_digits() -> None:
    """The first differing step counts; a text without one is censored."""
    flips = [np.array([[0, 0, 1, 1], [0, 0, 0, 0]]), np.array([[1, 0, 0, 0], [0, 1, 0, 0]])]
    found = forecast(flips, watched=4)
    assert found.median_tokens.value == 2 and found.per_token.value == pytest.approx(0.25) and found.texts == 2
    assert digits_of("3", np.full(10, 1e-3)).typical == pytest.approx(3)
    assert digits_of("3", np.zeros(4)).typical is None
    with pytest.raises(InvalidInput, match="no text has a generated token"):
        forecast([np.zeros((2, 0))], watched=4)
