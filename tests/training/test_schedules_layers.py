"""Per-layer factors of the noise from a report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noisescope as ns
from noisescope.diagnosis.rows import Divergence, LayerAnalysis, LayerEffect, WindowEffect
from noisescope.errors import InvalidInput
from noisescope.stats import Estimate
from noisescope.testing import tiny_model
from noisescope.training.schedules import LIMITS, equalised, from_report, layer_costs, layer_degradations, ruled

PROMPTS = [torch.arange(3, 19).reshape(1, 16) + i for i in range(4)]


def section(
    costs: list[float], windows: dict[tuple[int, int], float | None], own: dict[int, float] | None = None
) -> LayerAnalysis:
    """Levels of the layers of a report; a layer's own loss only where it was injected."""

    def loss(value: float | None) -> Estimate:
        return Estimate(value, None, None, 50)

    def nats(value: float) -> Divergence:
        return Divergence(loss(7 * value), loss(value))

    layers = [
        LayerEffect(layer=layer, predicted_kl=nats(cost), degradation=loss((own or {}).get(layer)))
        for layer, cost in enumerate(costs)
    ]
    rows = [
        WindowEffect(layer_range="", start_layer=a, end_layer=b, interaction_index=None, degradation=loss(value))
        for (a, b), value in windows.items()
    ]
    return LayerAnalysis(
        operators=("gemm",), window=3, step=1, windows=tuple(rows), layers=tuple(layers), places={}, map=(),
        avalanche_points=(), compounding=(), point_rule_avalanches=(), prediction_scale=1.0,
    )  # fmt: skip


def test_both_rules_of_the_notes() -> None:
    """Above the upper limit half, below the lower double, between and on the limits (and unknown) as it is."""
    losses: dict[int, float | None] = {0: 0.16, 1: 0.15, 2: 0.12, 3: 0.05, 4: 0.03, 5: 0.01, 6: None}
    assert list(ruled(losses).values()) == [0.5, 1, 1, 1, 2, 2, 1]
    assert list(ruled(losses, "summary").values()) == [0.5, 0.5, 0.5, 1, 1, 2, 1]
    with pytest.raises(InvalidInput, match="Allowed: methodology, summary"):
        ruled(losses, "nonsense")


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_equal_cost_at_the_same_total(costs: list[float]) -> None:
    """Layers within the limits cost the same, and all together what uniform noise costs."""
    factors = equalised(dict(enumerate(costs)))
    spent = [factors[layer] ** 2 * cost for layer, cost in enumerate(costs)]
    assert math.fsum(spent) == pytest.approx(math.fsum(costs), rel=1e-4)
    free = [cost for layer, cost in enumerate(spent) if LIMITS[0] * 1.001 < factors[layer] < LIMITS[1] * 0.999]
    assert not free or max(free) == pytest.approx(min(free), rel=1e-3)


def test_the_formula_without_limits() -> None:
    """m_l = sqrt(mean K / K_l)."""
    found = equalised({0: 1.0, 1: 4.0, 2: 7.0}, limits=(0.0, math.inf))
    assert [found[layer] for layer in range(3)] == pytest.approx([2.0, 1.0, math.sqrt(4 / 7)], abs=1e-5)


def test_a_layer_that_costs_nothing_is_capped() -> None:
    """Where a prediction is 0 the factor is the limit, not infinite."""
    assert equalised({0: 0.0, 1: 1.0, 2: 1.0})[0] == LIMITS[1]
    with pytest.raises(InvalidInput, match="one above 0"):
        equalised({0: 0.0})


def test_windows_are_mapped_onto_every_layer() -> None:
    """A layer's degradation is its own where it was injected, else the mean of the windows that hold it."""
    found = layer_degradations(section([1, 1, 1, 1], {(0, 2): 0.3, (1, 3): 0.1}, own={2: 0.5}))
    assert found == {0: pytest.approx(0.3), 1: pytest.approx(0.2), 2: 0.5, 3: pytest.approx(0.1)}
    assert layer_degradations(section([1, 1], {(0, 0): None}))[1] is None


def test_costs_are_predicted_or_injected_everywhere() -> None:
    """The prediction's mean; injected KL only where every layer has it and the screen has not."""
    found = section([1.0, 4.0], {})
    assert layer_costs(found) == {0: 1.0, 1: 4.0}
    first, second = (replace(row, predicted_kl=None, kl=row.predicted_kl) for row in found.layers)
    assert layer_costs(replace(found, layers=(first, second))) == {0: 1.0, 1: 4.0}
    with pytest.raises(InvalidInput, match="no KL for every layer"):
        layer_costs(replace(found, layers=(first, replace(second, kl=None))))


def test_from_a_report() -> None:
    """By the smooth rule from predicted KL, by the notes' from degradations; a report without layers is refused."""
    made = ns.diagnose(ns.wrap(tiny_model("llama", layers=2)), PROMPTS, effort="screen", level="layer", samples=4)
    layers = made.diagnosis.layer_analysis
    assert layers is not None
    assert from_report(made) == from_report(made.diagnosis) == equalised(layer_costs(layers))
    assert from_report(made, "methodology") == {0: 1.0, 1: 1.0}  # a screen knows no loss
    with pytest.raises(InvalidInput, match="Allowed: equalised, concentrated, methodology, summary"):
        from_report(made, "best")
    with pytest.raises(InvalidInput, match="no layer analysis"):
        from_report(replace(made.diagnosis, layer_analysis=None))
