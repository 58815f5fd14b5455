"""Extracts the operands of an operator's call: of a product, a softmax, an activation or a norm.

A fault inside the arithmetic (low-precision sums, a table for exp) can't be derived from the output: it needs the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.model.anatomy import keeps_weight_transposed
from noisescope.probe.functions import ADDED, is_grouped, with_tensor
from noisescope.probe.recorded_call import RecordedCall

_T = torch.Tensor
_PLAIN = (torch.matmul, torch.mm, torch.bmm, _T.matmul, _T.mm, _T.bmm, _T.__matmul__)


def input_of(call: RecordedCall) -> Tensor:
    """The first tensor argument; an operator that overwrote it with its result no longer has one."""
    if getattr(call.callee, "inplace", False) or call.kwargs.get("inplace"):
        raise InvalidInput(f"{call.name} overwrites its input, so it can't be recomputed")
    if call.first_input is None:
        raise InvalidInput(f"{call.name} was called without a tensor")
    return call.first_input


def computed_for(call: RecordedCall, x: Tensor) -> Tensor:
    """What the same elementwise module or function returns for another input (in another dtype, for example)."""
    if isinstance(call.callee, nn.Module):  # the class's forward: the instance's is the probe's wrapper
        return type(call.callee).forward(call.callee, x)  # type: ignore[no-any-return]
    args, kwargs = with_tensor(call.args, call.kwargs, input_of(call), x)
    return call.callee(*args, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Product:
    """y = alpha a b + addend, with a [..., M, K] and b [..., K, N]."""

    a: Tensor
    b: Tensor
    again: Callable[[Tensor, Tensor], Tensor]  # the whole call with other operands of the same dtype: the same kernel
    addend: Tensor | None = None
    alpha: float = 1.0
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    @property
    def inner(self) -> int:
        return self.a.shape[-1]

    def part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The sum over a part of the inner dimension, with nothing added."""
        a = self.a[..., start:stop].to(dtype)
        b = self.b.narrow(-2 if self.b.dim() > 1 else 0, start, stop - start).to(dtype)
        return self.multiply(a, b) * self.alpha

    def finished(self, total: Tensor) -> Tensor:
        """The addend added to the sum over the whole inner dimension."""
        return total if self.addend is None else total + self.addend.to(total.dtype)

    def exact(self, dtype: torch.dtype) -> Tensor:
        return self.finished(self.part(0, self.inner, dtype))


def product(call: RecordedCall) -> Product:
    """The product that a call computes; an error if it is not a plain one."""
    callee, kwargs = call.callee, call.kwargs
    if isinstance(callee, nn.Module):
        return _module_product(callee, call)
    if callee is F.linear:
        return _linear(call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias"))
    if callee in _PLAIN:
        return Product(call.argument(0, "input", "self"), call.argument(1, "other", "mat2", "tensor2"), callee)
    if callee is _T.__rmatmul__:
        return Product(call.argument(1, "other"), call.argument(0, "self"), torch.matmul)
    if callee in ADDED:
        scales = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
        added = call.argument(0, "input", "self")
        return Product(
            call.argument(1, "mat1", "batch1"),
            call.argument(2, "mat2", "batch2"),
            lambda a, b: callee(added, a, b, **scales),
            addend=added * scales["beta"] if "beta" in scales else added,
            alpha=scales.get("alpha", 1.0),
        )
    if is_grouped(callee):
        return _grouped(call)
    raise InvalidInput(f"{call.name} is not a plain product, so it can't be recomputed from its operands")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    return Product(x, weight.transpose(-1, -2), lambda a, b: F.linear(a, b.transpose(-1, -2), bias), addend=bias)


def _module_product(module: nn.Module, call: RecordedCall) -> Product:
    """A Linear [out, in], or transformers' Conv1D [in, out]."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise InvalidInput(f"{call.name} has no plain weight, so it can't be recomputed from its operands")
    if not keeps_weight_transposed(module):
        return _linear(input_of(call), weight, bias)

    def again(a: Tensor, b: Tensor) -> Tensor:
        assert bias is not None  # Conv1D always has one
        return torch.addmm(bias, a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])

    return Product(input_of(call), weight, again, addend=bias)


def _grouped(call: RecordedCall) -> Product:
    """Products of MoE experts: rows up to offs[0] of a with b[0], up to offs[1] with b[1] ...; b is [E, K, N]."""
    ends = call.argument(2, "offs")
    kwargs = {k: v for k, v in call.kwargs.items() if not isinstance(v, Tensor)}

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        y = a.new_zeros(a.shape[0], b.shape[-1])
        start = 0
        for expert, stop in enumerate(ends.tolist()):
            y[start:stop] = a[start:stop] @ b[expert]
            start = stop
        return y

    def again(a: Tensor, b: Tensor) -> Tensor:
        return call.callee(a, b, offs=ends, **kwargs)  # type: ignore[no-any-return]

    a, b = call.argument(0, "input", "self", "mat_a"), call.argument(1, "weight", "mat2", "mat_b")
    return Product(a, b, again, multiply=multiply)


def softmax_scores(call: RecordedCall) -> tuple[Tensor, int]:
    """A softmax call's input, in the dtype that the softmax is computed in, and its dimension."""
    x = call.argument(0, "input", "self")
    if isinstance(call.callee, nn.Module) or not isinstance(x, Tensor):
        raise InvalidInput(f"{call.name} is not a softmax call that can be recomputed")
    dtype = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)), None)
    dim = call.argument(1, "dim", default=-1)
    return (x if dtype is None else x.to(dtype)), -1 if dim is None else dim
