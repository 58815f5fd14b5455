"""Operators, sliding windows, avalanche points and the critical threshold by the notes' names."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noisescope as ns
from noisescope.diagnostic import (
    find_critical_threshold,
    identify_avalanche_points,
    operator_level_diagnosis,
    operator_sensitivity_analysis,
    plot_sensitivity_heatmap,
    sliding_window_diagnosis,
)
from noisescope.errors import InvalidInput, NoisescopeError, NothingInjected
from noisescope.testing import tiny_model


def windows(losses: list[float | None], size: int = 3) -> dict[str, dict[str, object]]:
    return {
        f"L{i}-{i + size - 1}": {"start_layer": i, "end_layer": i + size - 1, "degradation": loss}
        for i, loss in enumerate(losses)
    }


def test_operators_have_the_rows_of_the_notes(subject, answered):
    """Every operator the model has, with real injections; matmul counts linears as well as attention's products."""
    found = operator_level_diagnosis(subject.model, answered, noise_scale=0.3, seeds=2)
    assert list(found) == ["matmul", "softmax", "silu", "layernorm"]
    for row in found.values():
        assert row["degradation"] == pytest.approx((row["baseline_acc"] - row["noisy_acc"]) / row["baseline_acc"])
        assert row["sensitivity_score"] == pytest.approx(row["degradation"] / 0.3)
    per_forward = {name: row["total_injections"] / 2 for name, row in found.items()}  # one slice, two seeds
    assert per_forward == {"matmul": 2 * 7 + 2 * 2 + 1, "softmax": 2, "silu": 2, "layernorm": 2 * 2 + 1}
    assert found["matmul"]["degradation"] > found["silu"]["degradation"]


def test_operators_that_a_model_lacks(subject, answered):
    """By default they are left out; one asked for by name is refused rather than called robust."""
    assert list(operator_level_diagnosis(subject, answered, operators=["softmax"], seeds=1)) == ["softmax"]
    with pytest.raises(NothingInjected, match="no gelu"):
        operator_level_diagnosis(subject, answered, operators=["softmax", "gelu"], seeds=1)
    with pytest.raises(InvalidInput, match="unknown operator 'sofmax'"):
        operator_level_diagnosis(subject, answered, operators=["sofmax"])
    with pytest.raises(InvalidInput, match=r"unknown keyword 'sample'.*Did you mean 'samples'"):
        operator_level_diagnosis(subject, answered, sample=3)


def test_noise_that_rounds_away_is_no_robustness(answered_by):
    """In bfloat16 a scale of 1e-5 changes nothing: the row says so, and has no accuracy to be proud of."""
    model = tiny_model("llama").to(torch.bfloat16)
    data = [answered_by(model)]
    row = operator_level_diagnosis(model, data, 1e-5, operators=["matmul"], seeds=1)["matmul"]
    assert row["evidence"] == "failed" and "is lost to rounding" in row["error"] and row["degradation"] is None
    with pytest.raises(NoisescopeError, match="is lost to rounding"):
        operator_sensitivity_analysis(model, data, 1e-5, operators=["matmul"], seeds=1)


def test_the_most_sensitive_operator_comes_first(subject, answered):
    """Pairs (operator, accuracy), the lowest accuracy first, as operator_level_diagnosis has them."""
    ranking = operator_sensitivity_analysis(subject, answered, 0.3, seeds=1)
    rows = operator_level_diagnosis(subject, answered, 0.3, seeds=1)
    assert dict(ranking) == {name: row["noisy_acc"] for name, row in rows.items()}
    assert [accuracy for _, accuracy in ranking] == sorted(accuracy for _, accuracy in ranking)


def test_a_hot_layer_is_found_though_windows_overlap(hot_layer):
    """One hot layer lifts two neighbouring windows alike: against each other neither stands out, yet it is found."""
    model, data = hot_layer
    found = sliding_window_diagnosis(model, data, window_size=2, noise_scale=0.2, seeds=1)
    assert list(found) == ["L0-1", "L1-2", "L2-3", "L3-4", "L4-5"]
    losses = [row["degradation"] for row in found.values()]
    assert min(losses[1:3]) > 0.15 and max(losses[1:3]) < 1.5 * min(losses[1:3])  # the notes' rule finds nothing
    assert max(losses[0], losses[3], losses[4]) < 0.05
    (point,) = identify_avalanche_points(found)
    assert point["layer_range"] in ("L1-2", "L2-3") and point["common"] == [2, 2]
    assert point["severity"] == "CRITICAL" and point["degradation"] == max(losses)


def test_windows_step_and_shallow_models(subject, answered):
    """`step_size` spaces windows out; a model with fewer blocks than the window has one."""
    deep = tiny_model("llama", layers=4)
    data = [torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))]
    assert list(sliding_window_diagnosis(deep, data, 2, 0.05, 2, seeds=1)) == ["L0-1", "L2-3"]
    assert list(sliding_window_diagnosis(subject, answered, window_size=3, seeds=1)) == ["L0-1"]


def test_avalanche_points_of_a_plain_map():
    """The threshold is an argument, severity turns at 20 %, unmeasured windows are passed over."""
    hot = windows([0.01, 0.02, 0.18, 0.18, 0.18, 0.02, 0.01])
    (point,) = identify_avalanche_points(hot)
    assert (point["layer_range"], point["severity"], point["common"]) == ("L2-4", "HIGH", [4, 4])
    assert identify_avalanche_points(hot, threshold=0.2) == []
    assert (
        identify_avalanche_points(windows([0.01, 0.0, 0.0, None, 0.25, None, 0.01, 0.0]))[0]["severity"] == "CRITICAL"
    )
    assert identify_avalanche_points(windows([0.3] * 8)) == []  # all alike: no point


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(1, 4))
def test_points_are_windows_above_the_threshold(losses, size):
    """Every point is one of the windows, above the threshold, and points share no layer."""
    table = windows(list(losses), size)
    points = identify_avalanche_points(table)
    for point in points:
        assert table[point["layer_range"]]["degradation"] == point["degradation"] > 0.15
    for one, other in itertools.pairwise(points):
        assert one["end"] < other["start"]


def test_critical_threshold(subject, answered, random_batches):
    """Noise just above it costs the target; a target out of reach is infinite; chance is None."""
    found = find_critical_threshold(subject, answered, target_degradation=0.2, seeds=1)
    assert found is not None and 0.01 < found < 0.20
    report = ns_robustness(subject, answered, found)
    assert report >= 0.2
    assert find_critical_threshold(subject, answered, highest=0.002, seeds=1) == math.inf
    assert find_critical_threshold(subject, random_batches, seeds=1) is None


def ns_robustness(subject, data, level):
    """The loss at one noise level, measured by the command of its own."""
    from noisescope.api import robustness

    accuracy = robustness(subject, data, noise_levels=[0, level], seeds=1)["robustness"]["levels"]
    return 1 - accuracy[1]["accuracy"]["value"] / accuracy[0]["accuracy"]["value"]


def test_the_chart_shows_bands_and_what_was_not_measured(tmp_path):
    """Bars have the bands' colours; a window without a number has a label and no bar; pyplot is not touched."""
    from matplotlib.colors import to_hex

    from noisescope.compat.diagnostic.levels import COLOURS

    figure = plot_sensitivity_heatmap(windows([0.01, 0.07, 0.12, 0.18, 0.5, None, -0.02]))
    (axes,) = figure.axes
    names = ["ROBUST", "MODERATE", "HIGH", "AVALANCHE", "CRITICAL", "not measurable", "ROBUST"]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [COLOURS[name] for name in names]
    assert [round(bar.get_height(), 6) for bar in axes.patches] == [1, 7, 12, 18, 50, 0, -2]
    assert [text.get_text() for text in axes.texts] == ["not measurable"]
    assert axes.get_xticklabels()[0].get_text() == "L0-2"
    figure.savefig(tmp_path / "windows.svg")
    assert (tmp_path / "windows.svg").stat().st_size
    with pytest.raises(InvalidInput, match="no windows"):
        plot_sensitivity_heatmap({})


def test_a_data_file_needs_a_tokenizer(subject, tmp_path):
    """A path works where there is a tokenizer, and says what to do where there is none."""
    from noisescope.demo.training_data import make_tokenizer

    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "1 + 2 = 3"}\n' * 4)
    with pytest.raises(InvalidInput, match="no tokenizer"):
        operator_level_diagnosis(subject, file, seeds=1)
    tokenizer = make_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    row = operator_level_diagnosis(ns.wrap(model, tokenizer), file, operators=["softmax"], seeds=1)["softmax"]
    assert row["total_injections"] == 2
