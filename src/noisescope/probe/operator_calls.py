"""Function calls that are operators, seen by a torch-function mode that is entered only around the modules aimed at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.model.anatomy import EXPERTS, ROTARY, ROUTER
from noisescope.probe.attention import scaled_dot_product
from noisescope.probe.target import Context, Once, OperatorTarget

if TYPE_CHECKING:
    from noisescope.probe.scope import ModelScope

_T = torch.Tensor
_MATMUL = (torch.matmul, torch.mm, torch.einsum, _T.matmul, _T.mm, _T.__matmul__, _T.__rmatmul__)
_BMM = (torch.bmm, torch.baddbmm, _T.bmm, _T.baddbmm)
_LINEAR = (F.linear, torch.addmm, _T.addmm)
_GROUPED = tuple(f for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if f is not None)
_FUSED = F.scaled_dot_product_attention
FUSED = "attention"  # the key of an aim at a fused call as a whole
OUTER = (torch.mul, _T.mul, _T.__mul__)  # positions [..., 1] times frequencies [F]: a product with sums of one term
_SOFTMAX = (torch.softmax, F.softmax, _T.softmax, torch.special.softmax)

Function = Callable[..., Any]


def _table(**groups: tuple[Function, ...]) -> dict[Function, str]:
    return {function: operator for operator, functions in groups.items() for function in functions}


_ANYWHERE = _table(
    matmul=_MATMUL,
    bmm=_BMM,
    linear=(*_LINEAR, *_GROUPED),
    softmax=_SOFTMAX,
    silu=(F.silu,),
    gelu=(F.gelu,),
    norm=(F.layer_norm, F.rms_norm),
)
_ALL_LINEAR = {f: "linear" if operator in ("matmul", "bmm") else operator for f, operator in _ANYWHERE.items()}
_ALL_MATMUL = {f: "matmul" if operator in ("linear", "bmm") else operator for f, operator in _ANYWHERE.items()}

# Which operator a function is depends on whose call it is: every product of MoE experts is `linear`.
TABLES = {EXPERTS: _ALL_LINEAR, ROUTER: _ALL_LINEAR, ROTARY: _ALL_MATMUL | dict.fromkeys(OUTER, "matmul")}

# Positions of the input and of the weight among a function's arguments, where not (0, and no weight).
_INPUTS: dict[Function, tuple[int, ...]] = dict.fromkeys((*_MATMUL, *_BMM, *OUTER), (0, 1))
_INPUTS |= {torch.baddbmm: (1, 2), _T.baddbmm: (1, 2), torch.addmm: (1,), _T.addmm: (1,)}
_INPUT_NAMES = ("input", "other", "mat1", "batch1", "batch2")  # the same tensors given by keyword
_WEIGHT: dict[Function, int] = dict.fromkeys((F.linear, *_GROUPED, *_MATMUL, *_BMM), 1)
_WEIGHT |= {torch.addmm: 2, _T.addmm: 2}
_TRANSPOSED = {torch.addmm, _T.addmm, *_GROUPED, *_MATMUL}


def _by_name(func: Function) -> str:
    """transformers' own fallback for grouped products is an operator that exists only once its module is loaded."""
    return "linear" if getattr(func, "__name__", "") == "grouped_mm_fallback" else ""


class OperatorCalls(TorchFunctionMode):
    """Watches the functions that one module calls itself (not those its operator modules call)."""

    def __init__(
        self,
        scope: ModelScope,
        kind: str,
        targets: dict[str, OperatorTarget],
        context: Context,
        *,
        module: nn.Module,
        storage: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._door = scope
        self._table = TABLES.get(kind, _ANYWHERE)
        self._targets = targets
        self._context = context
        own = (p for p in module._parameters.values() if p is not None and not p.is_meta)
        self._weights = {p.untyped_storage().data_ptr() for p in own}
        self._storage = storage  # opened attention computes in float32, but what it keeps is of this dtype
        self._opens_attention = any(operator in targets for operator in ("matmul", "softmax"))

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._door.owner is self:
            if func is _FUSED and FUSED in self._targets:
                return self._perform(self._targets[FUSED], func, list(args), kwargs)
            if func is _FUSED and self._opens_attention:
                with self._door.mode or self:
                    return scaled_dot_product(*args, **kwargs)
            target = self._targets.get(self._operator(func, args))
            if target is not None:
                return self._perform(target, func, list(args), kwargs)
        return func(*args, **kwargs)

    def _operator(self, func: Function, args: Any) -> str:
        operator = self._table.get(func) or _by_name(func)
        if operator not in ("matmul", "bmm"):
            return operator
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if (func is torch.einsum or func in OUTER) and len(tensors) < 2:  # a permutation, a sum; a scaled cosine
            return ""
        if self._weights and any(tensor.untyped_storage().data_ptr() in self._weights for tensor in tensors):
            return "linear"  # `x @ self.weight`: a projection written by hand
        return operator

    def aims_at(self, operator: str) -> bool:
        """Whether a call of this operator, made here, is perturbed."""
        return operator in self._targets

    def _perform(self, target: OperatorTarget, func: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return perform(target, self._context, func, args, kwargs, storage=self._storage)


def perform(
    target: OperatorTarget,
    context: Context,
    func: Function,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    storage: torch.dtype | None = None,
) -> Any:
    """Run one operator with the aim's perturbation on its inputs, weight, output and gradients."""
    occurrence = context.occurrence(target)
    if target.wants_call:
        y = func(*args, **kwargs)
        other = target.on_call(func, tuple(args), kwargs, y, context, occurrence)  # type: ignore[attr-defined]
        return y if other is None else other
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    weight: int | str | None = None
    if target.operator == "linear":
        weight = "weight" if "weight" in kwargs else _WEIGHT.get(func)
    inputs = [at for at in (*_INPUTS.get(func, (0,)), *_INPUT_NAMES) if at != weight and at in given]
    if func is torch.einsum:
        inputs = list(range(1, len(args)))
    once = Once()
    for at in [*inputs, *([weight] if weight in given else [])]:
        tensor = given[at]
        if not isinstance(tensor, Tensor):
            continue
        if at == weight and func in _TRANSPOSED:  # [..., in, out]: formats run along the inputs
            tensor = target.on_weight(tensor.transpose(-1, -2), context, occurrence).transpose(-1, -2)
        else:
            tensor = (target.on_weight if at == weight else target.on_input)(tensor, context, occurrence)
        if torch.is_grad_enabled() and tensor.requires_grad:
            which = "weight" if at == weight else "input" if at == inputs[0] else "input2"
            tensor = target.tap(tensor, context, occurrence, which, once)
        if isinstance(at, int):
            args[at] = tensor
        else:
            kwargs = {**kwargs, at: tensor}
    y = func(*args, **kwargs)
    return target.on_output(y, context, occurrence, fresh=not torch.is_grad_enabled(), storage=storage)


class DeviceCallMode(TorchFunctionMode):
    """All function calls while a scope is open, handed to the module that makes them.

    The mode entered last is asked first. A scope whose mode is entered with its scope, and not inside each module, thus
    acts before every scope opened later: they see what it did, as they would see what a broken device did.
    """

    def __init__(self, scope: ModelScope) -> None:
        super().__init__()
        self._door = scope

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = self._door.owner
        if owner is None:
            return func(*args, **(kwargs or {}))
        return owner.__torch_function__(func, types, args, kwargs)


class WeightUse(TorchFunctionMode):
    """Puts a wrapper where a module uses its own weight; the parameter itself is never touched."""

    def __init__(self, module: nn.Module, wrapper: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._module = module
        self._make = wrapper
        self._made: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = self._module._parameters.get("weight")  # looked up each time: offloading swaps the parameter
        if weight is not None and not weight.is_meta:  # offloaded weights are on "meta" until the forward needs them
            args = tuple(self._stand_in(weight) if arg is weight else arg for arg in args)
            if kwargs:
                kwargs = {k: self._stand_in(weight) if arg is weight else arg for k, arg in kwargs.items()}
        return func(*args, **(kwargs or {}))

    def _stand_in(self, weight: Tensor) -> Tensor:
        if self._made is None or self._made[0] is not weight:
            self._made = (weight, self._make(weight))
        return self._made[1]
