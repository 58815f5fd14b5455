"""What the original method notes advise for outlier channels."""

from __future__ import annotations

from typing import Any

import pytest

from noisescope.errors import InvalidInput
from noisescope.plans.smoothing import method_for, recommendations


@pytest.mark.parametrize(
    ("ratio", "target", "method"),
    [
        (5, "W8A8", ("none", None)),
        (15, "W8A8", ("watch", None)),
        (30, "W8A8", ("per-channel", None)),
        (80, "W8A8", ("SmoothQuant", 0.75)),
        (80, "W4A16", ("AWQ", None)),
        (5, "W4A16", ("none", None)),
    ],
)
def test_the_tables(ratio: float, target: str, method: Any) -> None:
    """By the largest ratio, and by what is to be rounded."""
    assert method_for(ratio, target) == method


def fold(source: str, target: str, place: int, gain: float) -> dict[str, Any]:
    gains = {"SmoothQuant": gain, "AWQ": 1.0, "per-channel": 2.0}
    return {"source": source, "targets": [target], "place": place, "gains": gains}


def test_gains_are_of_what_reads_the_channels() -> None:
    """A linear has those of its own fold, the residual stream those of the next block; small ratios have no row."""
    rows = {
        "layers.0.up_proj": {"layer": 0, "max_ratio": 60.0},
        "layers.0 (residual)": {"layer": 0, "max_ratio": 30.0},
        "layers.1.q_proj": {"layer": 1, "max_ratio": 3.0},
    }
    folds = [fold("layers.0.up_proj", "layers.0.down_proj", 0, 5.0), fold("layers.1.norm", "layers.1.q_proj", 1, 1.5)]
    found = recommendations({"channel_analysis": {"per_layer": rows}}, folds)
    assert [(row["component"], row["method"], row["alpha"], row["best"]) for row in found] == [
        ("layers.0.up_proj", "SmoothQuant", 0.75, "SmoothQuant"),
        ("layers.0 (residual)", "per-channel", None, "per-channel"),
    ]
    assert [row["gains"]["SmoothQuant"] for row in found] == [5.0, 1.5]
    with pytest.raises(InvalidInput, match="channel level"):
        recommendations({}, folds)
    with pytest.raises(InvalidInput, match="'W2A2'"):
        method_for(60, "W2A2")
