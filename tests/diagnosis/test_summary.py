"""What the summary says where no loss could be measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from noisescope.diagnosis import summary
from noisescope.estimate import Estimate


@pytest.mark.parametrize(("low", "words"), [(0.13, "known too roughly"), (0.0, "not significantly above chance")])
def test_a_score_above_chance_is_not_said_to_be_at_chance(low: float, words: str) -> None:
    """Two of four right: the interval excludes 0, but a share of the score has no bound."""
    context: Any = SimpleNamespace(metric="accuracy", metric_name="accuracy", chance=0.0)
    baseline: Any = SimpleNamespace(metrics={"accuracy": Estimate(0.5, low, 0.87, 4)})
    assert words in summary._not_measurable(context, baseline)
