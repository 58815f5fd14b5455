"""Monte Carlo arithmetic: moves of a few units of round-off, and the limits that follow from runs."""

from __future__ import annotations

import pytest
import torch

from noisescope.localization.random_rounding import RUNS, generators, limits_of, moved


@pytest.mark.parametrize(("dtype", "u", "units"), [(torch.bfloat16, 2**-8, 2.0), (torch.float32, 2**-24, 8.0)])
def test_elements_move_by_a_few_units_of_round_off(dtype, u, units):
    y = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    steps = (moved(y, generators()[0]).double() - y.double()) / (y.double().abs() + y.double().square().mean().sqrt())
    assert units / 4 < float(steps.abs().max()) / u < units + 2
    assert torch.equal(moved(y, generators()[0]), moved(y, generators()[0]))


def test_what_has_no_fractions_stays():
    index = torch.arange(4)
    assert moved(index, generators()[0]) is index


def test_limits_are_seven_deviations_and_an_ulp():
    expected = torch.ones(3, 4, dtype=torch.bfloat16)
    runs = [{"y": expected + (-1) ** at * 2**-5} for at in range(RUNS)]
    limit = limits_of(runs, {"y": (expected, expected)})["y"]
    assert limit == pytest.approx(torch.full((3, 4), 7 * (2**0.5) * 2**-5 + 2**-7), rel=1e-6)
    flipping = limits_of([{"i": torch.tensor([0, at % 2])} for at in range(RUNS)], {"i": (torch.zeros(2).long(),) * 2})
    assert flipping["i"].tolist() == [0.0, float("inf")]
