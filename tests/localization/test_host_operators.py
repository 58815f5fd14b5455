"""The host's references: right to float64, healthy torch stays within their floors, and reasons where none is known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from noisescope.localization.host_operators import Unseen, host_arithmetic, recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.judge import judge

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def again(operator, callee, *args, rows=64, y=None, **kwargs):
    """Call and recompute; the judgement of a healthy call, or of the output given."""
    with torch.no_grad():
        y = callee(*args, **kwargs) if y is None else y
        recomputed = recompute(operator, callee, args, kwargs, y, Rows(rows, 0))
    return recomputed, judge(recomputed.y, recomputed.reference, probabilities=operator == "softmax")


CALLS = {
    "linear": lambda d: ("linear", nn.Linear(48, 40).to(d), drawn(2, 20, 48, dtype=d)),
    "linear without bias": lambda d: ("linear", nn.Linear(48, 40, bias=False).to(d), drawn(40, 48, dtype=d)),
    "F.linear": lambda d: ("linear", F.linear, drawn(3, 9, 48, dtype=d), drawn(40, 48, seed=1, dtype=d)),
    "matmul": lambda d: ("matmul", torch.matmul, drawn(2, 3, 9, 16, dtype=d), drawn(2, 3, 16, 9, seed=1, dtype=d)),
    "matmul, one weight": lambda d: ("linear", torch.matmul, drawn(2, 9, 16, dtype=d), drawn(16, 24, seed=1, dtype=d)),
    "bmm": lambda d: ("bmm", torch.bmm, drawn(4, 9, 16, dtype=d), drawn(4, 16, 9, seed=1, dtype=d)),
    "addmm": lambda d: ("linear", torch.addmm, drawn(24, dtype=d), drawn(9, 16, dtype=d), drawn(16, 24, dtype=d)),
    "softmax": lambda d: ("softmax", F.softmax, drawn(2, 3, 9, 9, dtype=d) * 8, -1),
    "softmax, inner": lambda d: ("softmax", torch.softmax, drawn(4, 6, 5, dtype=d) * 8, 1),
    "silu": lambda d: ("silu", F.silu, drawn(20, 64, dtype=d) * 4),
    "gelu": lambda d: ("gelu", F.gelu, drawn(20, 64, dtype=d) * 4),
    "layer norm": lambda d: ("norm", nn.LayerNorm(64).to(d), drawn(20, 64, dtype=d) + 3),
    "F.rms_norm": lambda d: ("norm", F.rms_norm, drawn(20, 64, dtype=d) * 50, (64,), drawn(64, seed=2, dtype=d)),
    "embedding": lambda d: ("embedding", nn.Embedding(50, 16).to(d), torch.arange(20).reshape(4, 5)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_healthy_torch_is_within_the_floor(name, dtype):
    """Every kind of call, in every dtype: no alarm, and not because the floor is wide."""
    operator, callee, *args = CALLS[name](dtype)
    found = again(operator, callee, *args)[1]
    assert not found.alarm, (found.test, found.strength)
    if dtype != torch.float32 and operator != "embedding":
        assert found.visible_element <= 4  # ulps of a 16-bit result


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_one_percent_is_an_alarm_in_bfloat16(name):
    """The same calls with a gain of 1 %."""
    operator, callee, *args = CALLS[name](torch.bfloat16)
    with torch.no_grad():
        y = callee(*args)
    assert again(operator, callee, *args, y=(y.double() * 1.01).to(y.dtype))[1].alarm


@pytest.mark.parametrize("size", [1e-13, 1e13])
def test_a_product_whose_squares_leave_float32s_range(size):
    """Squares of the terms underflow, or overflow, in float32: no alarm, and a small error is still one."""
    linear = nn.Linear(48, 40, bias=False)
    nn.init.normal_(linear.weight, std=size)
    x = drawn(40, 48) * size
    assert not again("linear", linear, x)[1].alarm
    with torch.no_grad():
        assert again("linear", linear, x, y=linear(x) * (1 + 1e-5))[1].alarm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_with_equal_weights_make_one_error(dtype):
    """Equal columns, and equal rows, say no more than one: a sum of equal terms leans."""
    linear = nn.Linear(64, 64, bias=False).to(dtype)
    nn.init.constant_(linear.weight, 0.01)
    for x in (torch.full((32, 64), 0.3, dtype=dtype), drawn(32, 64, dtype=dtype)):
        assert not again("linear", linear, x)[1].alarm
        with torch.no_grad():
            assert again("linear", linear, x, y=linear(x) * 1.02)[1].alarm


def test_numbers_below_the_normal_range_may_be_taken_as_zero():
    """Of an operand (vector units flush them), and of the gate of an activation, whose exponential overflows."""
    x, weight = drawn(40, 48, seed=1) * 2.0**-128, drawn(32, 48, seed=2) * 8
    for callee, operands in ((F.linear, (x, weight)), (torch.matmul, (x[None], weight.T[None]))):
        assert not again("linear", callee, *operands, y=torch.zeros_like(callee(*operands)))[1].alarm
        assert again("linear", callee, *(2.0**40 * each for each in operands), y=0 * callee(*operands))[1].alarm
    far = -torch.linspace(88.8, 95, 64)[None]
    assert not again("silu", F.silu, far, y=torch.zeros_like(far))[1].alarm
    assert again("silu", F.silu, far / 2, y=torch.zeros_like(far))[1].alarm


def test_keywords_and_scales_of_baddbmm():
    """BLOOM's scores: beta and alpha, operands by keyword, an addend that is broadcast."""
    added, a, b = drawn(4, 1, 9), drawn(4, 9, 16), drawn(4, 16, 9, seed=1)
    recomputed, found = again("bmm", torch.baddbmm, added, batch1=a, batch2=b, beta=0.5, alpha=0.25)
    assert not found.alarm
    assert torch.allclose(
        recomputed.reference.values.reshape(4, 9, 9), 0.5 * added.double() + 0.25 * (a.double() @ b.double())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_products_know_which_expert_a_row_belongs_to(dtype):
    """Rows up to the first end go to the first expert; an expert without rows is no trouble."""
    x, weights = drawn(12, 16, dtype=dtype), drawn(3, 16, 8, seed=1, dtype=dtype)
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)
    y = torch.cat([x[:5] @ weights[0], x[5:] @ weights[2]])

    def grouped_mm_fallback(*_args, **_kwargs):
        return y

    assert not again("linear", grouped_mm_fallback, x, weights, offs=ends)[1].alarm
    y = torch.cat([x[:6] @ weights[0], x[6:] @ weights[2]])
    assert again("linear", grouped_mm_fallback, x, weights, offs=ends)[1].alarm


def attention_call(dtype: torch.dtype, **kwargs):
    query, key, value = (drawn(2, heads, 12, 16, seed=s, dtype=dtype) for s, heads in ((0, 4), (1, 2), (2, 2)))
    return again("attention", F.scaled_dot_product_attention, query * 3, key, value, enable_gqa=True, **kwargs)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.9, "is_causal": True},
    "bool": {"attn_mask": torch.ones(12, 12, dtype=torch.bool).tril().logical_or(torch.eye(12, dtype=torch.bool))},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_fused_attention_with_every_mask(mask, dtype):
    """Grouped queries, causal, boolean and scaled attention agree with torch's kernel."""
    assert not attention_call(dtype, **MASKS[mask])[1].alarm


def test_a_quick_reciprocal_is_no_fault_of_attention():
    """Kernels that divide quickly lean by up to 1 ulp of float32 (measured: 1.5 u on a GPU); a gain of 2^-18 is one."""
    query, key, value = (drawn(2, 4, 32, 16, seed=seed) for seed in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    for lean, alarm in ((1.5 * 2**-24, False), (2**-18, True)):
        y = (exact * (1 - lean)).float()
        assert again("attention", F.scaled_dot_product_attention, query, key, value, y=y)[1].alarm == alarm


def test_fused_attention_with_a_float_mask():
    """Float masks are added; a row that is shut out whole is not judged."""
    mask = torch.zeros(2, 1, 12, 12).masked_fill(torch.rand(12, 12) < 0.3, -math.inf)
    mask[:, :, 3] = torch.finfo(torch.float32).min
    mask[:, :, :, 0] = torch.where(torch.arange(12) == 3, mask[:, :, :, 0], 0.0)
    recomputed, found = attention_call(torch.float32, attn_mask=mask)
    assert not found.alarm
    assert len(recomputed.y) == 2 * 4 * 11


def test_a_causal_mask_is_not_forgotten():
    """Looking ahead is an error that the reference must see."""
    query, key, value = (drawn(2, 4, 12, 16, seed=s) for s in range(3))
    y = F.scaled_dot_product_attention(query, key, value)
    found = again("attention", F.scaled_dot_product_attention, query, key, value, y=y, is_causal=True)[1]
    assert found.alarm


@pytest.mark.parametrize("bias", [True, False])
def test_checksums_find_the_one_wrong_row_that_was_not_sampled(bias):
    """Of 3,000 rows 8 are computed again; one wrong element elsewhere is found by its checksum."""
    torch.manual_seed(0)
    module = nn.Linear(64, 200, bias=bias).bfloat16()
    x = drawn(3000, 64, dtype=torch.bfloat16)
    y = module(x).detach()
    recomputed, found = again("linear", module, x, rows=8, y=y)
    assert not found.alarm
    assert recomputed.checksums == 3000 - 8
    y[1234, 77] += 1.0
    recomputed, found = again("linear", module, x, rows=8, y=y)
    assert found.bad == 1
    assert found.channels == {77}
    assert recomputed.checksums == 3000 - 9


def test_rows_of_an_attention_product_are_sampled():
    """Queries beyond the limit are sampled, all keys are kept."""
    recomputed, found = again("matmul", torch.matmul, drawn(2, 500, 16), drawn(2, 16, 700, seed=1), rows=8)
    assert recomputed.y.shape == (16, 700)
    assert not found.alarm


def test_autocast_operands_are_those_that_were_multiplied():
    """Under autocast a float32 linear multiplies bfloat16 operands: that is no error of the device."""
    module, x = nn.Linear(64, 32), drawn(20, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = module(x)
    assert y.dtype == torch.bfloat16
    assert not again("linear", module, x, y=y)[1].alarm


def test_products_below_the_normal_numbers_may_be_zero():
    """Units for 16 bits flush them, one by one; half of a sum that is large is an alarm."""
    a = torch.full((8, 16), 1e-19).bfloat16()
    b = torch.full((16, 8), 1e-19).bfloat16()
    assert not again("matmul", torch.matmul, a, b, y=torch.zeros(8, 8, dtype=torch.bfloat16))[1].alarm
    y = (a * 1e19 @ (b * 1e19)) / 2
    assert again("matmul", torch.matmul, a * 1e19, b * 1e19, y=y)[1].alarm


def test_the_host_computes_by_itself():
    """No function mode of the caller's reaches the host's arithmetic, nor does autocast."""

    class Broken(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            return y * 2 if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    module, x = nn.Linear(16, 8), drawn(4, 16)
    with torch.no_grad():
        y = module(x)
    with Broken(), host_arithmetic(), torch.no_grad():
        recomputed = recompute("linear", module, (x,), {}, y, Rows(64, 0))
    assert torch.allclose(recomputed.reference.values, y.double(), atol=1e-5)


class Odd(nn.Module):
    def forward(self, x):
        return x.sin()


def test_what_can_not_be_said_is_unseen():
    """Unknown formulas, dropout, packed weights and integer outputs are refused with a reason."""
    x = drawn(4, 8)
    with pytest.raises(Unseen, match="the formula of Odd"):
        recompute("norm", Odd(), (x,), {}, x, Rows(8, 0))
    with pytest.raises(Unseen, match="the formula of Odd"):
        recompute("gelu", Odd(), (x,), {}, x, Rows(8, 0))
    with pytest.raises(Unseen, match="random"):
        recompute("attention", F.scaled_dot_product_attention, (x, x, x), {"dropout_p": 0.5}, x, Rows(8, 0))
    packed = nn.Linear(8, 4)
    packed.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(Unseen, match="packed"):
        recompute("linear", packed, (x,), {}, drawn(4, 4), Rows(8, 0))
    with pytest.raises(Unseen, match="output is"):
        recompute("embedding", nn.Embedding(3, 4), (x,), {}, torch.zeros(2, dtype=torch.long), Rows(8, 0))


def test_a_norm_whose_squares_are_beyond_float32_is_not_judged():
    """A fused kernel may scale first and a plain one not, so both answers are right."""
    norm, x = nn.RMSNorm(16), drawn(4, 16) * 1e25
    with pytest.raises(Unseen, match="squares of its input are beyond float32"):
        recompute("norm", norm, (x,), {}, norm(x).detach(), Rows(64, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0.0, 0.002, 0.02])
def test_nearly_equal_scores_round_all_probabilities_alike(size, dtype):
    """A kernel that sums them before it rounds them then multiplies whole rows by one factor."""
    q, k, v = (drawn(2, 4, 65, 16, seed=seed, dtype=dtype) for seed in range(3))
    q = q * size
    scores = ((q.double() @ k.double().mT) / 4).masked_fill(torch.ones(65, 65).triu(1).bool(), -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    y = (weights.to(dtype).double() @ v.double() / weights.sum(-1, keepdim=True)).to(dtype)
    sdpa = torch._C._nn.scaled_dot_product_attention
    assert not again("attention", sdpa, q, k, v, is_causal=True, y=y)[1].alarm
    assert not again("attention", sdpa, q, k, v, is_causal=True)[1].alarm
    gained = (1.01 * y.double()).to(dtype)
    assert again("attention", sdpa, q, k, v, is_causal=True, y=gained)[1].alarm


def test_subnormal_weights_may_be_taken_as_0():
    linear = nn.Linear(48, 40, bias=False).bfloat16()
    linear.weight.data *= 1e-39
    x = drawn(64, 48, dtype=torch.bfloat16)
    assert not again("linear", linear, x, y=torch.zeros(64, 40, dtype=torch.bfloat16))[1].alarm
    linear.weight.data.fill_(1e-30)
    assert again("linear", linear, x, y=torch.zeros(64, 40, dtype=torch.bfloat16))[1].alarm
