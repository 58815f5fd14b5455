"""The formulas of gradients against autograd in float64, and how far random rounding moves a result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from noisescope.localization.gradient_formulas import _attention_back
from noisescope.localization.gradient_rounding import RoundingMode, as_rows, expected_gradients, judge_gradient, moved
from noisescope.probe.unfused_attention import AttentionArguments


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_attention_is_differentiated(heads, mask):
    """Grouped queries, every kind of mask, and a scale of one's own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, n, 5, 8, generator=generator, dtype=torch.float64) for n in (4, heads, heads, 4))
    given = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(5, 5, generator=generator) < 0.7},
        "added": {"attn_mask": torch.randn(5, 5, generator=generator, dtype=torch.float64)},
    }[mask] | {"scale": 0.3}
    if mask == "bool":
        given["attn_mask"] |= torch.eye(5, dtype=torch.bool)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, **given, enable_gqa=heads != 4)
    expected = torch.autograd.grad(y, leaves, g)
    found = _attention_back(AttentionArguments(q, k, v, **given), g, lambda x, own: x)
    for name, value in zip(("query", "key", "value"), expected, strict=True):
        assert torch.allclose(found[name], value, atol=1e-12), name


def test_random_rounding_moves_what_is_inexact():
    """By about a unit of round-off; whole numbers, copies and views stay."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0.1, 3, 64)
    off = (moved(x, generator) - x).abs()
    assert 0 < float(off.max()) < 10 * 2.0**-24 * float(x.max())
    assert torch.equal(moved(torch.arange(9.0), generator), torch.arange(9.0))
    with RoundingMode(generator):
        assert torch.equal(x.clone().reshape(8, 8), x.reshape(8, 8))
        assert not torch.equal(x * x, torch.tensor(x.numpy() ** 2))


def test_limits_follow_from_the_runs():
    """A sum that cancels may be off by much more than its own ulp, and a gain of all elements shows below them."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))

    def run(generator=None):
        wide = x.double() if generator is None else x
        if generator is None:
            return {"y": (wide + 1000) - 1000 + wide}
        with RoundingMode(generator):
            return {"y": (wide + 1000) - 1000 + wide}

    expected = expected_gradients(run(), {"y": torch.float32}, run)["y"]
    assert not judge_gradient(as_rows(((x + 1000) - 1000 + x), expected, tokens=True), expected.gain).alarm
    off = judge_gradient(as_rows((expected.values * (1 + 1e-4)).float(), expected, tokens=True), expected.gain)
    assert off.strengths["signed"] > 1 > off.strengths["element"]
