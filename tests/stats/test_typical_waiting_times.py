"""Median waiting times with censoring."""

from __future__ import annotations

import numpy as np
import pytest

from noisescope.errors import InvalidInput
from noisescope.stats import median_wait


def test_censored_texts_are_not_counted_as_events() -> None:
    """Geometric waits with p = 0.02, watched for 40 steps: the median 34.3 is found, though half never meet it."""
    draw = np.random.default_rng(0)
    waits = draw.geometric(0.02, (400, 2))
    found = median_wait(np.minimum(waits, 40), waits <= 40)
    assert found.value == pytest.approx(34.3, rel=0.15) and found.low < 34.3 < found.high and found.n == 400
    naive = float(np.median(np.minimum(waits, 20)))
    short = median_wait(np.minimum(waits, 20), waits <= 20)
    assert short.value is None and short.note == "unbounded" and naive == 20


def test_an_interval_covers_the_median() -> None:
    """Of 25 runs with 40 prompts and 3 seeds that share their hazard, at least 21 cover the true median."""
    draw, covered = np.random.default_rng(1), 0
    rates = draw.uniform(0.01, 0.09, 200_000)
    truth = float(np.median(draw.geometric(rates)))
    for _ in range(25):
        waits = draw.geometric(np.repeat(draw.uniform(0.01, 0.09, (40, 1)), 3, axis=1))
        found = median_wait(np.minimum(waits, 100), waits <= 100)
        covered += bool(found.low is not None and found.low <= truth <= (found.high or np.inf))
    assert covered >= 21


def test_shapes_are_checked() -> None:
    with pytest.raises(InvalidInput, match=r"\[groups, members\] of steps of at least 1"):
        median_wait([1, 2, 3], [True, True, False])
