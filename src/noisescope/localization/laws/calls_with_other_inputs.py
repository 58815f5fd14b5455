"""Repeats recorded calls, with other inputs or without their biases.

Laws are tested inside the forward, at each module, on the input it received. A callback receives the module's call
right after it happened and repeats it with other inputs immediately. Every repeated call therefore runs in the same
place, thread and scopes as the original (a shared module is still in its block, a fault simulated by an outer scope
still acts), nothing has to be stored, and the forward continues with the original output.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from noisescope import progress
from noisescope.localization.call_tree import with_whole_modules
from noisescope.localization.formula_recognition import copied_to_host, norm_formula, run_on_host
from noisescope.localization.host_operators import host_arithmetic
from noisescope.model.anatomy import ATTENTION, MODULE, Anatomy, Unit
from noisescope.model.anatomy import ROTARY as ROTARY_KIND
from noisescope.probe.unfused_attention import decomposed_config
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import FUSED

ATTENTION_MODULE = "attention module"  # what whole modules are called where operators have their names
MLP = "mlp"
ROTARY = "rotary"
WHOLES = (ATTENTION_MODULE, MLP, ROTARY, "residual")

_LARGEST_BUFFER = 1 << 20  # elements: larger ones (a cache) are not copied
_ADDED = {"linear": ((2, "bias"),), "layer_norm": ((3, "bias"),)}  # arguments that a function adds at its end


def without_residual(call: RecordedCall) -> RecordedCall:
    """The same call with zeros for any other argument of x's shape: some modules add the residual."""
    x = call.first_input

    def other(value: Any) -> Any:
        same = isinstance(value, Tensor) and value is not x and x is not None and value.shape == x.shape
        return torch.zeros_like(value) if same else value

    args = tuple(other(value) for value in call.args)
    return replace(call, args=args, kwargs={name: other(value) for name, value in call.kwargs.items()})


def adds_residual(call: RecordedCall) -> bool:
    """Whether `without_residual` changes anything."""
    x = call.first_input
    given = (*call.args, *call.kwargs.values())
    return x is not None and any(isinstance(v, Tensor) and v is not x and v.shape == x.shape for v in given)


def work(operator: str, given: Iterable[Any], y: Any) -> int:
    """Multiplications of a linear, or of both products of fused attention; the rest of a forward is small."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    if operator == "linear" and tensors and isinstance(y, Tensor):
        return y.numel() * tensors[0].shape[-1]
    if operator == FUSED and len(tensors) > 1:
        return 2 * tensors[0].numel() * tensors[1].shape[-2]
    return 0


def probe(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """An input for a repeated call, derived from x on the host, because the device's arithmetic is under test."""
    with host_arithmetic():
        return make(x.detach().cpu()).to(x.device)


def attempt(call: Callable[[], Tensor]) -> Tensor | None:
    """A call in another shape than the original: None if the module does not accept it, so that other laws run."""
    try:
        return call()
    except Exception:  # third-party code may raise anything
        return None


def on_the_host(recorded: RecordedCall) -> RecordedCall | None:
    """The same call by the class's own code on the host, from copies; None if that code does not run there."""

    def rerun(callee: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(callee, nn.Module):
            y = run_on_host(callee, args, kwargs)
            if y is None:
                raise RuntimeError(f"{type(callee).__name__} does not run on the host")
            return y
        with host_arithmetic():
            return callee(*args, **kwargs)

    args, kwargs = copied_to_host(recorded.args), copied_to_host(recorded.kwargs)
    try:
        return replace(recorded, args=args, kwargs=kwargs, output=rerun(recorded.callee, *args, **kwargs), rerun=rerun)
    except Exception:  # third-party code may raise anything: it does not run here
        return None


@dataclass(frozen=True)
class ModuleState:
    """Attributes and buffers of a module and its children, which some modules change on every call."""

    attributes: dict[tuple[nn.Module, str], Any]
    buffers: dict[tuple[nn.Module, str], tuple[Tensor, Tensor, int]]  # with a copy, and how often it was written to

    @classmethod
    def of(cls, callee: Any) -> ModuleState:
        parts = list(callee.modules()) if isinstance(callee, nn.Module) else []
        attributes = {
            (part, name): value
            for part in parts
            for name, value in vars(part).items()
            if value is None or isinstance(value, (bool, int, float, str))
        }
        own = {(part, name): b for part in parts for name, b in part._buffers.items() if b is not None}
        small = {
            key: b for key, b in own.items() if b.numel() <= _LARGEST_BUFFER and not (b.is_meta or b.is_inference())
        }
        with host_arithmetic():
            return cls(attributes, {key: (b, b.clone(), b._version) for key, b in small.items()})

    def restore(self) -> bool:
        """Restore what changed; returns whether anything had."""
        changed = False
        for (part, name), value in self.attributes.items():
            if vars(part).get(name) != value:
                part.__dict__[name], changed = value, True
        for (part, name), (buffer, before, version) in self.buffers.items():
            if part._buffers.get(name) is not buffer or buffer._version != version:
                with host_arithmetic():
                    buffer.copy_(before)
                part._buffers[name], changed = buffer, True
        return changed


@contextlib.contextmanager
def parameters_replaced(replaced: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Temporarily use other tensors in place of parameters; the parameters themselves are untouched."""
    kept = [(module, name, module._parameters[name]) for module, name, _ in replaced]
    try:
        for module, name, tensor in replaced:
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


def unbiased(recorded: RecordedCall) -> tuple[Callable[[Tensor], Tensor], bool]:
    """A call repeated without the bias it adds, and whether it adds one."""
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
    """Every bias in a module, with zeros to replace it, so that laws such as f(0) = 0 hold for biased modules too."""
    found = []
    for part in module.modules():
        for name in ("bias", "in_proj_bias", "bias_k", "bias_v", *_own_names_of_bias(part)):
            bias = part._parameters.get(name)
            if bias is not None and not bias.is_meta:
                found.append((part, name, torch.zeros_like(bias, requires_grad=False)))
    return found


def _own_names_of_bias(module: nn.Module) -> tuple[str, ...]:
    """The name of the bias in a hand-written norm, found by its formula."""
    sizes = {p.shape for p in module._parameters.values() if p is not None}
    own = next(iter(sizes)) if len(sizes) == 1 and not list(module.children()) else ()
    formula = norm_formula(module, own[0]) if len(own) == 1 else None
    return (formula.bias_name,) if formula is not None and formula.bias and formula.bias_name != "bias" else ()


Handler = Callable[[RecordedCall], None]
Choice = Callable[[Unit, str], Handler | None]


class Listening:
    """Passes whole calls to handlers, and counts the work of the calls they make. Each is a step of a named phase."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, choose: Choice, phase: str = "") -> None:
        self._choose = choose
        every = [(unit, operator) for unit in anatomy.units for operator in unit.operators]
        self.phase = progress.Phase(phase, sum(choose(*each) is not None for each in every))
        self._scope = watch(
            model, self._on_call, lambda unit, op: choose(unit, op) is not None, repeated=True, anatomy=anatomy
        )
        self._busy = False
        self.natural = 0  # multiplications in the forward itself, and in repeated calls
        self.extra = 0

    def __enter__(self) -> Self:
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)

    def _on_call(self, call: RecordedCall) -> None:
        done = work(call.operator, (*call.args, *call.kwargs.values()), call.output)
        if self._busy:
            self.extra += done
            return
        self.natural += done
        handler = self._choose(call.unit, call.operator)
        assert handler is not None
        if not isinstance(call.callee, nn.Module):  # a function that is called again is not reported
            call = replace(call, rerun=functools.partial(self._rerun, call))
        self._busy = True
        try:
            handler(call)
        finally:
            self._busy = False
        if self.phase.name:
            progress.step(self.phase.name)

    def _rerun(self, call: RecordedCall, callee: Any, *args: Any, **kwargs: Any) -> Any:
        y = call.rerun(callee, *args, **kwargs)
        self.extra += work(call.operator, (*args, *kwargs.values()), y)
        return y


# -- what is listened to


def module_anatomy(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Modules that are operators, blocks, and attention, MLP and rotary modules as wholes."""
    units = [unit for unit in anatomy.units if unit.kind == MODULE]
    for unit in anatomy.units:
        whole = {ATTENTION: ATTENTION_MODULE, ROTARY_KIND: ROTARY}.get(unit.kind)
        if whole is not None:
            units.append(replace(unit, kind=MODULE, operators=(whole,), counts=()))
    known = {unit.module for unit in anatomy.units}
    for unit in with_whole_modules(model, anatomy).units:
        if unit.module not in known and isinstance(unit.place, int):
            inner = [u for u in units if u.module.startswith(f"{unit.module}.") and u.operators == ("linear",)]
            if inner and all(u.component == "mlp" for u in inner):
                units.append(Unit(unit.module, MODULE, unit.place, "mlp", (MLP,)))
    return replace(anatomy, units=tuple(units))


def function_anatomy(model: nn.Module, anatomy: Anatomy) -> tuple[Anatomy, list[str]]:
    """Modules whose own function calls are operators, without attention that can't be opened; and why it can't."""
    modules = dict(model.named_modules())
    units, skipped = [], []
    for unit in anatomy.units:
        module = modules.get(unit.module)
        if unit.kind == ATTENTION and isinstance(module, nn.MultiheadAttention):
            skipped.append("laws of fused attention: nn.MultiheadAttention is checked as a whole")
        elif unit.kind == ATTENTION and module is not None and decomposed_config(module) is not None:
            kernel = getattr(getattr(module, "config", None), "_attn_implementation", "")
            skipped.append(f"laws of fused attention: the kernel {kernel} can only be checked as a whole")
        else:
            units.append(unit)
    return replace(anatomy, units=tuple(units)), skipped
