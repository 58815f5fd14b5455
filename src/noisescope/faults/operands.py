"""An operator's call taken apart: the operands of a product, the input of a softmax, an activation or a norm.

A fault inside the arithmetic (sums kept short, a table for exp) can't be had from the output: it needs what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.errors import InvalidInput

_T = torch.Tensor
_PLAIN = (torch.matmul, torch.mm, torch.bmm, _T.matmul, _T.mm, _T.bmm, _T.__matmul__)
_ADDED = (torch.addmm, torch.baddbmm, _T.addmm, _T.baddbmm)
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


@dataclass(frozen=True)
class Call:
    """The module or function called and what it was given."""

    operator: str
    callee: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def given(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if self.kwargs and name in self.kwargs), default)

    @property
    def x(self) -> Tensor:
        """The first tensor given; an operator that wrote its result into it has none any more."""
        if getattr(self.callee, "inplace", False) or (self.kwargs or {}).get("inplace"):
            raise InvalidInput(f"{self.name} writes its result over its input, so it can't be computed again")
        for value in (*self.args, *(self.kwargs or {}).values()):
            if isinstance(value, Tensor):
                return value
        raise InvalidInput(f"{self.name} was called without a tensor")

    @property
    def name(self) -> str:
        called = type(self.callee).__name__ if isinstance(self.callee, nn.Module) else self.callee.__name__
        return f"{self.operator} ({called})"

    def repeated(self, x: Tensor) -> Tensor:
        """What the same module or function, an elementwise one, gives for another input (in another dtype, say)."""
        if isinstance(self.callee, nn.Module):  # the class's forward: in the instance's place stands the probe
            return type(self.callee).forward(self.callee, x)  # type: ignore[no-any-return]
        kwargs = {name: x if value is self.x else value for name, value in (self.kwargs or {}).items()}
        return self.callee(*(x if arg is self.x else arg for arg in self.args), **kwargs)  # type: ignore[no-any-return]


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
        """The addend put to the sum over the whole inner dimension."""
        return total if self.addend is None else total + self.addend.to(total.dtype)

    def exact(self, dtype: torch.dtype) -> Tensor:
        return self.finished(self.part(0, self.inner, dtype))


def product(call: Call) -> Product:
    """The product that a call computes; refused where it is not a plain one."""
    callee, kwargs = call.callee, dict(call.kwargs or {})
    if isinstance(callee, nn.Module):
        return _module_product(callee, call)
    if callee is F.linear:
        return _linear(call.given(0, "input"), call.given(1, "weight"), call.given(2, "bias"))
    if callee in _PLAIN:
        return Product(call.given(0, "input", "self"), call.given(1, "other", "mat2", "tensor2"), callee)
    if callee is _T.__rmatmul__:
        return Product(call.given(1, "other"), call.given(0, "self"), torch.matmul)
    if callee in _ADDED:
        scales = {name: kwargs[name] for name in ("beta", "alpha") if name in kwargs}
        added = call.given(0, "input", "self")
        return Product(
            call.given(1, "mat1", "batch1"),
            call.given(2, "mat2", "batch2"),
            lambda a, b: callee(added, a, b, **scales),
            addend=added * scales["beta"] if "beta" in scales else added,
            alpha=scales.get("alpha", 1.0),
        )
    if getattr(callee, "__name__", "") in _GROUPED:
        return _grouped(call)
    raise InvalidInput(f"{call.name} is not a plain product, so it can't be computed again from its operands")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    return Product(x, weight.transpose(-1, -2), lambda a, b: F.linear(a, b.transpose(-1, -2), bias), addend=bias)


def _module_product(module: nn.Module, call: Call) -> Product:
    """A Linear [out, in], or transformers' Conv1D [in, out]."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise InvalidInput(f"{call.name} has no plain weight, so it can't be computed again from its operands")
    if type(module).__name__ != "Conv1D":
        return _linear(call.x, weight, bias)

    def again(a: Tensor, b: Tensor) -> Tensor:
        assert bias is not None  # Conv1D always has one
        return torch.addmm(bias, a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])

    return Product(call.x, weight, again, addend=bias)


def _grouped(call: Call) -> Product:
    """Products of MoE experts: rows up to offs[0] of a with b[0], up to offs[1] with b[1] ...; b is [E, K, N]."""
    ends = call.given(2, "offs")
    kwargs = {k: v for k, v in (call.kwargs or {}).items() if not isinstance(v, Tensor)}

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        y = a.new_zeros(a.shape[0], b.shape[-1])
        start = 0
        for expert, stop in enumerate(ends.tolist()):
            y[start:stop] = a[start:stop] @ b[expert]
            start = stop
        return y

    def again(a: Tensor, b: Tensor) -> Tensor:
        return call.callee(a, b, offs=ends, **kwargs)  # type: ignore[no-any-return]

    a, b = call.given(0, "input", "self", "mat_a"), call.given(1, "weight", "mat2", "mat_b")
    return Product(a, b, again, multiply=multiply)


def softmax_scores(call: Call) -> tuple[Tensor, int]:
    """A softmax call's input, in the dtype that the softmax is computed in, and its dimension."""
    x = call.given(0, "input", "self")
    if isinstance(call.callee, nn.Module) or not isinstance(x, Tensor):
        raise InvalidInput(f"{call.name} is not a call of softmax that can be computed again")
    dtype = next((v for v in (*call.args, *(call.kwargs or {}).values()) if isinstance(v, torch.dtype)), None)
    dim = call.given(1, "dim", default=-1)
    return (x if dtype is None else x.to(dtype)), -1 if dim is None else dim
