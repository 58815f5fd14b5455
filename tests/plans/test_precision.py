"""The bit rule of the original method notes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from noisescope.diagnosis.section_types import FormatScore
from noisescope.diagnostic import assign_precision, generate_mixed_precision_config
from noisescope.errors import InvalidInput
from noisescope.plans.precision import Module, bits_by_rule, layer_sensitivity, missed_target, rule_plan


def test_limits_decide_and_the_target_adjusts() -> None:
    """Above 15 % 16 bits, above 5 % 8, else 4; then layers move until the average fits."""
    profile = {0: 0.2, 1: 0.12, 2: 0.07, 3: 0.01}
    assert bits_by_rule(profile, 9) == {0: 16, 1: 8, 2: 8, 3: 4}  # as the limits say: 9 on average
    assert bits_by_rule(profile, 8) == {0: 16, 1: 8, 2: 4, 3: 4}  # the least sensitive of the 8-bit ones is lowered
    assert bits_by_rule(profile, 10) == {0: 16, 1: 8, 2: 8, 3: 8}
    assert bits_by_rule({0: 0.01, 1: 0.03, 2: 0.02}, 5) == {0: 4, 1: 8, 2: 4}  # the most sensitive is raised first


def test_it_says_when_it_misses_its_target() -> None:
    """16-bit layers are never lowered: the notes' function warns, a plan has a note."""
    with pytest.warns(UserWarning, match="10.00 bits on average, 6 requested"):
        assert generate_mixed_precision_config({0: 0.3, 1: 0.01}, target_avg_bits=6) == {0: 16, 1: 4}
    assert assign_precision({0: 0.01, 1: 0.02}, 6) == {0: 4, 1: 8}
    modules = [
        Module(f"m{i}", i, 8, {"bf16": FormatScore(16, 16, 0, None), "int4": FormatScore(4, 4, 1, None)})
        for i in range(2)
    ]
    assert rule_plan(modules, {0: 0.3, 1: 0.01}, 6).note.startswith("the bit rule misses its target: 10.00 bits")
    assert rule_plan(modules, {0: 0.3, 1: 0.01}, 10).note == ""
    with pytest.raises(InvalidInput, match=r"formats of \[8\] bits"):
        rule_plan(modules, {0: 0.1, 1: 0.01}, 6)
    with pytest.raises(InvalidInput, match="at least one layer"):
        bits_by_rule({})


@pytest.mark.parametrize(
    ("profile", "target", "words"),
    [
        (dict.fromkeys(range(8), 0.12), 5, "8.00 bits on average, 5 requested.*never lowered"),
        (dict.fromkeys(range(8), 0.01), 12, "8.00 bits on average, 12 requested.*gets more than 8"),
        ({0: 0.01, 1: 0.02, 2: 0.03}, 5, ""),  # 5.33: a layer more or less goes past the target
    ],
)
def test_every_missed_target_is_reported(profile: dict[int, float], target: float, words: str) -> None:
    """Above or below, with or without layers of 16 bits; within one layer's step there is nothing to report."""
    missed = missed_target(bits_by_rule(profile, target), target)
    assert re.search(words, missed) if words else missed == ""


def test_rows_are_taken_and_what_was_not_measured_is_refused() -> None:
    """By the notes' function, a row counts by its degradation, alone or with its interval; without one it is named."""
    rows: dict[Any, Any] = {
        "L0-2": {"degradation": 0.2, "sensitivity_score": 4.0},
        "L1-3": {"degradation": {"value": 0.07}},
        5: 0.01,
    }
    assert generate_mixed_precision_config(rows, 28 / 3) == {"L0-2": 16, "L1-3": 8, 5: 4}
    assert generate_mixed_precision_config({0: np.float32(0.2), 1: np.float64(0.01)}, 10) == {0: 16, 1: 4}
    for bad in (None, float("nan"), "0.1", {"sensitivity_score": 4.0}, {"degradation": {"value": None}}, True):
        with pytest.raises(InvalidInput, match=r"no degradation of 'L7' \(got"):
            generate_mixed_precision_config({0: 0.1, "L7": bad})


def test_windows_are_mapped_onto_layers(made: Any) -> None:
    """A layer has the mean loss of the windows that hold it; where one has none, there is no profile."""
    losses = {(0, 1): 0.1, (1, 2): 0.3, (2, 3): 0.5}
    windows = [made.window(*ends, 1e-3, loss) for ends, loss in losses.items()]

    def sensitivity(*rows: Any) -> dict[int, float]:
        return layer_sensitivity(made.diagnosis(made.about(blocks=4), layer_analysis=made.layers(windows=rows)))

    assert sensitivity(*windows) == pytest.approx({0: 0.1, 1: 0.2, 2: 0.4, 3: 0.5})
    assert sensitivity(*windows[:2], made.window(2, 3, 1e-3, None)) == {}
    assert layer_sensitivity(made.diagnosis()) == {}
