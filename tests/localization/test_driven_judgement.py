"""Weights of driven keys against the exponential: what is allowed, and what shows."""

from __future__ import annotations

import pytest
import torch

from noisescope.localization.driven_judgement import judge_weights
from noisescope.localization.driven_operators import DrivenWeights, _Driver
from noisescope.sites import Site

SITE = Site("attention", 0, "attention")


def weights(exp, dtype=torch.bfloat16, seed=0, count=6144):
    """The weight of the lower of two keys, with both roundings that a fused kernel makes."""
    generator = torch.Generator().manual_seed(seed)
    depth = 1.45 * torch.rand(count, generator=generator, dtype=torch.float64)
    deep = torch.rand(count, generator=generator) < 0.25
    depth = torch.where(deep, 1.45 + 6 * torch.rand(count, generator=generator, dtype=torch.float64), depth)
    made = exp(-depth)
    weight = (made.to(dtype).double() / (1 + made)).to(dtype).double()
    return DrivenWeights(SITE, None, depth, weight, 1, dtype, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_roundings_alone_are_healthy(dtype, seed):
    assert judge_weights(weights(torch.exp, dtype, seed)).judgement.strength < 0.9


def test_a_short_polynomial_for_16_bit_outputs_is_allowed():
    """Flash attention's own has relative errors of 9e-5, a fortieth of bfloat16's unit of round-off."""
    assert not judge_weights(weights(lambda x: torch.exp(x) * (1 + 9e-5 * torch.sin(9 * x)))).judgement.alarm
    assert not judge_weights(
        weights(lambda x: torch.exp(x) * (1 + 9e-5 * torch.sin(9 * x)), torch.float16)
    ).judgement.alarm


@pytest.mark.parametrize(("error", "dtype"), [(4e-3, torch.bfloat16), (6e-4, torch.float16), (3e-4, torch.float32)])
def test_errors_of_an_octave_show(error, dtype):
    found = judge_weights(weights(lambda x: torch.exp(x) * (1 + error * torch.sin(2 * torch.pi * x / 0.6931)), dtype))
    assert found.judgement.alarm and found.pattern.fault_class == "function table"
    assert "below the top are off by" in found.judgement.words


def test_what_is_not_finite_alarms():
    call = weights(torch.exp)
    call.weight[3] = torch.nan
    found = judge_weights(call)
    assert found.judgement.alarm and "1 weights are not finite" in found.judgement.words


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_driven_keys_of_few_heads_are_healthy(seed, normed):
    """With one key head, equal depths would share one error thousands of times; a kernel rounds before or after it
    divides."""
    q, k, v, depth = _Driver(seed, frozenset())._two_keys((3, 1, 32, 32), 32**-0.5, torch.bfloat16)
    scores = (q.double() @ k.double().transpose(-1, -2)) * 32**-0.5
    torch.testing.assert_close(depth, -scores[0, :, :, 1].flatten())
    e = torch.exp(-depth)
    p = (e / (1 + e)).bfloat16().double() if normed else e.bfloat16().double() / (1 + e)
    values = v[0, 0, 1].double()
    y = (p[:, None] * values).bfloat16().double()
    call = DrivenWeights(SITE, None, depth, y @ values / values.square().sum(), 32, *[torch.bfloat16] * 2)
    assert judge_weights(call).judgement.strength < 0.8
