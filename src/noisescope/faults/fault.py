"""A fault as a value: what goes wrong, how much, on which channels, how often and for how long. No torch here.

A fault is saved as JSON (`to_dict`), read back (`models.fault_from_dict`) and replayed: the same seed gives the same
masks and the same random numbers in the same order of calls, on the same kind of device.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from noisescope.errors import InvalidInput, unknown
from noisescope.sites import OPERATORS

if TYPE_CHECKING:
    from torch import Tensor

    from noisescope.faults.fault_state import Memory
    from noisescope.probe.recorded_call import RecordedCall

RELATIVE_TO = ("max", "std", "mean_abs", "rms", "absolute")
PRODUCTS = ("linear", "matmul", "bmm")


@dataclass(frozen=True)
class Lanes:
    """Every `period`-th channel from `offset` on: what one lane of a unit `period` wide computes."""

    period: int
    offset: int = 0

    def __post_init__(self) -> None:
        whole(self, "period", at_least=1)
        whole(self, "offset", at_least=0)
        if self.offset >= self.period:
            raise InvalidInput(f"a lane's offset is below its period {self.period}, got {self.offset}")


Channels = float | tuple[int, ...] | Lanes | None  # a share (Bernoulli, drawn once), a list, a lane, or all


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What every fault has; each family is a subclass that says what is done to an operator's output.

    channels: None (all), a share such as 0.1 (a mask over the last dimension drawn once from the fault's own seed, then
        fixed), channel numbers, or `Lanes`. Sizes such as max |y| are always those of the whole tensor.
    rate: the chance that the fault acts in a call of its operator; 1 is persistent, as broken hardware is.
    start, duration: it acts in forwards start <= i < start + duration, counted from 0 within its scope (a step, or a
        token of a generation); duration None is for ever. A module called by itself counts as a forward.
    """

    family: ClassVar[str]
    fault_class: ClassVar[str]  # one of locators.verdict.CLASSES
    sized_by: ClassVar[str | None] = "magnitude"  # the field that is the fault's size: `family:SIZE` in text
    operators: ClassVar[tuple[str, ...]] = OPERATORS  # where it makes sense; the first of them where none is named
    places_itself: ClassVar[bool] = False  # `channels` is read by the fault (an inner dimension, a permutation)
    remembers: ClassVar[bool] = False  # it must see every call, also those in which it does not act

    channels: Channels = None
    rate: float = 1.0
    start: int = 0
    duration: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        put(self, "channels", checked_channels(self.channels))
        number(self, "rate", at_least=0, at_most=1)
        whole(self, "start", at_least=0)
        if self.duration is not None:
            whole(self, "duration", at_least=1)
        whole(self, "seed", at_least=0)

    @property
    def size(self) -> float | None:
        """The fault's size, whatever its family calls it; None where it has none."""
        return None if self.sized_by is None else getattr(self, self.sized_by)

    def resized(self, size: float) -> Self:
        """The same fault of another size."""
        if self.sized_by is None:
            raise InvalidInput(f"{self.family} has no size, so it can't be given one: {size!r}")
        changes: dict[str, Any] = {self.sized_by: size}
        return dataclasses.replace(self, **changes)

    def is_due(self, forward: int) -> bool:
        """Whether the fault may act in this forward (from 0)."""
        return forward >= self.start and (self.duration is None or forward < self.start + self.duration)

    def to_dict(self) -> dict[str, Any]:
        """JSON values only: `fault_from_dict(fault.to_dict()) == fault`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.channels, Lanes):
            fields["channels"] = {"period": self.channels.period, "offset": self.channels.offset}
        return {"family": self.family} | {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def act(self, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
        """The faulty output, in a new tensor of y's shape and dtype; y itself stays as it is."""
        from noisescope.faults.effects import act

        return act(self, y, call, memory)


# -- checks of fields


def put(fault: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass that is still being made."""
    object.__setattr__(fault, name, value)


def _label(fault: Any, name: str) -> str:
    return f"{name} of {getattr(fault, 'family', type(fault).__name__)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def number(fault: Any, name: str, *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
    """A field that is a finite number within limits, kept as a float."""
    value: Any = getattr(fault, name)
    if not _is_number(value) or not math.isfinite(value):
        raise InvalidInput(f"{_label(fault, name)} must be a finite number, got {value!r}")
    if not at_least <= value <= at_most:
        limits = f"at least {at_least:g}" if at_most == math.inf else f"from {at_least:g} to {at_most:g}"
        raise InvalidInput(f"{_label(fault, name)} must be {limits}, got {value!r}")
    put(fault, name, float(value))


def whole(fault: Any, name: str, *, at_least: int, at_most: int | None = None) -> None:
    """A field that is a whole number within limits, kept as an int."""
    value: Any = getattr(fault, name)
    if not _is_number(value) or not float(value).is_integer():
        raise InvalidInput(f"{_label(fault, name)} must be a whole number, got {value!r}")
    if value < at_least or (at_most is not None and value > at_most):
        limits = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InvalidInput(f"{_label(fault, name)} must be {limits}, got {value!r}")
    put(fault, name, int(value))


def choice(fault: Any, name: str, allowed: Iterable[str]) -> None:
    """A field that is one of some words."""
    if getattr(fault, name) not in allowed:
        raise unknown(_label(fault, name), getattr(fault, name), allowed)


def truth(fault: Any, name: str) -> None:
    """A field that is true or false."""
    if not isinstance(getattr(fault, name), bool):
        raise InvalidInput(f"{_label(fault, name)} must be true or false, got {getattr(fault, name)!r}")


def indices(value: Any, what: str) -> tuple[int, ...]:
    """Numbers from 0 on, sorted, each once; one bare number is a list of one."""
    many = [value] if isinstance(value, numbers.Integral) else value
    if isinstance(many, (str, bytes)) or not isinstance(many, Iterable):
        raise InvalidInput(f"{what} must be a list of numbers from 0 on, got {value!r}")
    found = list(many)
    if not found or any(isinstance(i, bool) or not isinstance(i, numbers.Integral) or i < 0 for i in found):
        raise InvalidInput(f"{what} must be a list of numbers from 0 on, got {value!r}")
    return tuple(sorted({int(i) for i in found}))


def checked_channels(value: Any) -> Channels:
    """Channels as a user, a text or a JSON file gives them."""
    if value is None or isinstance(value, Lanes):
        return value
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise InvalidInput(f"channels as a share must be above 0 and at most 1, got {value}")
        return float(value)
    if isinstance(value, dict):
        if not {"period"} <= set(value) <= {"period", "offset"}:
            raise InvalidInput(f'a lane is {{"period": 32, "offset": 5}}, got {value!r}')
        return Lanes(**value)
    if isinstance(value, bool):
        raise InvalidInput("channels are a share such as 0.1, a list of channel numbers, Lanes(32, 5) or None (all)")
    return indices(value, "channels")
