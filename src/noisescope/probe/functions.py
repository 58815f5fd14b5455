"""Which torch functions are operators, and which of their arguments are inputs and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.model.anatomy import EXPERTS, ROTARY, ROUTER

Function = Callable[..., Any]

_T = torch.Tensor


def inside_vmap() -> bool:
    """Whether a function transform (torch.vmap, torch.func.grad) is running: its tensors have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_MATMUL = (torch.matmul, torch.mm, torch.einsum, _T.matmul, _T.mm, _T.__matmul__, _T.__rmatmul__)
_BMM = (torch.bmm, torch.baddbmm, _T.bmm, _T.baddbmm)
LINEAR, GELU = torch._C._nn.linear, torch._C._nn.gelu  # F's, unless they were replaced before the import
_LINEAR = (LINEAR, torch.addmm, _T.addmm)
_GROUPED = tuple(f for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if f is not None)
_SOFTMAX = (torch.softmax, F.softmax, _T.softmax, torch.special.softmax)
ADDED = (torch.addmm, torch.baddbmm, _T.addmm, _T.baddbmm)  # what is added comes first, then the two factors
OUTER = (torch.mul, _T.mul, _T.__mul__)  # positions [..., 1] times frequencies [F]: a product with sums of one term


def _table(**groups: tuple[Function, ...]) -> dict[Function, str]:
    return {function: operator for operator, functions in groups.items() for function in functions}


_ANYWHERE = _table(
    matmul=_MATMUL,
    bmm=_BMM,
    linear=(*_LINEAR, *_GROUPED),
    softmax=_SOFTMAX,
    silu=(F.silu,),
    gelu=(GELU,),
    norm=(F.layer_norm, F.rms_norm),
)
_ALL_LINEAR = {f: "linear" if operator in ("matmul", "bmm") else operator for f, operator in _ANYWHERE.items()}
_ALL_MATMUL = {f: "matmul" if operator in ("linear", "bmm") else operator for f, operator in _ANYWHERE.items()}

# Which operator a function is depends on whose call it is: every product of MoE experts is `linear`.
_TABLES = {EXPERTS: _ALL_LINEAR, ROUTER: _ALL_LINEAR, ROTARY: _ALL_MATMUL | dict.fromkeys(OUTER, "matmul")}

# Positions of the input and of the weight among a function's arguments, where not (0, and no weight).
_INPUTS: dict[Function, tuple[int, ...]] = dict.fromkeys((*_MATMUL, *_BMM, *OUTER), (0, 1))
_INPUTS |= {torch.baddbmm: (1, 2), _T.baddbmm: (1, 2), torch.addmm: (1,), _T.addmm: (1,)}
_INPUT_NAMES = ("input", "other", "mat1", "batch1", "batch2")  # the same tensors given by keyword
_WEIGHT: dict[Function, int] = dict.fromkeys((LINEAR, *_GROUPED, *_MATMUL, *_BMM), 1)
_WEIGHT |= dict.fromkeys(ADDED, 2)
_TRANSPOSED = {torch.addmm, _T.addmm, *_GROUPED, *_MATMUL, *_BMM}  # their weight is [..., in, out]


def operators_within(kind: str) -> dict[Function, str]:
    """Function -> operator, for the calls that a unit of this kind makes itself."""
    return _TABLES.get(kind, _ANYWHERE)


def is_grouped(function: Function) -> bool:
    """A product of MoE experts; transformers' own fallback exists only once its module is loaded, so names decide."""
    return getattr(function, "__name__", "") in ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


def operands(
    function: Function, operator: str, args: tuple[Any, ...] | list[Any], kwargs: dict[str, Any]
) -> tuple[list[int | str], int | str | None]:
    """Positions or names of the arguments that are inputs, and of the one that is the weight of a linear."""
    weight: int | str | None = None
    count = len(args)
    if operator == "linear":
        at = _WEIGHT.get(function, count)
        weight = "weight" if "weight" in kwargs else at if at < count else None
        if matrix_first(function, args):
            return [1], 0
    if function is torch.einsum:
        return list(range(1, count)), weight
    inputs: list[int | str] = [at for at in _INPUTS.get(function, (0,)) if at != weight and at < count]
    inputs += [name for name in _INPUT_NAMES if name in kwargs]
    return inputs, weight


def matrix_first(function: Function, args: tuple[Any, ...] | list[Any]) -> bool:
    """Whether a product of experts is of matrices [S, out, in] and vectors [S, in, 1], in this order."""
    return function in _BMM and len(args) == 2 and args[1].shape[-1] == 1 != args[0].shape[-2]


def is_turned(function: Function, args: tuple[Any, ...] | list[Any], *, weight: bool) -> bool:
    """Whether the inputs of a linear run along the last dimension but one of its weight, or of its input."""
    if matrix_first(function, args):
        return not weight
    return weight and function in _TRANSPOSED


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first tensor argument of a call: an operator's input, a block's hidden states."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            return arg
    return None


def with_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Any, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with one tensor replaced by another, wherever it is."""
    return tuple(new if arg is old else arg for arg in args), {
        name: new if arg is old else arg for name, arg in kwargs.items()
    }


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, by position or by one of its names."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)
