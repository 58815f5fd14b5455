"""Recomputes any operator on the host in float64, from the call that the device received."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from noisescope.localization import host_products
from noisescope.localization.embedding_recognition import looks_up_rows
from noisescope.localization.formula_recognition import (
    ACTIVATIONS,
    NormFormula,
    activation_formula,
    gelu_inner,
    linear_formula,
    norm_formula,
    norm_rounds_at_every_step,
    run_on_host,
)
from noisescope.localization.host_products import Recomputed, Rows, as_multiplied
from noisescope.localization.result_dtypes import as_coded
from noisescope.localization.roundoff_floors import (
    WORK_ROUNDOFF,
    Reference,
    narrower,
    number_format,
    rounded_once,
    sum_spread,
)
from noisescope.localization.shipped_functions import shipped_functions
from noisescope.localization.tensors import on_host
from noisescope.probe.functions import ADDED, GELU, LINEAR, OUTER, argument, first_tensor, is_grouped
from noisescope.probe.unfused_attention import FUSED_FUNCTION, AttentionArguments

_MOST_ELEMENTS = 1 << 22  # of an elementwise operator's output that are judged in one call
_FUNCTION_SHARE = 0.125  # of a function's error limit that may be systematic: libraries' exp and rsqrt lean one way
_GAIN_SHARE = 0.1  # of half an ulp
_STEPS = (
    0.5  # of what gelu's steps could add up to: of all numbers in 16 bits none is off by more than an eighth of that
)
NOT_LINEAR = "something other than x W^T + b"


class Unseen(Exception):
    """An operator that can't be recomputed, and why."""


@contextmanager
def host_arithmetic() -> Iterator[None]:
    """Plain torch: without the caller's modes (a simulated fault is one), autocast or gradients."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(shipped_functions())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def recompute(
    operator: str,
    callee: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    y: Tensor,
    rows: Rows,
    *,
    autocast: bool = True,
) -> Recomputed:
    """What a call returned and what it should have returned. Raises Unseen if that is unknown.

    Without `autocast` a result of a shorter dtype than the code's own is judged as one of the code's.
    """
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.dtype.itemsize < 2:
        raise Unseen(f"its output is {getattr(y, 'dtype', type(y).__name__)}")
    if y.numel() == 0:
        raise Unseen("its output is empty")
    name = getattr(callee, "__name__", type(callee).__name__)
    if isinstance(callee, nn.Module):
        again = _MODULES.get(operator)
    elif is_grouped(callee):
        again = _grouped_function
    else:
        again = _FUNCTIONS.get(callee) or _FUNCTIONS_BY_OPERATOR.get(operator)
    if again is None:
        raise Unseen(f"noisescope has no formula for {name}")
    return again(callee, args, kwargs, y if autocast else as_coded(callee, args, kwargs, y), rows)


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor argument of a call that must have one."""
    x = first_tensor(args, kwargs)
    if x is None:
        raise Unseen("it was called without a tensor")
    return x


# -- modules


def given_one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module's formula applies to a call: a gate or a second input would change it."""
    return sum(isinstance(value, Tensor) for value in (*args, *kwargs.values())) == 1


def _only_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if not given_one_tensor(args, kwargs):
        raise Unseen("it takes more than one tensor")
    return input_of(args, kwargs)


def _linear_module(module: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.is_meta:
        raise Unseen("its weight is not available (offloaded or packed)")
    if type(weight) not in (Tensor, nn.Parameter):
        raise Unseen(f"its weight is packed ({type(weight).__name__})")
    if weight.dim() != 2 or weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise Unseen(f"its weight is packed ({weight.dtype})")
    x = _only_input(args, kwargs)
    formula = linear_formula(module)
    if formula is None:
        raise Unseen(f"its class {type(module).__name__} computes {NOT_LINEAR}")
    weight = weight.detach().T if formula.transposed else weight
    if weight.shape != (y.shape[-1], x.shape[-1]):
        raise Unseen(f"its weight {tuple(weight.shape)} does not match its input and output shapes")
    return host_products.linear(x, weight, bias if formula.bias else None, y, rows)


def _norm_module(module: nn.Module, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    x = _only_input(args, kwargs)
    formula = norm_formula(module, x.shape[-1])
    if formula is None:
        raise Unseen(f"the formula of {type(module).__name__} is not recognised")
    if norm_rounds_at_every_step(module, x.shape[-1], x.dtype):
        raise Unseen(f"the code of {type(module).__name__} rounds to {x.dtype} at every step")
    return norm_by(formula, module, x, y, rows)


def norm_by(formula: NormFormula, module: nn.Module, x: Tensor, y: Tensor, rows: Rows) -> Recomputed:
    """A norm module by its formula, with its own gain and bias."""
    weight, bias = formula.parameters_of(module)
    if any(p is not None and p.is_meta for p in (weight, bias)):
        raise Unseen("its weight is not available (offloaded)")
    return _norm(formula, x, weight, bias, y, rows)


def _norm(
    formula: NormFormula, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, rows: Rows
) -> Recomputed:
    """A norm rounds once, or (cast before the gain) twice; its two sums run over the width of the row."""
    if x.shape != y.shape:
        raise Unseen("its output shape differs from its input shape")
    out, wide = _pick(x, y)
    out = out.to(narrower(x.dtype, out.dtype))  # under autocast sixteen bits may come out as float32
    square = wide.square().mean(-1)
    if bool((square.isfinite() & (square > number_format(torch.float32).largest)).any()):
        raise Unseen("the squares of its input are beyond float32, in which norms are computed")
    w = None if weight is None else on_host(weight).double()
    b = None if bias is None else on_host(bias).double()
    values, normal = formula.apply(wide, w, b)
    gain = torch.ones(wide.shape[-1], dtype=torch.float64) if w is None else formula.gain_of(w).abs()
    u, width = WORK_ROUNDOFF, wide.shape[-1]
    scaled = normal.abs() * gain
    function = 8 * u * scaled
    bounds = [rounded_once(values, out.dtype), rounded_once(normal, x.dtype) * gain, function]
    spread = sum_spread(width, torch.zeros_like(scaled), scaled, u)
    grain = 0.0 * scaled
    if b is not None:
        bounds.append(rounded_once(values - b, out.dtype))
        grain += 2 * bounds[-1] + 2 * u * b.abs()  # they may cancel
    if formula.centred:  # the mean's error, in units of the normalised x; kernels may take x s + (b - mean s)
        mean = wide.mean(-1, keepdim=True)
        root = wide.square().mean(-1, keepdim=True).sqrt() * normal.square().mean(-1, keepdim=True).sqrt()
        deviation = (wide - mean).square().mean(-1, keepdim=True).sqrt().clamp_min(1e-300)
        spread = spread + 0.5 * u * math.sqrt(width) * gain * (root / deviation)
        grain += 2 * u * gain * (wide.abs() + mean.abs()) / deviation
    # The gain has few bits: 129/128 times a number of 8 bits is rounded down more often than up, 0.03 ulp on average.
    systematic = _FUNCTION_SHARE * function + _GAIN_SHARE * rounded_once(values, out.dtype)
    reference = Reference(values, tuple(bounds), spread, systematic, grain, offset=b is not None)
    return Recomputed(out, reference, x=wide, lead=_lead(y), rows=_picked(y))


def _activation_module(module: nn.Module, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    found = activation_formula(module)
    if found is None:
        raise Unseen(f"the formula of {type(module).__name__} is not recognised")
    return _activation(found[0], _only_input(args, kwargs), y, stepwise=found[1])


def _activation(name: str, x: Tensor, y: Tensor, *, stepwise: bool = False) -> Recomputed:
    """x g(x): the error of the gate g, and one rounding. Stepwise code rounds to its dtype after every operation."""
    out, wide = _pick(x, y)
    values = ACTIVATIONS[name](wide)
    u = number_format(x.dtype).u if stepwise else WORK_ROUNDOFF
    if stepwise and name != "quick_gelu":
        u *= _STEPS
    size = wide.abs()
    if name == "silu":
        function = u * (6 + 2 * size * torch.sigmoid(-wide)) * values.abs()
    elif name == "quick_gelu":
        gate = torch.sigmoid(1.702 * wide)
        function = u * size * (gate * (1 - gate) * 1.702 * size * 3 + 2 * gate) + 3 * u * values.abs()
    elif name == "gelu":  # 1 + erf cancels for negative x, so the error is one of the 1
        function = 3 * u * size + 4 * u * values.abs()
    else:
        inner = gelu_inner(wide)
        slope = 1 / torch.cosh(inner).square()
        function = 0.5 * u * size * (slope * 6 * inner.abs() + 3) + 4 * u * values.abs()
    function = function + size * number_format(torch.float32).flushed  # a gate that small may be 0
    # Where the gate is nearly open, x g(x) is rounded back to x, always upwards.
    below = (wide - values).abs()
    rounding = rounded_once(values, out.dtype)
    systematic = _FUNCTION_SHARE * function + torch.where(below < rounding, below, 0.0)
    reference = Reference(values, (rounding, function), systematic=systematic)
    return Recomputed(out, reference, x=wide, lead=_lead(y), rows=_picked(y))


def _embedding_module(module: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    """Rows of a table, bit for bit.

    A class that scales them, or computes its own indices, runs on a copy of the table. A single product rounds the same
    everywhere, so the class's own code on the host gives the same bits.
    """
    table = module.weight
    if table.is_meta:
        raise Unseen("its table is offloaded")
    out = on_host(y).reshape(-1, y.shape[-1])
    if type(module).forward is nn.Embedding.forward:
        expected = _rows_of(table, on_host(input_of(args, kwargs)).reshape(-1))
    elif looks_up_rows(module, args, kwargs):
        found = run_on_host(module, args, kwargs)
        if not isinstance(found, Tensor) or found.shape != y.shape:
            raise Unseen(f"its class {type(module).__name__} gives a different result on the host")
        expected = found.reshape(out.shape)
    else:
        raise Unseen(f"its class {type(module).__name__} computes something other than rows of its table")
    return Recomputed(out, Reference(expected.double(), (), exact=True), lead=_lead(y))


def _rows_of(table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table on the host, each copied separately, without the device's gather and without moving the table."""
    used, places = torch.unique(indices, return_inverse=True)
    if table.device.type == "cpu" or len(used) > len(table) // 4:
        return on_host(table)[indices]
    return torch.stack([on_host(table[at]) for at in used.tolist()])[places]


# -- functions


def _linear_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    return host_products.linear(x, weight, argument(args, kwargs, 2, "bias"), y, rows)


def _product_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    if callee is torch.einsum:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if len(operands) != 2 or not isinstance(args[0], str):
            raise Unseen("an einsum with more or fewer than two operands")
        return host_products.einsum(args[0], operands[0], operands[1], y, rows)
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other", "mat2", "tensor2")
    if callee is Tensor.__rmatmul__:
        a, b = b, a
    if callee in OUTER:
        if a.shape[-1:] != (1,) or b.dim() != 1:
            raise Unseen("an elementwise product that is not an outer product")
        b = b[None]
    if b.dim() == 2 and a.dim() >= 2:  # one weight for all rows: checksums can check all of them
        return host_products.linear(a, b.detach().T, None, y, rows)
    return host_products.batched(a, b, y, rows)


def _added_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    added = argument(args, kwargs, 0, "input", "self")
    a, b = argument(args, kwargs, 1, "mat1", "batch1"), argument(args, kwargs, 2, "mat2", "batch2")
    beta, alpha = float(kwargs.get("beta", 1.0)), float(kwargs.get("alpha", 1.0))
    addend = None if beta == 0 else as_multiplied(on_host(added), y).double() * beta
    return host_products.batched(a, b, y, rows, addend=addend, alpha=alpha)


def _grouped_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    x, weights = argument(args, kwargs, 0, "input", "self", "mat_a"), argument(args, kwargs, 1, "weight", "mat2")
    ends = argument(args, kwargs, 2, "offs")
    if ends is None or x.dim() != 2 or weights.dim() != 3 or kwargs.get("bias") is not None:
        raise Unseen("a grouped product that is not rows by experts")
    return host_products.grouped(x, weights, ends, y, rows)


def _softmax_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    """exp(x - max) / sum: the exponential's error grows with its argument, the sum has one sign."""
    x = argument(args, kwargs, 0, "input", "self")
    x = x.to(kwargs.get("dtype") or x.dtype)  # a mask of float64's least number is -inf in float32
    dim = argument(args, kwargs, 1, "dim", default=-1)
    last = isinstance(dim, int) and dim in (-1, x.dim() - 1)
    out, wide = _pick(x if last else x.transpose(dim, -1), y if last else y.transpose(dim, -1))
    values = torch.softmax(wide, -1)
    u = WORK_ROUNDOFF
    depth = (wide.amax(-1, keepdim=True) - wide).clamp(0, 120)
    function = u * (8 + 2 * depth) * values
    systematic = _FUNCTION_SHARE * 8 * u * values
    spread = sum_spread(wide.shape[-1], torch.zeros_like(values), values, u)
    reference = Reference(values, (rounded_once(values, out.dtype), function), spread, systematic)
    lead = _lead(y) if last else ()  # over another dimension, what are rows here are no tokens
    return Recomputed(out, reference, x=wide, lead=lead, rows=_picked(y))


def _activation_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    if kwargs.get("inplace") or (callee is F.silu and len(args) > 1 and args[1]):
        raise Unseen("it overwrites its input with its result")
    name = "silu"
    if callee is GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}[argument((), kwargs, 0, "approximate", default="none")]
    return _activation(name, input_of(args, kwargs), y)


def _norm_function(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    x, shape = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "normalized_shape")
    if len(shape) != 1:
        raise Unseen("a norm over more than the last dimension")
    weight = argument(args, kwargs, 2, "weight")
    centred = callee is F.layer_norm
    bias = argument(args, kwargs, 3, "bias") if centred else None
    eps = argument(args, kwargs, 4 if centred else 3, "eps", default=1e-5 if centred else None)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    formula = NormFormula(centred, float(eps), "none" if weight is None else "weight", bias is not None)
    return _norm(formula, x, weight, bias, y, rows)


def _fused_attention(callee: Any, args: Any, kwargs: Any, y: Tensor, rows: Rows) -> Recomputed:
    given = AttentionArguments.of(args, kwargs)
    if given.dropout_p:
        raise Unseen("attention with dropout is random")
    again = host_products.attention(
        given.query,
        given.key,
        given.value,
        given.attn_mask,
        y,
        rows,
        is_causal=bool(given.is_causal),
        scale=given.scale,
    )
    if not len(again.y):
        raise Unseen("every row holds NaN or is fully masked")
    return again


Again = Callable[[Any, Any, Any, Tensor, Rows], Recomputed]

_MODULES: dict[str, Again] = {
    "linear": _linear_module,
    "norm": _norm_module,
    "silu": _activation_module,
    "gelu": _activation_module,
    "embedding": _embedding_module,
}
_FUNCTIONS: dict[Any, Again] = {
    FUSED_FUNCTION: _fused_attention,
    LINEAR: _linear_function,
    **dict.fromkeys(ADDED, _added_function),
}
_FUNCTIONS_BY_OPERATOR: dict[str, Again] = {
    **dict.fromkeys(("linear", "matmul", "bmm"), _product_function),
    "softmax": _softmax_function,
    **dict.fromkeys(("silu", "gelu"), _activation_function),
    "norm": _norm_function,
}


def _pick(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output rows, and input rows in float64; evenly spaced ones if there are many."""
    total = y.numel() // max(1, y.shape[-1])
    step = _step(y)
    out, given = y.reshape(total, -1)[::step], x.reshape(total, -1)[::step]
    return on_host(out), on_host(given).double()


def _step(y: Tensor) -> int:
    return max(1, -(-y.numel() // _MOST_ELEMENTS))


def _picked(y: Tensor) -> Tensor | None:
    """Which rows `_pick` takes; None for all."""
    step = _step(y)
    return None if step == 1 else torch.arange(0, y.numel() // max(1, y.shape[-1]), step)


def _lead(y: Tensor) -> tuple[int, ...]:
    return tuple(y.shape[:-1])
