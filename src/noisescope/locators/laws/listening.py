"""Where the laws are tried: inside the forward itself, at each module, on the input it really received.

A listener on a module is told of its call right after it, and makes it again with other inputs then and there. So every
repeated call has the place, the thread and the scopes of the first one (a shared module is still in its block, a fault
simulated by an outer scope still acts), nothing has to be kept, and the forward goes on with the first output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from noisescope.anatomy import ATTENTION, MODULE, Anatomy, Unit
from noisescope.anatomy import ROTARY as ROTARY_KIND
from noisescope.locators.laws.calls import ATTENTION_MODULE, FUSED, MLP, PART, ROTARY, Heard, work
from noisescope.probe.aims import CallWatcher, Context
from noisescope.probe.attention import decomposed_config
from noisescope.probe.door import Door, PlainDoor
from noisescope.probe.stand_in import StandIn

Handler = Callable[[Heard], None]
Choice = Callable[[Unit, str], Handler | None]


class Listening(PlainDoor):
    """A door that hands whole calls to handlers, and counts the work of the calls they make."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, choose: Choice) -> None:
        super().__init__(model, anatomy)
        self._choose = choose
        self._devices = _doors_of_devices(self.model)
        self.busy = False
        self.natural = 0  # multiplications in the forward itself, and in the calls made again
        self.extra = 0

    def afresh(self, callee: Callable[..., Any]) -> Callable[..., Any]:
        """A callable whose operators count from the start again, for doors that stand for a device.

        Such a door knows the calls inside one module by their number (0 is q k^T, 1 is P v). A call that is made again
        must have the numbers of the first one, or a simulated fault would not be where it was.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            contexts = [door.context for door in self._devices]
            contexts += [getattr(door.owner, "_context", None) for door in self._devices]
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

    def aim_at_fused(self, unit: Unit) -> Any:
        return self.aim_at(unit, FUSED)


def _doors_of_devices(model: nn.Module) -> list[Door]:
    """The doors open on a model that act before all others, as a broken device does: simulated faults."""
    found: dict[int, Door] = {}
    for module in model.modules():
        held = module.__dict__.get("forward")
        while isinstance(held, StandIn):
            if held.door.early and not held.retired:
                found[id(held.door)] = held.door
            held = held.replaced
    return list(found.values())


class _Listener(CallWatcher):
    def __init__(self, door: Listening, unit: Unit, operator: str, handler: Handler) -> None:
        super().__init__(unit, operator)
        self.door = door
        self.handler = handler

    def on_call(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any, context: Context, occurrence: int
    ) -> None:
        door = self.door
        heard = Heard(self.unit, self.operator, callee, args, kwargs, y, occurrence, door)
        done = work(self.operator, (*args, *kwargs.values()), y)
        if door.busy:
            door.extra += done
            return
        door.natural += done
        door.busy = True
        try:
            self.handler(heard)
        finally:
            door.busy = False


# -- what is listened to


def module_anatomy(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Modules that are operators, blocks, and attention, MLP and rotary modules as wholes."""
    units = [unit for unit in anatomy.units if unit.kind == MODULE]
    for unit in anatomy.units:
        whole = {ATTENTION: ATTENTION_MODULE, ROTARY_KIND: ROTARY}.get(unit.kind)
        if whole is not None:
            units.append(replace(unit, kind=MODULE, operators=(whole,), counts=()))
    known = {unit.module for unit in anatomy.units}
    modules = dict(model.named_modules())
    for place, block in enumerate(anatomy.blocks):
        for name, module in modules[block].named_modules(prefix=block):
            if name in known or not any(True for _ in module.parameters()):
                continue
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                continue
            inner = [u for u in units if u.module.startswith(f"{name}.") and u.operators == ("linear",)]
            mlp = bool(inner) and all(u.component == "mlp" for u in inner)
            units.append(Unit(name, MODULE, place, "mlp" if mlp else "", (MLP if mlp else PART,)))
    return replace(anatomy, units=tuple(units))


def function_anatomy(model: nn.Module, anatomy: Anatomy) -> tuple[Anatomy, list[str]]:
    """Modules whose own function calls are operators, without attention that can't be opened; and why it can't."""
    modules = dict(model.named_modules())
    units, shut = [], []
    for unit in anatomy.units:
        module = modules.get(unit.module)
        if unit.kind == ATTENTION and isinstance(module, nn.MultiheadAttention):
            shut.append("laws of fused attention: nn.MultiheadAttention is judged as a whole")
        elif unit.kind == ATTENTION and module is not None and decomposed_config(module) is not None:
            kernel = getattr(getattr(module, "config", None), "_attn_implementation", "")
            shut.append(f"laws of fused attention: the kernel {kernel} can only be judged as a whole")
        else:
            units.append(unit)
    return replace(anatomy, units=tuple(units)), shut
