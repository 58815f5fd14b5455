"""Attention with a wrong mask, a wrong position, a inaccurate exp or short sums; small errors everywhere, and large
ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_operators import recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.judge import judge

LENGTH = 24


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def named(operator, callee, args, kwargs, y) -> Pattern:
    recomputed = recompute(operator, callee, args, kwargs, y, Rows(64, 0))
    judgement = judge(recomputed.y, recomputed.reference, probabilities=operator == "softmax")
    assert judgement.alarm
    return classify(Evidence.of(operator, recomputed, judgement))


def poor_exp(x: torch.Tensor) -> torch.Tensor:
    """2^n times a line."""
    scaled = x.clamp_min(-80) / math.log(2)
    whole = scaled.floor()
    return torch.ldexp(1 + (scaled - whole) * math.log(2), whole.int())


def attention(q, k, v, *, mask=None, exp=torch.exp, scores=lambda s: s) -> torch.Tensor:
    seen = torch.ones(LENGTH, LENGTH).tril().bool() if mask is None else mask
    s = scores(q @ k.mT / math.sqrt(q.shape[-1]))
    top = s.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    p = exp(s - top).masked_fill(~seen, 0.0)
    return (p / p.sum(-1, keepdim=True)) @ v


def before(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :1, :], x[..., :-1, :]], -2)


def few_bits(s: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(s)
    return torch.ldexp(torch.round(mantissa * 16) / 16, exponent)


ALL = torch.ones(LENGTH, LENGTH).bool()
FEWER = ALL.tril(-1) | (torch.arange(LENGTH**2) == 0).reshape(LENGTH, LENGTH)  # the first token sees itself
WRONG = {
    "one key more": (lambda q, k, v: attention(q, k, v, mask=ALL.tril(1)), "mask"),
    "one key fewer": (lambda q, k, v: attention(q, k, v, mask=FEWER), "mask"),
    "no mask": (lambda q, k, v: attention(q, k, v, mask=ALL), "mask"),
    "keys one off": (lambda q, k, v: attention(q, before(k), v), "position"),
    "values one off": (lambda q, k, v: attention(q, k, before(v)), "position"),
    "inaccurate exp": (lambda q, k, v: attention(q, k, v, exp=poor_exp), "function table"),
    "short scores": (lambda q, k, v: attention(q, k, v, scores=few_bits), "truncation"),
    "gain": (lambda q, k, v: attention(q, k, v) * 1.02, "gain"),
    "other scores": (lambda q, k, v: attention(q.flip(-1), k, v), "unknown"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_attention(name, dtype):
    """Each mistake of a kernel by its class; one that is none of these stays unknown, with little confidence."""
    change, kind = WRONG[name]
    q, k, v = (drawn(2, 3, LENGTH, 16, seed=seed).to(dtype) for seed in range(3))
    y = change(q.float(), k.float(), v.float()).to(dtype)
    found = named("attention", F.scaled_dot_product_attention, (q, k, v), {"is_causal": True}, y)
    assert found.fault_class == kind, found.text
    assert found.confidence >= 0.6 or found.fault_class == "unknown"


def test_padding_that_is_ignored():
    """The mask hides the first tokens of the second sequence, and the kernel is causal only."""
    q, k, v = (drawn(2, 3, LENGTH, 16, seed=seed) for seed in range(3))
    mask = ALL.tril().expand(2, 1, LENGTH, LENGTH).clone()
    mask[1, :, 7:, :7] = False
    found = named("attention", F.scaled_dot_product_attention, (q, k, v, mask), {}, attention(q, k, v))
    assert (found.fault_class, found.text) == ("mask", "only the causal part of its mask is applied")
    assert {sequence for sequence, _ in found.rows} == {1}


def test_a_softmax_by_a_poor_exp():
    x = drawn(2, 3, LENGTH, LENGTH) * 3
    weights = poor_exp(x - x.amax(-1, keepdim=True))
    y = weights / weights.sum(-1, keepdim=True)
    assert named("softmax", torch.softmax, (x, -1), {}, y).fault_class == "function table"


def test_an_activation_by_a_table():
    x = drawn(64, 96)
    y = x * torch.sigmoid((x * 8).round() / 8)
    assert named("silu", F.silu, (x,), {}, y).fault_class == "function table"


def test_small_errors_everywhere_and_large_ones():
    """Errors in proportion to what was summed may be short sums; results of other inputs are not."""
    x, w = drawn(64, 96), drawn(128, 96, seed=1)
    total = torch.zeros(64, 128)
    for at in range(0, 96, 4):
        total = few_bits((total + x[:, at : at + 4] @ w[:, at : at + 4].T) * 64) / 64
    total = total + 1e-4 * total.abs().mean() * drawn(64, 128, seed=2)  # and rounded again
    short = named("linear", F.linear, (x, w), {}, total)
    assert short.fault_class == "accumulation" and short.confidence < 0.9
    other = named("linear", F.linear, (x, w), {}, F.linear(drawn(64, 96, seed=5), w))
    assert other.fault_class == "unknown" and other.confidence <= 0.3
