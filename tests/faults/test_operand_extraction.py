"""Faults that need what went in: products, softmax, activations and norms, computed again from their operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from noisescope.errors import InvalidInput
from noisescope.faults import (
    Accumulation,
    ActivationCutOff,
    ActivationTable,
    BlockScale,
    DeadKLane,
    ExpTable,
    Fault,
    InputTruncation,
    Lanes,
    NormaliserGain,
    NormGain,
    RoundingMode,
    RsqrtTable,
    bit_patterns,
)
from noisescope.faults.fault_state import Memory, Stream, faulty_output
from noisescope.faults.operand_extraction import product
from noisescope.model.anatomy import MODULE, Unit
from noisescope.probe.draws import Rows
from noisescope.probe.operator_target import Context
from noisescope.probe.recorded_call import RecordedCall
from noisescope.testing import tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def recorded(operator: str, callee: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> RecordedCall:
    unit = Unit("module", MODULE, 0, "", (operator,))
    return RecordedCall(unit, operator, callee, args, kwargs or {}, None, 0, Context(Rows(1)))


def act(fault: Fault, call: RecordedCall) -> torch.Tensor:
    """The faulty output of a call."""
    with torch.no_grad():
        y = call.callee(*call.args, **call.kwargs)
        return faulty_output(fault, y, call, Memory(Stream(fault)))


def linear_call(dtype: torch.dtype, *, inputs: int = 96, outputs: int = 24, bias: bool = True) -> RecordedCall:
    module = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(draw(outputs, inputs, seed=1) * 0.1)
        if bias:
            module.bias.copy_(draw(outputs, seed=2))
    return recorded("linear", module, (draw(2, 5, inputs, dtype=dtype),))


def conv1d() -> Conv1D:
    module = Conv1D(6, 8)
    with torch.no_grad():
        module.bias.copy_(draw(6))
    return module


A, B, C = draw(3, 4, 8), draw(3, 8, 6, seed=1), draw(3, 4, 6, seed=2)
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)
PRODUCTS = {
    "Linear": recorded("linear", nn.Linear(8, 6), (A,)),
    "Conv1D": recorded("linear", conv1d(), (A,)),
    "F.linear": recorded("linear", F.linear, (A, draw(6, 8), draw(6))),
    "F.linear by name": recorded("linear", F.linear, (A,), {"weight": draw(6, 8), "bias": None}),
    "matmul": recorded("matmul", torch.matmul, (A, B)),
    "matmul by name": recorded("matmul", torch.matmul, (A,), {"other": B}),
    "vector": recorded("matmul", torch.matmul, (A, draw(8))),
    "mm": recorded("matmul", torch.Tensor.mm, (A[0], B[0])),
    "@": recorded("matmul", torch.Tensor.__matmul__, (A, B)),
    "bmm": recorded("bmm", torch.bmm, (A, B)),
    "baddbmm": recorded("bmm", torch.baddbmm, (C, A, B), {"beta": 0.5, "alpha": 2.0}),
    "Tensor.baddbmm": recorded("bmm", torch.Tensor.baddbmm, (C,), {"batch1": A, "batch2": B, "alpha": 3}),
    "addmm": recorded("linear", torch.addmm, (C[0], A[0], B[0])),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_taken_apart(name):
    """From its operands each kind of call gives the same bits again, and in parts and in float64 the same number."""
    call = PRODUCTS[name]
    with torch.no_grad():
        y = call.callee(*call.args, **call.kwargs)
        plain = product(call)
        assert torch.equal(plain.again(plain.a, plain.b), y)
        assert plain.inner == 8
        torch.testing.assert_close(plain.exact(torch.float64).float(), y)
        parts = plain.part(0, 3, torch.float64) + plain.part(3, 8, torch.float64)
        torch.testing.assert_close(plain.finished(parts).float(), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_of_experts(dtype):
    """Rows go with the matrix of their expert; an expert without rows is no trouble."""
    a, b = draw(5, 8, dtype=dtype), draw(3, 8, 8, seed=1, dtype=dtype)
    call = recorded("linear", F.grouped_mm, (a, b), {"offs": OFFSETS})
    y = F.grouped_mm(a, b, offs=OFFSETS)
    plain = product(call)
    assert torch.equal(plain.again(a, b), y)
    torch.testing.assert_close(plain.exact(torch.float64).to(dtype), y)


def test_what_is_no_plain_product_is_refused():
    """An einsum and a packed weight can't be computed again; the message names them."""
    with pytest.raises(InvalidInput, match=r"matmul \(einsum\) is not a plain product"):
        product(recorded("matmul", torch.einsum, ("ij,jk->ik", A[0], B[0])))
    packed = nn.Linear(8, 6)
    packed.weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InvalidInput, match=r"linear \(Linear\) has no plain weight"):
        product(recorded("linear", packed, (A,)))


@each_dtype
def test_dead_k_lane_leaves_terms_out(dtype):
    """y = sum over the living inputs, by the same kernel; the bias stays."""
    call = linear_call(dtype)
    x = call.args[0].clone()
    x[..., [5, 37, 69]] = 0
    assert torch.equal(act(DeadKLane(channels=Lanes(32, 5)), call), call.callee(x))


@each_dtype
def test_block_scale_of_an_input(dtype):
    """Sixteen terms of the sum count twice."""
    call = linear_call(dtype)
    x = call.args[0].clone()
    x[..., 16:32] *= 2
    assert torch.equal(act(BlockScale(2.0, width=16, block=1, tensor="input"), call), call.callee(x))


@each_dtype
@pytest.mark.parametrize("precision", ["bf16", "fp16", 5])
def test_accumulation_by_hand(dtype, precision):
    """s = round(s + next chunk) in plain Python loops, then the bias, then the output's dtype."""
    call = linear_call(dtype, inputs=10, outputs=3)
    x, weight, bias = call.args[0][0, 0].double(), call.callee.weight.detach().double(), call.callee.bias.detach()
    rounded = {"bf16": torch.bfloat16, "fp16": torch.float16}
    expected = []
    for row in weight:
        total = torch.zeros(1, dtype=torch.float64)
        for start in range(0, 10, 4):
            total = total + float(sum(a * b for a, b in zip(x[start : start + 4], row[start : start + 4], strict=True)))
            if precision in rounded:
                total = total.to(rounded[precision]).double()
            else:
                total = bit_patterns.round_mantissa(total, precision)
        expected.append(float(total))
    expected = (torch.tensor(expected, dtype=torch.float64) + bias.double()).to(dtype)
    assert torch.equal(act(Accumulation(4, precision), call)[0, 0], expected)


def test_accumulation_of_a_softmax_denominator():
    """exp summed in chunks and rounded: with 1000 equal scores bf16 stops at 256 of them."""
    scores = torch.zeros(1, 1000)
    y = act(Accumulation(1), recorded("softmax", F.softmax, (scores,), {"dim": -1}))
    assert torch.equal(y, torch.full_like(scores, 1 / 256))
    turned = act(Accumulation(1), recorded("softmax", torch.softmax, (scores.T, 0)))
    assert torch.equal(turned, y.T)


@each_dtype
def test_input_truncation(dtype):
    """Both operands lose the mantissa bits beyond those kept; TF32's ten are no loss in 16 bits."""
    call = linear_call(dtype)
    for keep in (10, 3):
        cut = max(0, bit_patterns.mantissa_bits(dtype) - keep)
        x, weight = (bit_patterns.cut_mantissa(t, cut) for t in (call.args[0], call.callee.weight.detach()))
        expected = F.linear(x, weight, call.callee.bias)
        assert torch.equal(act(InputTruncation(keep), call), expected)
    healthy = torch.equal(act(InputTruncation(10), call), call.callee(call.args[0]))
    assert healthy == (dtype != torch.float32)


@each_dtype
@pytest.mark.parametrize("mode", ["toward_zero", "down", "up"])
def test_rounding_mode(dtype, mode):
    """Each result lies on its side of the exact one, less than a step away."""
    call = linear_call(dtype)
    y = act(RoundingMode(mode), call).double()
    weight, bias = (p.detach().double() for p in (call.callee.weight, call.callee.bias))
    exact = F.linear(call.args[0].double(), weight, bias)
    away = {"toward_zero": exact.abs() - y.abs(), "down": exact - y, "up": y - exact}[mode]
    step = torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(exact.abs()))
    assert (away >= 0).all() and (away <= step).all() and 0.3 < float((away / step).mean()) < 0.7


def test_rounding_mode_needs_a_wider_dtype():
    """In float64 there is nothing to round from."""
    with pytest.raises(InvalidInput, match="needs a wider dtype"):
        act(RoundingMode(), recorded("matmul", torch.matmul, (A.double(), B.double())))


# -- function units


def table(value: float, error: float) -> float:
    steps = math.ceil(math.log(2) / (2 * math.log(1 + error)))
    return 2 ** ((math.floor(math.log2(value) * steps) + 0.5) / steps)


@each_dtype
def test_exp_table(dtype):
    """softmax by the table's exp, row by row; what was shut out stays out and rows still sum to 1."""
    scores = (draw(2, 3, 7) * 3).to(dtype)
    scores[..., -2:] = -math.inf
    y = act(ExpTable(0.01), recorded("softmax", F.softmax, (scores,), {"dim": -1, "dtype": torch.float32}))
    for row, got in zip(scores.view(-1, 7).tolist(), y.view(-1, 7).tolist(), strict=True):
        top = max(row)
        powers = [table(math.exp(v - top), 0.01) if v > -math.inf else 0.0 for v in row]
        assert got == pytest.approx([p / sum(powers) for p in powers], rel=1e-6)
    assert (y[..., -2:] == 0).all() and y.dtype == torch.float32


def test_a_table_errs_by_no_more_than_it_says_and_nearly_as_much():
    """Over many octaves the worst relative error is within the size asked for."""
    z = torch.linspace(-30, 0, 20_001, dtype=torch.float64)
    from noisescope.faults.effects import table as read

    for error in (0.001, 0.02, 0.5):
        worst = float((read(z / math.log(2), error) / z.exp() - 1).abs().max())
        assert 0.6 * error < worst <= error * 1.000001
    assert torch.equal(read(z, 0.0), torch.exp2(z))


def test_exp_clipped():
    """Scores more than the clip below the largest count as if they were there; -inf does not."""
    scores = torch.tensor([[0.0, -3.0, -50.0, -math.inf]])
    y = act(ExpTable(0.0, clip=4.0), recorded("softmax", torch.softmax, (scores, -1)))
    expected = torch.tensor([1.0, math.exp(-3), math.exp(-4), 0.0])
    torch.testing.assert_close(y[0], expected / expected.sum())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "quick_gelu", "gelu_pytorch_tanh"])
def test_activation_table(name):
    """z g(z) with the gate from the table, whatever form of gelu the module has."""
    z = (draw(300) * 4).clamp(-6, 9)  # in float64 a gelu's gate is 0 further down
    z[0] = 0.0
    module = ACT2FN[name]
    operator = "silu" if name == "silu" else "gelu"
    y = act(ActivationTable(0.05), recorded(operator, module, (z,)))
    expected = [v * table(float(module(torch.tensor(v).double())) / v, 0.05) if v else 0.0 for v in z.tolist()]
    torch.testing.assert_close(y, torch.tensor(expected), rtol=1e-5, atol=1e-7)
    off = (y.double() / module(z.double()) - 1).abs()[1:]
    assert 0.03 < float(off.max()) < 0.051


def test_activation_functions_are_called_with_their_own_settings():
    """F.gelu(z, approximate="tanh") and F.silu by keyword."""
    z = draw(50)
    call = recorded("gelu", F.gelu, (z,), {"approximate": "tanh"})
    torch.testing.assert_close(act(ActivationTable(0.0), call), F.gelu(z, approximate="tanh"))
    call = recorded("silu", F.silu, (), {"input": z})
    torch.testing.assert_close(act(ActivationTable(0.0), call), F.silu(z))


def test_an_activation_that_overwrote_its_input_is_refused():
    """Nothing is left to compute it from."""
    with pytest.raises(InvalidInput, match="overwrites its input"):
        act(ActivationTable(), recorded("silu", nn.SiLU(inplace=True), (draw(3),)))


@each_dtype
def test_activation_cut_off(dtype):
    """0 below -limit, z above it, and right between."""
    z = torch.tensor([-5.0, -4.5, -3.0, 0.0, 3.0, 4.5, 5.0], dtype=dtype)
    y = act(ActivationCutOff(4.0), recorded("silu", nn.SiLU(), (z,)))
    assert y.tolist() == [0.0, 0.0, *F.silu(z[2:5]).tolist(), 4.5, 5.0]


def test_rsqrt_table_is_a_gain_of_each_rows_own():
    """With and without a mean taken off, before the bias, as modules and as functions."""
    x = draw(6, 32) * torch.linspace(0.5, 3, 6)[:, None] + 1
    weight, bias = draw(32, seed=3), draw(32, seed=4)
    module = nn.LayerNorm(32)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    calls = {
        "LayerNorm": recorded("norm", module, (x,)),
        "layer_norm": recorded("norm", F.layer_norm, (x, (32,), weight, bias, 1e-5)),
        "RMSNorm": recorded("norm", nn.RMSNorm(32, eps=1e-5), (x,)),
        "rms_norm": recorded("norm", F.rms_norm, (x, (32,)), {"weight": weight, "eps": 1e-5}),
        "llama": recorded("norm", tiny_model("llama", layers=1).model.norm, (x,)),
    }
    for name, call in calls.items():
        with torch.no_grad():
            right = call.callee(*call.args, **call.kwargs).double()
        added = bias.double() if name.lower().startswith("layer") else 0.0
        y = act(RsqrtTable(0.05), call).double()
        eps = 1e-6 if name == "llama" else 1e-5
        for i, row in enumerate(x.double()):
            spread = (row - row.mean() if name.lower().startswith("layer") else row).square().mean() + eps
            root = float(spread) ** -0.5
            expected = (right[i] - added) * (table(root, 0.05) / root) + added
            torch.testing.assert_close(y[i], expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(y, right, rtol=1e-3)
        gained = act(NormGain(0.01), call).double()
        torch.testing.assert_close(gained, (right - added) * 1.01 + added, rtol=1e-5, atol=1e-6)


def test_normaliser_gain():
    """Rows sum to 1 + m."""
    y = act(NormaliserGain(0.01), recorded("softmax", torch.softmax, (draw(4, 9), -1)))
    torch.testing.assert_close(y.sum(-1), torch.full((4,), 1.01))
