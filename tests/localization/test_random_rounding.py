"""Monte Carlo arithmetic: moves of a few units of round-off, and the limits that follow from runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import noisescope as ns
from noisescope.localization.random_rounding import RUNS, limits_of, roundings
from noisescope.testing import tiny_model


@pytest.mark.parametrize(("dtype", "u", "units"), [(torch.bfloat16, 2**-8, 2.0), (torch.float32, 2**-24, 8.0)])
def test_elements_move_by_a_few_units_of_round_off(dtype, u, units):
    y = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    steps = (roundings()[0].moved(y).double() - y.double()) / (y.double().abs() + y.double().square().mean().sqrt())
    assert units / 4 < float(steps.abs().max()) / u < units + 2
    assert torch.equal(roundings()[0].moved(y), roundings()[0].moved(y))


def test_what_has_no_fractions_stays():
    index = torch.arange(4)
    assert roundings()[0].moved(index) is index


def test_complex_numbers_move_in_both_parts_and_convolutions_lose_bits():
    z = torch.complex(torch.randn(8), torch.randn(8))
    moved = roundings()[0].moved(z)
    assert bool((moved.real != z.real).any()) and bool((moved.imag != z.imag).any())
    assert torch.allclose(moved, z, rtol=1e-5)
    whole, cut = roundings(1)[0], roundings(1, convolved=11)[0]
    assert not whole.shortens(torch.conv1d) and cut.shortens(torch.conv1d) and not cut.shortens(torch.exp)
    x = torch.randn(1000)
    assert 2**-12 < float((cut.cut(x) / x - 1).abs().max()) < 2**-9


def test_limits_are_seven_deviations_and_an_ulp():
    expected = torch.ones(3, 4, dtype=torch.bfloat16)
    runs = [{"y": expected + (-1) ** at * 2**-5} for at in range(RUNS)]
    limit = limits_of(runs, {"y": (expected, expected)})["y"].each
    assert limit == pytest.approx(torch.full((3, 4), 7 * (2**0.5) * 2**-5 + 2**-7), rel=1e-6)
    flipping = limits_of([{"i": torch.tensor([0, at % 2])} for at in range(RUNS)], {"i": (torch.zeros(2).long(),) * 2})
    assert flipping["i"].each.tolist() == [0.0, float("inf")]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "healthy"), (1.02, "faulty")])
def test_a_common_factor_in_sixteen_bits_is_seen_below_the_rounding_of_each_element(factor, verdict):
    """A fused kernel in place of three linears is judged by the class's code, whose tolerance is several per cent."""
    model = tiny_model("llama", layers=2).bfloat16()
    mlp = model.model.layers[1].mlp

    def fused(x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each.weight for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up) * factor, down)

    mlp.forward = fused
    found = ns.locate(ns.wrap(model))
    assert (found.suspects != ()) == (verdict == "faulty")
    for suspect in found.suspects:
        assert suspect.site.module == "model.layers.1.mlp" and "elements together are" in suspect.evidence


def test_float32_has_no_limit_for_a_common_factor():
    expected = torch.ones(64, 64)
    runs = [{"y": expected * (1 + (-1) ** at * 2**-20)} for at in range(RUNS)]
    assert limits_of(runs, {"y": (expected, expected)})["y"].gain == float("inf")
    half = expected.bfloat16()
    assert limits_of(runs, {"y": (half, half)})["y"].gain == pytest.approx(7 * 2**-20 + 2**-11, rel=0.01)
