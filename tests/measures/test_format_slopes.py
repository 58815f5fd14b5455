"""Slopes of a plan's KL: against a finite difference, and against what changing a format really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.measures.format_costs import plan_injection, weight_format
from noisescope.measures.format_slopes import FormatSlopes
from noisescope.model.anatomy import linear_weight
from noisescope.probe.formats import quantise
from noisescope.testing import tiny_model

TOKENS = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(1))
FORMATS = ("int3", "int4", "int8", "bf16")
PLAN = {"model.layers.0.mlp.up_proj": "int3", "model.layers.1.self_attn.v_proj": "int3"}
ROWS = torch.arange(TOKENS.numel())


def slopes_at(model: Any, plan: dict[str, str]) -> tuple[float, dict[str, dict[str, float]]]:
    with torch.no_grad():
        clean = model(TOKENS).logits.flatten(0, 1)
    injection = plan_injection(plan)
    assert injection is not None
    current = {name: weight_format(fmt) for name, fmt in plan.items()}
    screen = FormatSlopes(model, {name: weight_format(name) for name in FORMATS}, current)
    with ns.inject(model, injection), screen, torch.enable_grad():
        logits = model(TOKENS).logits.flatten(0, 1)
        found = screen.descend(logits, clean, ROWS, torch.full((len(ROWS),), 1 / len(ROWS)))
    named = {site.module: dict(zip(FORMATS, row.tolist(), strict=True)) for site, row in screen.sums.items()}
    return float(found.mean()), named


def kl_with(model: Any, weights: dict[str, torch.Tensor]) -> float:
    """KL of the model with these weights, in float64: a step of a finite difference is lost in float32."""
    with torch.no_grad():
        clean = model.double()(TOKENS).logits.flatten(0, 1)
        modules = dict(model.named_modules())
        kept = {name: linear_weight(modules[name]).clone() for name in weights}
        for name, weight in weights.items():
            linear_weight(modules[name]).copy_(weight)
        moved = model(TOKENS).logits.flatten(0, 1)
        for name, weight in kept.items():
            linear_weight(modules[name]).copy_(weight)
        p, q = clean.log_softmax(-1), moved.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_slope_is_the_derivative_of_the_kl_of_the_plan() -> None:
    model = tiny_model("llama")
    kl, slopes = slopes_at(model, PLAN)
    rounded = {
        name: quantise(linear_weight(dict(model.named_modules())[name]), weight_format(fmt), weight=True).double()
        for name, fmt in PLAN.items()
    }
    assert kl == pytest.approx(kl_with(model, rounded), rel=1e-3)
    name, step = "model.layers.0.mlp.up_proj", 1e-3
    weight = linear_weight(dict(model.named_modules())[name])
    towards = weight - rounded[name]  # back to 16 bits, apart from the rounding of bf16
    ends = [kl_with(model, {**rounded, name: rounded[name] + side * step * towards}) for side in (1, -1)]
    assert slopes[name]["bf16"] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.02)
    assert slopes[name]["int3"] == 0.0  # no change
    assert slopes[name]["bf16"] < 0


def test_the_errors_of_others_show_in_the_slopes() -> None:
    """Beside rounded linears one at 16 bits has a slope of first order, by itself it has none."""
    model = tiny_model("llama")
    name = "model.layers.1.mlp.down_proj"
    _, beside = slopes_at(model, PLAN)
    _, nearly_alone = slopes_at(model, {"model.layers.0.mlp.up_proj": "int8"})
    assert abs(beside[name]["int3"]) > 10 * abs(nearly_alone[name]["int3"]) > 0


def test_slopes_leave_no_trace() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        before = model(TOKENS).logits
    slopes_at(model, PLAN)
    with torch.no_grad():
        assert torch.equal(before, model(TOKENS).logits)
