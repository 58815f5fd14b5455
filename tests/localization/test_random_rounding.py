"""Monte Carlo arithmetic: moves of a few units of round-off, and the limits that follow from runs."""

from __future__ import annotations

import pytest
import torch

from noisescope.localization.random_rounding import RUNS, limits_of, roundings


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
    limit = limits_of(runs, {"y": (expected, expected)})["y"]
    assert limit == pytest.approx(torch.full((3, 4), 7 * (2**0.5) * 2**-5 + 2**-7), rel=1e-6)
    flipping = limits_of([{"i": torch.tensor([0, at % 2])} for at in range(RUNS)], {"i": (torch.zeros(2).long(),) * 2})
    assert flipping["i"].tolist() == [0.0, float("inf")]
