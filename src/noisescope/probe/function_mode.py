"""Intercepts function calls that are operators, with a torch-function mode active only around targeted modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.errors import UnsupportedModel
from noisescope.probe.functions import OUTER, Function, inside_vmap, is_turned, operands, operators_within
from noisescope.probe.operator_target import CallListener, Context, Once, OperatorTarget, Target
from noisescope.probe.unfused_attention import FUSED_FUNCTION, scaled_dot_product
from noisescope.sites import CACHED, FUSED

if TYPE_CHECKING:
    from noisescope.probe.forward_patching import ModelScope


def _by_name(func: Function) -> str:
    """transformers' own fallback for grouped products is an operator that exists only once its module is loaded."""
    return "linear" if getattr(func, "__name__", "") == "grouped_mm_fallback" else ""


class OperatorCalls(TorchFunctionMode):
    """Intercepts the functions that one module calls itself (not those its operator modules call)."""

    def __init__(
        self,
        scope: ModelScope,
        kind: str,
        targets: dict[str, Target],
        context: Context,
        *,
        module: nn.Module,
        storage: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._scope = scope
        self._table = operators_within(kind)
        self._targets = targets
        self.context = context
        own = (p for p in module._parameters.values() if p is not None and not p.is_meta)
        self._weights = {p.untyped_storage().data_ptr() for p in own}
        self._storage = storage  # opened attention computes in float32, but what it keeps is of this dtype
        self._opens_attention = any(operator in targets for operator in ("matmul", "softmax"))
        found = {name: targets[name] for name in CACHED if name in targets}
        self._cached = {name: target for name, target in found.items() if isinstance(target, OperatorTarget)}
        self._products = 0  # of this call of the module: the first is q k^T, the second P v

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._scope.owner is self:
            if func is FUSED_FUNCTION and FUSED in self._targets:
                return self._perform(self._targets[FUSED], func, list(args), kwargs)
            if func is FUSED_FUNCTION and self._opens_attention:
                with self._scope.mode or self:
                    return scaled_dot_product(*args, **kwargs)
            if func is FUSED_FUNCTION and self._cached:
                args, kwargs = self._with_cached(args, kwargs, {"keys": (1, "key"), "values": (2, "value")})
                return func(*args, **kwargs)
            operator = self._operator(func, args)
            if self._cached and operator in ("matmul", "bmm") and func is not torch.einsum:
                args, kwargs = self._with_cached_factor(func, operator, args, kwargs)
            target = self._targets.get(operator)
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
        if (
            self._weights
            and not inside_vmap()
            and any(tensor.untyped_storage().data_ptr() in self._weights for tensor in tensors)
        ):
            return "linear"  # `x @ self.weight`: a projection written by hand
        return operator

    def _with_cached(
        self, args: Any, kwargs: dict[str, Any], where: dict[str, tuple[int, str]], *, transposed: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with keys and values as a cache gives them back; `where` has their position or name."""
        args, kwargs = list(args), dict(kwargs)
        for name, (position, keyword) in where.items():
            target = self._cached.get(name)
            if target is None:
                continue
            tensor = args[position] if position < len(args) else kwargs[keyword]
            tensor = tensor.transpose(-1, -2) if transposed else tensor  # [..., tokens, channels of a head]
            tensor = target.on_output(tensor, self.context, self.context.occurrence(target), fresh=False)
            tensor = tensor.transpose(-1, -2) if transposed else tensor
            if position < len(args):
                args[position] = tensor
            else:
                kwargs[keyword] = tensor
        return args, kwargs

    def _with_cached_factor(
        self, func: Function, operator: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The same for attention written as two products: q k^T, then P v."""
        if self._products > 1:
            raise UnsupportedModel("attention here has more than two products: which of them read keys is not known")
        name = CACHED[self._products]
        self._products += 1
        at = operands(func, operator, args, kwargs)[0][-1]
        where = (at, "") if isinstance(at, int) else (len(args), at)
        return self._with_cached(args, kwargs, {name: where}, transposed=name == "keys")

    def targets_operator(self, operator: str) -> bool:
        """Whether a call of this operator, made here, is perturbed."""
        return operator in self._targets

    def _perform(self, target: Target, func: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return perform(target, self.context, func, args, kwargs, storage=self._storage)


def perform(
    target: Target,
    context: Context,
    func: Function,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    storage: torch.dtype | None = None,
) -> Any:
    """Run one operator with the target's perturbation on its inputs, weight, output and gradients."""
    occurrence = context.occurrence(target)
    if isinstance(target, CallListener):
        return target.run(func, func, tuple(args), kwargs, context=context, occurrence=occurrence)
    inputs, weight = operands(func, target.operator, args, kwargs)
    once = Once()
    for at in inputs if weight is None else [*inputs, weight]:
        tensor = args[at] if isinstance(at, int) else kwargs[at]
        if not isinstance(tensor, Tensor):
            continue
        perturbed = target.on_weight if at == weight else target.on_input
        if target.operator == "linear" and is_turned(func, args, weight=at == weight):  # formats run along the inputs
            tensor = perturbed(tensor.transpose(-1, -2), context, occurrence).transpose(-1, -2)
        else:
            tensor = perturbed(tensor, context, occurrence)
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
        self._scope = scope

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = self._scope.owner
        if owner is None:
            return func(*args, **(kwargs or {}))
        return owner.__torch_function__(func, types, args, kwargs)


class WeightUse(TorchFunctionMode):
    """Substitutes another tensor where a module uses its own weight; the parameter itself is never touched."""

    def __init__(self, module: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._module = module
        self._replace = replace
        self._made: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = self._module._parameters.get("weight")  # looked up each time: offloading swaps the parameter
        if weight is not None and not weight.is_meta:  # offloaded weights are on "meta" until the forward needs them
            args = tuple(self._replaced(weight) if arg is weight else arg for arg in args)
            if kwargs:
                kwargs = {k: self._replaced(weight) if arg is weight else arg for k, arg in kwargs.items()}
        return func(*args, **(kwargs or {}))

    def _replaced(self, weight: Tensor) -> Tensor:
        if self._made is None or self._made[0] is not weight:
            self._made = (weight, self._replace(weight))
        return self._made[1]
