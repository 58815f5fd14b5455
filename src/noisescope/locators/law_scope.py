"""Where the laws are tried: inside the forward itself, at each module, on the input it really received.

A listener on a module is told of its call right after it, and makes it again with other inputs then and there. So every
repeated call has the place, the thread and the scopes of the first one (a shared module is still in its block, a fault
simulated by an outer scope still acts), nothing has to be kept, and the forward goes on with the first output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import Anatomy, Unit
from noisescope.probe.aims import CallWatcher, Context
from noisescope.probe.door import Door
from noisescope.sites import Site

FUSED = "attention"  # what a fused attention call, and whole modules, are called where operators have their names
ATTENTION_MODULE = "attention module"
MLP = "mlp"
ROTARY = "rotary"


@dataclass(frozen=True)
class Heard:
    """One call of a module or function, as it was made."""

    unit: Unit
    operator: str
    callee: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any
    occurrence: int
    meter: Callable[[int], None] | None = None  # told of the work of calls made again, where no listener hears them

    @property
    def site(self) -> Site:
        return self.unit.site(self.operator, occurrence=self.occurrence)

    @property
    def x(self) -> Tensor | None:
        """The first floating-point tensor given."""
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

    def alone(self) -> Heard:
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
        y = self.callee(*args, **kwargs)
        if self.meter is not None:
            self.meter(y.numel() * x.shape[-1])
        return y[0] if isinstance(y, (tuple, list)) else y  # type: ignore[no-any-return]


_ADDED = {"linear": ((2, "bias"),), "layer_norm": ((3, "bias"),)}  # arguments that a function adds at its end

Handler = Callable[[Heard], None]


class Listening(Door):
    """A door that hands whole calls to handlers, and counts the work of the calls they make."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, choose: Callable[[Unit, str], Handler | None]) -> None:
        super().__init__(model, anatomy)
        self._choose = choose
        self.busy = False
        self.natural = 0  # multiplications in linears of the forward itself, and of the calls made again
        self.extra = 0

    def meter(self, work: int) -> None:
        self.extra += work

    def aim_at(self, unit: Unit, operator: str) -> Any:
        handler = self._choose(unit, operator)
        return None if handler is None else _Listener(self, unit, operator, handler)

    def aim_at_fused(self, unit: Unit) -> Any:
        return self.aim_at(unit, FUSED)

    def __enter__(self) -> Listening:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


class _Listener(CallWatcher):
    def __init__(self, door: Listening, unit: Unit, operator: str, handler: Handler) -> None:
        super().__init__(unit, operator)
        self.door = door
        self.handler = handler

    def on_call(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any, context: Context, occurrence: int
    ) -> None:
        door = self.door
        function = self.operator == "linear" and not isinstance(callee, nn.Module)
        meter = door.meter if function else None
        heard = Heard(self.unit, self.operator, callee, args, kwargs, y, occurrence, meter)
        if self.operator == "linear" and isinstance(y, Tensor) and heard.x is not None:
            work = y.numel() * heard.x.shape[-1]
            if door.busy:
                door.extra += work
            else:
                door.natural += work
        if door.busy:
            return
        door.busy = True
        try:
            self.handler(heard)
        finally:
            door.busy = False


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


def unbiased(heard: Heard) -> tuple[Callable[[Tensor], Tensor], bool]:
    """A call made again without the bias it adds, and whether it adds one."""
    callee = heard.callee
    if isinstance(callee, nn.Module):
        zeros = biases(callee)

        def call(x: Tensor) -> Tensor:
            with parameters_replaced(zeros):
                return heard.again(x)

        return call, bool(zeros)
    changed = {}
    args = list(heard.args)
    for at, name in _ADDED.get(getattr(callee, "__name__", ""), ()):
        if at < len(args) and isinstance(args[at], Tensor):
            args[at] = torch.zeros_like(args[at])
            changed[at] = True
        elif isinstance(heard.kwargs.get(name), Tensor):
            changed[name] = torch.zeros_like(heard.kwargs[name])
    plain = replace(heard, args=tuple(args))
    named = {name: value for name, value in changed.items() if isinstance(name, str)}
    return (lambda x: plain.again(x, **named)), bool(changed)


def biases(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every bias in a module, with zeros to stand in for it: laws such as f(0) = 0 then hold for biased modules too."""
    found = []
    for part in module.modules():
        for name in ("bias", "in_proj_bias"):
            bias = part._parameters.get(name)
            if bias is not None and not bias.is_meta:
                found.append((part, name, torch.zeros_like(bias, requires_grad=False)))
    return found
