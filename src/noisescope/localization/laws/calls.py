"""Calls as they were made, and how they are made again: with other inputs, or without their biases.

Laws are tried inside the forward itself, at each module, on the input it really received. A listener on a module gets
its call right after it, and makes it again with other inputs then and there. So every repeated call has the place, the
thread and the scopes of the first one (a shared module is still in its block, a fault simulated by an outer scope still
acts), nothing has to be kept, and the forward goes on with the first output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.expression_search import PART, inner_modules
from noisescope.model.anatomy import ATTENTION, MODULE, Anatomy, Unit
from noisescope.model.anatomy import ROTARY as ROTARY_KIND
from noisescope.probe.attention import decomposed_config
from noisescope.probe.operator_calls import FUSED
from noisescope.probe.scope import ModelScope, PlainScope
from noisescope.probe.target import CallWatcher, Context
from noisescope.probe.wrapper import ForwardWrapper

ATTENTION_MODULE = "attention module"  # what whole modules are called where operators have their names
MLP = "mlp"
ROTARY = "rotary"
WHOLES = (ATTENTION_MODULE, MLP, ROTARY, PART, "residual")

_ADDED = {"linear": ((2, "bias"),), "layer_norm": ((3, "bias"),)}  # arguments that a function adds at its end


@dataclass(frozen=True)
class RecordedCall:
    """One call of a module or function, as it was made."""

    unit: Unit
    operator: str
    callee: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any
    occurrence: int
    scope: Listening

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module or function itself, as if for the first time in its forward."""
        y = self.scope.afresh(self.callee)(*args, **kwargs)
        if not isinstance(self.callee, nn.Module):  # no listener hears it
            self.scope.extra += work(self.operator, (*args, *kwargs.values()), y)
        return y

    @property
    def x(self) -> Tensor | None:
        """The first tensor given."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                return value
        return None

    @property
    def output(self) -> Tensor | None:
        """The first tensor given back."""
        y = self.y
        if isinstance(y, (tuple, list)) and y:
            y = y[0]
        return y if isinstance(y, Tensor) else None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Input and output of a call that has both."""
        x, y = self.x, self.output
        assert x is not None and y is not None
        return x, y

    def alone(self) -> RecordedCall:
        """The same call with zeros for whatever else of x's shape it was given: some modules add the residual."""
        x = self.x

        def other(value: Any) -> Any:
            same = isinstance(value, Tensor) and value is not x and x is not None and value.shape == x.shape
            return torch.zeros_like(value) if same else value

        args = tuple(other(value) for value in self.args)
        return replace(self, args=args, kwargs={name: other(value) for name, value in self.kwargs.items()})

    @property
    def adds(self) -> bool:
        """Whether `alone` leaves something out."""
        x = self.x
        given = (*self.args, *self.kwargs.values())
        return x is not None and any(isinstance(v, Tensor) and v is not x and v.shape == x.shape for v in given)

    def again(self, x: Tensor, **changed: Any) -> Tensor:
        """The same call with another first tensor."""
        own = self.x
        args = tuple(x if arg is own else arg for arg in self.args)
        kwargs = {name: x if value is own else value for name, value in self.kwargs.items()} | changed
        y = self.call(*args, **kwargs)
        return y[0] if isinstance(y, (tuple, list)) else y  # type: ignore[no-any-return]


def work(operator: str, given: Iterable[Any], y: Any) -> int:
    """Multiplications of a linear, or of both products of fused attention; what else a forward does is small."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    if operator == "linear" and tensors and isinstance(y, Tensor):
        return y.numel() * tensors[0].shape[-1]
    if operator == FUSED and len(tensors) > 1:
        return 2 * tensors[0].numel() * tensors[1].shape[-2]
    return 0


@contextlib.contextmanager
def parameters_replaced(replaced: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Other tensors in the place of parameters, for the length of some calls; the parameters themselves stay."""
    kept = [(module, name, module._parameters[name]) for module, name, _ in replaced]
    try:
        for module, name, tensor in replaced:
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


def unbiased(recorded: RecordedCall) -> tuple[Callable[[Tensor], Tensor], bool]:
    """A call made again without the bias it adds, and whether it adds one."""
    callee = recorded.callee
    if isinstance(callee, nn.Module):
        zeros = biases(callee)

        def call(x: Tensor) -> Tensor:
            with parameters_replaced(zeros):
                return recorded.again(x)

        return call, bool(zeros)
    args, named, added = list(recorded.args), {}, False
    for at, name in _ADDED.get(getattr(callee, "__name__", ""), ()):
        if at < len(args) and isinstance(args[at], Tensor):
            args[at], added = torch.zeros_like(args[at]), True
        elif isinstance(recorded.kwargs.get(name), Tensor):
            named[name], added = torch.zeros_like(recorded.kwargs[name]), True
    plain = replace(recorded, args=tuple(args))
    return (lambda x: plain.again(x, **named)), added


def biases(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every bias in a module, with zeros to replace it: laws such as f(0) = 0 then hold for biased modules too."""
    found = []
    for part in module.modules():
        for name in ("bias", "in_proj_bias", "bias_k", "bias_v"):
            bias = part._parameters.get(name)
            if bias is not None and not bias.is_meta:
                found.append((part, name, torch.zeros_like(bias, requires_grad=False)))
    return found


Handler = Callable[[RecordedCall], None]
Choice = Callable[[Unit, str], Handler | None]


class Listening(PlainScope):
    """A scope that hands whole calls to handlers, and counts the work of the calls they make."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, choose: Choice) -> None:
        super().__init__(model, anatomy)
        self._choose = choose
        self._devices = _doors_of_devices(self.model)
        self.busy = False
        self.natural = 0  # multiplications in the forward itself, and in the calls made again
        self.extra = 0

    def afresh(self, callee: Callable[..., Any]) -> Callable[..., Any]:
        """A callable whose operators count from the start again, for scopes that stand for a device.

        Such a scope knows the calls inside one module by their number (0 is q k^T, 1 is P v). A call that is made again
        must have the numbers of the first one, or a simulated fault would not be where it was.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            contexts = [scope.context for scope in self._devices]
            contexts += [getattr(scope.owner, "_context", None) for scope in self._devices]
            kept = [(context, context.fired) for context in contexts if context is not None]
            try:
                for context, _ in kept:
                    context.fired = {}
                return callee(*args, **kwargs)
            finally:
                for context, fired in reversed(kept):
                    context.fired = fired

        return call

    def aim_at(self, unit: Unit, operator: str) -> Any:
        handler = self._choose(unit, operator)
        return None if handler is None else _Listener(self, unit, operator, handler)

    def target_fused_attention(self, unit: Unit) -> Any:
        return self.aim_at(unit, FUSED)


def _doors_of_devices(model: nn.Module) -> list[ModelScope]:
    """The scopes open on a model that act before all others, as a broken device does: simulated faults."""
    found: dict[int, ModelScope] = {}
    for module in model.modules():
        held = module.__dict__.get("forward")
        while isinstance(held, ForwardWrapper):
            if held.scope.acts_as_device and not held.retired:
                found[id(held.scope)] = held.scope
            held = held.replaced
    return list(found.values())


class _Listener(CallWatcher):
    def __init__(self, scope: Listening, unit: Unit, operator: str, handler: Handler) -> None:
        super().__init__(unit, operator)
        self.scope = scope
        self.handler = handler

    def on_call(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any, context: Context, occurrence: int
    ) -> None:
        scope = self.scope
        recorded = RecordedCall(self.unit, self.operator, callee, args, kwargs, y, occurrence, scope)
        done = work(self.operator, (*args, *kwargs.values()), y)
        if scope.busy:
            scope.extra += done
            return
        scope.natural += done
        scope.busy = True
        try:
            self.handler(recorded)
        finally:
            scope.busy = False


# -- what is listened to


def module_anatomy(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Modules that are operators, blocks, and attention, MLP and rotary modules as wholes."""
    units = [unit for unit in anatomy.units if unit.kind == MODULE]
    for unit in anatomy.units:
        whole = {ATTENTION: ATTENTION_MODULE, ROTARY_KIND: ROTARY}.get(unit.kind)
        if whole is not None:
            units.append(replace(unit, kind=MODULE, operators=(whole,), counts=()))
    known = {unit.module for unit in anatomy.units}
    for place, name, _ in inner_modules(model, anatomy):
        if name not in known:
            inner = [u for u in units if u.module.startswith(f"{name}.") and u.operators == ("linear",)]
            mlp = bool(inner) and all(u.component == "mlp" for u in inner)
            units.append(Unit(name, MODULE, place, "mlp" if mlp else "", (MLP if mlp else PART,)))
    return replace(anatomy, units=tuple(units))


def function_anatomy(model: nn.Module, anatomy: Anatomy) -> tuple[Anatomy, list[str]]:
    """Modules whose own function calls are operators, without attention that can't be opened; and why it can't."""
    modules = dict(model.named_modules())
    units, skipped = [], []
    for unit in anatomy.units:
        module = modules.get(unit.module)
        if unit.kind == ATTENTION and isinstance(module, nn.MultiheadAttention):
            skipped.append("laws of fused attention: nn.MultiheadAttention is judged as a whole")
        elif unit.kind == ATTENTION and module is not None and decomposed_config(module) is not None:
            kernel = getattr(getattr(module, "config", None), "_attn_implementation", "")
            skipped.append(f"laws of fused attention: the kernel {kernel} can only be judged as a whole")
        else:
            units.append(unit)
    return replace(anatomy, units=tuple(units)), skipped
