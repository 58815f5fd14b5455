"""A call of a module or function as it was made, and how it is made again: with other inputs, or without its biases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import Unit

if TYPE_CHECKING:
    from noisescope.locators.laws.listening import Listening

FUSED = "attention"  # what a fused attention call, and whole modules, are called where operators have their names
ATTENTION_MODULE = "attention module"
MLP = "mlp"
ROTARY = "rotary"
PART = "part"  # any other module inside a block: only what it gives is of interest
WHOLES = (ATTENTION_MODULE, MLP, ROTARY, PART, "residual")

_ADDED = {"linear": ((2, "bias"),), "layer_norm": ((3, "bias"),)}  # arguments that a function adds at its end


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
    door: Listening

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module or function itself, as if for the first time in its forward."""
        y = self.door.afresh(self.callee)(*args, **kwargs)
        if not isinstance(self.callee, nn.Module):  # no listener hears it
            self.door.extra += work(self.operator, (*args, *kwargs.values()), y)
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


def unbiased(heard: Heard) -> tuple[Callable[[Tensor], Tensor], bool]:
    """A call made again without the bias it adds, and whether it adds one."""
    callee = heard.callee
    if isinstance(callee, nn.Module):
        zeros = biases(callee)

        def call(x: Tensor) -> Tensor:
            with parameters_replaced(zeros):
                return heard.again(x)

        return call, bool(zeros)
    args, named, added = list(heard.args), {}, False
    for at, name in _ADDED.get(getattr(callee, "__name__", ""), ()):
        if at < len(args) and isinstance(args[at], Tensor):
            args[at], added = torch.zeros_like(args[at]), True
        elif isinstance(heard.kwargs.get(name), Tensor):
            named[name], added = torch.zeros_like(heard.kwargs[name]), True
    plain = replace(heard, args=tuple(args))
    return (lambda x: plain.again(x, **named)), added


def biases(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every bias in a module, with zeros to stand in for it: laws such as f(0) = 0 then hold for biased modules too."""
    found = []
    for part in module.modules():
        for name in ("bias", "in_proj_bias", "bias_k", "bias_v"):
            bias = part._parameters.get(name)
            if bias is not None and not bias.is_meta:
                found.append((part, name, torch.zeros_like(bias, requires_grad=False)))
    return found
