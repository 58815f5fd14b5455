"""`faulty`: makes a model compute wrongly at one site inside a `with` block.

Every scope opened later, and every hook, sees the faulty values, as on a broken device. The fault's own arithmetic is
hidden from all of them.
"""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, NothingInjected
from noisescope.faults import bit_patterns
from noisescope.faults.fault import Fault
from noisescope.faults.fault_state import Memory, Stream, faulty_output
from noisescope.faults.parsing import EVERYWHERE, Where, parse_fault, parse_settings, parse_where
from noisescope.injection import Injection
from noisescope.model.anatomy import Anatomy, Unit, dissect
from noisescope.probe.forward_patching import unwrap
from noisescope.probe.inject import Probe
from noisescope.probe.operator_target import CallListener, StraightThrough
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.tally import SiteCount
from noisescope.sites import Place, Site


def faulty(
    model: nn.Module,
    fault: Fault | str,
    site: Place | Site | Where | None = None,
    *,
    place: Place | None = None,
    operator: str | None = None,
    module: str | None = None,
    occurrence: int | None = None,
    anatomy: Anatomy | None = None,
) -> FaultScope:
    """A scope in which `model` has a fault.

    >>> import torch, noisescope as ns
    >>> model = ns.load("tiny:llama").model
    >>> with ns.faulty(model, "dead_zone:0.3@1") as scope:  # block 1 loses its small outputs
    ...     output = model(torch.arange(8)[None])
    >>> scope.changed > 0  # elements that came out different
    True

    Also as values: `faulty(model, StuckBit(12), 10, operator="linear", module="*down_proj")`.

    `site` is a block's index or an outer place, a text such as "10/linear", a `Where`, or the `Site` of a suspect.
    Leaving raises NothingInjected if the site never ran. A fault that ran and changed nothing is not an error: look at
    `changed`. Gradients pass a fault unchanged.
    """
    if isinstance(fault, str):
        if "@" in fault and (site is not None or place is not None):
            raise InvalidInput(f"the place is given twice: in {fault!r} and as an argument")
        fault, site = parse_fault(fault) if "@" in fault else (parse_settings(fault), site)
    if not isinstance(fault, Fault):
        raise InvalidInput(
            f"a fault must be a value such as DeadZone(0.3) or a text such as 'dead_zone:0.3', got {fault!r}"
        )
    if (site is None) == (place is None):
        raise InvalidInput(
            "give the place of the fault exactly once: faulty(model, fault, 10) or faulty(model, fault, place=10)"
        )
    where = _where(place if site is None else site)
    for name, value in (("operator", operator), ("module", module), ("occurrence", occurrence)):
        if value is not None and getattr(where, name) is not None:
            raise InvalidInput(f"the {name} is given twice: {value!r}, and in {str(where)!r}")
    where = Where(
        where.place,
        operator or where.operator,
        module or where.module,
        where.occurrence if occurrence is None else occurrence,
    )
    return FaultScope(model, fault, where.of(fault), anatomy=anatomy)


def _where(site: Place | Site | Where | None) -> Where:
    if isinstance(site, Where):
        return site
    if isinstance(site, Site):
        return Where(site.place, site.operator, site.module)
    return parse_where(site) if isinstance(site, str) else Where(site)  # type: ignore[arg-type]


class FaultScope(Probe):
    """A scope in which one operator computes wrongly."""

    acts_as_device = True  # scopes opened later see what this one did

    def __init__(self, model: nn.Module, fault: Fault, where: Where, *, anatomy: Anatomy | None = None) -> None:
        anatomy = anatomy or dissect(unwrap(model))
        self.fault = fault
        self.where = where
        self.stream = Stream(fault)
        self.calls = 0  # calls of the site, and those in which the fault acted
        self.acted = 0
        self._changed: dict[torch.device, Tensor] = {}
        super().__init__(model, _selection(fault, where, anatomy), anatomy=anatomy)

    def __enter__(self) -> FaultScope:  # type: ignore[override]
        self._open()
        return self

    @property
    def changed(self) -> int:
        """Output elements that differ in any bit from the correct ones, so far. Reading it synchronises the device."""
        return sum(int(count) for count in self._changed.values())

    def note(self, before: Tensor, after: Tensor) -> None:
        """Count the changes on the device, without synchronising."""
        count = bit_patterns.differ(before, after).sum()
        known = self._changed.get(count.device)
        self._changed[count.device] = count if known is None else known + count

    def target_at(self, unit: Unit, operator: str) -> CallListener | None:
        if operator not in self.fault.operators or not self.injection.selects(unit.site(operator)):
            return None
        memories: dict[int, Memory] = {}  # of this operator of this unit, by occurrence
        on_call = functools.partial(self._on_call, self.count_of(unit, operator), memories)
        return CallListener(unit, operator, on_call, rerun=self.rerun, recomputed=True, repeated=True)

    def _on_call(self, count: SiteCount, memories: dict[int, Memory], call: RecordedCall) -> Any:
        """Return the faulty output in place of the correct one."""
        if self.where.occurrence not in (None, call.occurrence):
            return None
        y = call.output
        if isinstance(y, tuple) and y and isinstance(y[0], Tensor):  # a block's hidden states come first
            return (self._replaced(count, memories, call, y[0]), *y[1:])
        if not isinstance(y, Tensor) or not y.is_floating_point():
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise InvalidInput(
                f"{call.unit.site(call.operator)} returned {kind}, but faults apply only to floating-point tensors"
            )
        return self._replaced(count, memories, call, y)

    def _replaced(self, count: SiteCount, memories: dict[int, Memory], call: RecordedCall, y: Tensor) -> Tensor:
        if not call.context.recomputing:
            self.calls += 1
            count.forward += 1
        acts = self.fault.is_due(call.context.rows.number - 1) and self.stream.acts()
        if y.numel() == 0 or not (acts or self.fault.remembers):
            return y
        memory = memories.setdefault(call.occurrence, Memory(self.stream))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = faulty_output(self.fault, y.detach(), call, memory)
            if not acts:
                return y
            self.acted += 1
            self.note(y.detach(), new)
        if y.requires_grad and torch.is_grad_enabled():
            return StraightThrough.apply(y, lambda _: new)  # type: ignore[no-untyped-call,no-any-return]
        return new

    def check(self) -> None:
        if self.forwards and not self.calls and self.where.occurrence is not None:
            raise NothingInjected(
                f"{self.fault.family} was set for call {self.where.occurrence} of {self.where.operator} within its "
                f"module, but no module made that many calls in {self.forwards} forward(s); calls are numbered from 0"
            )
        super().check()
        if not any(self.fault.is_due(forward) for forward in range(self.forwards)):
            raise NothingInjected(
                f"{self.fault.family} was set to start at forward {self.fault.start} (counted from 0), but only "
                f"{self.forwards} ran: nothing was injected"
            )


def _selection(fault: Fault, where: Where, anatomy: Anatomy) -> Injection:
    """What the probe should select; a module's last name suffices if no full name matches."""
    module = where.module
    if module is not None and not fnmatch.filter([unit.module for unit in anatomy.units], module):
        module = f"*.{module}"
    return Injection(
        lambda y, draw: y,  # an injection wants a perturbation; a fault works on whole calls instead
        operators=None if where.operator is None else frozenset({where.operator}),
        layers=frozenset({where.place}) if isinstance(where.place, int) else None,
        places=frozenset({where.place}) if isinstance(where.place, str) and where.place != EVERYWHERE else None,
        modules=None if module is None else (module,),
        phases=frozenset({"forward"}),
        seed=fault.seed,
    )
