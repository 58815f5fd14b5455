"""A fault as a value: what goes wrong, how much, on which channels, how often and for how long. Does not import torch.

A fault is saved as JSON (`to_dict`), read back (`parsing.fault_from_dict`) and replayed: the same seed gives the same
masks and the same random numbers in the same order of calls, on the same kind of device.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from noisescope.errors import InvalidInput, unknown
from noisescope.jsonform import to_json
from noisescope.sites import OPERATORS

if TYPE_CHECKING:
    from torch import Tensor

    from noisescope.faults.fault_state import Memory
    from noisescope.probe.recorded_call import RecordedCall

RELATIVE_TO = ("max", "std", "mean_abs", "rms", "absolute")
PRODUCTS = ("linear", "matmul", "bmm")


# -- fields with limits: the checks are in their metadata, and turn a value into the one that is kept

Check = Callable[[Any, str], Any]  # (value, what it is called in a message) -> the value, or InvalidInput


def checked(default: Any, check: Check) -> Any:
    """A field of a fault; if its default is None, None is accepted."""
    return field(default=default, metadata={"check": check})


def check_fields(value: Any) -> None:
    """Check every field of a frozen dataclass during construction."""
    for each in dataclasses.fields(value):
        given = getattr(value, each.name)
        if "check" in each.metadata and (given is not None or each.default is not None):
            label = f"{each.name} of {getattr(value, 'family', type(value).__name__)}"
            object.__setattr__(value, each.name, each.metadata["check"](given, label))


def number(default: float | None, *, at_least: float = -math.inf, at_most: float = math.inf) -> Any:
    """A finite number within limits, kept as a float."""
    return checked(default, lambda value, label: float(_within(value, label, at_least, at_most, "a finite number")))


def whole(default: Any = MISSING, *, at_least: int, at_most: float = math.inf) -> Any:
    """An integer within limits."""
    return checked(default, lambda value, label: int(_within(value, label, at_least, at_most, "a whole number")))


def _within(value: Any, label: str, at_least: float, at_most: float, kind: str) -> Any:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) if kind == "a finite number" else float(value).is_integer()):
        raise InvalidInput(f"{label} must be {kind}, got {value!r}")
    if not at_least <= value <= at_most:
        limits = f"at least {at_least:g}" if at_most == math.inf else f"from {at_least:g} to {at_most:g}"
        raise InvalidInput(f"{label} must be {limits}, got {value!r}")
    return value


def choice(default: str, allowed: Iterable[str], **aliases: str) -> Any:
    """One of several words."""

    def check(value: Any, label: str) -> Any:
        value = aliases.get(value, value) if isinstance(value, str) else value
        if value not in allowed:
            raise unknown(label, value, allowed)
        return value

    return checked(default, check)


def precision(default: str, formats: Iterable[str]) -> Any:
    """The name of a format, or a number of mantissa bits."""
    word, bits = choice(default, formats).metadata["check"], whole(at_least=1, at_most=52).metadata["check"]
    return checked(default, lambda value, label: (word if isinstance(value, str) else bits)(value, label))


def flag(default: bool) -> Any:
    """True or false."""

    def check(value: Any, label: str) -> bool:
        if not isinstance(value, bool):
            raise InvalidInput(f"{label} must be true or false, got {value!r}")
        return value

    return checked(default, check)


def indices(value: Any, what: str) -> tuple[int, ...]:
    """Indices of at least 0, sorted and unique; a single number is a list of one."""
    many = [value] if isinstance(value, numbers.Integral) else value
    listed = isinstance(many, Iterable) and not isinstance(many, (str, bytes))
    found = list(many) if listed else []
    if not found or any(isinstance(i, bool) or not isinstance(i, numbers.Integral) or i < 0 for i in found):
        raise InvalidInput(f"{what} must be a list of numbers of at least 0, got {value!r}")
    return tuple(sorted({int(i) for i in found}))


def _channels(value: Any, label: str) -> Channels:
    """Channels as given by a user, a text or a JSON file."""
    if value is None or isinstance(value, Lanes):
        return value
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise InvalidInput(f"a share of channels must be above 0 and at most 1, got {value}")
        return float(value)
    if isinstance(value, dict):
        if not {"period"} <= set(value) <= {"period", "offset"}:
            raise InvalidInput(f'a lane must look like {{"period": 32, "offset": 5}}, got {value!r}')
        return Lanes(**value)
    if isinstance(value, bool):
        raise InvalidInput(
            "channels must be a share such as 0.1, a list of channel numbers, Lanes(32, 5) or None (all)"
        )
    return indices(value, "channels")


CHANNELS = {"check": _channels}  # metadata of a field of channels


@dataclass(frozen=True)
class Lanes:
    """Every `period`-th channel starting at `offset`: what one lane of a unit `period` wide computes."""

    period: int = whole(at_least=1)
    offset: int = whole(0, at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offset >= self.period:
            raise InvalidInput(f"a lane's offset must be below its period {self.period}, got {self.offset}")


Channels = float | tuple[int, ...] | Lanes | None  # a share (Bernoulli, drawn once), a list, a lane, or all


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What every fault has; each family is a subclass that says what is done to an operator's output.

    channels: None (all), a share such as 0.1 (a mask over the last dimension drawn once from the fault's own seed, then
        fixed), channel numbers, or `Lanes`. Sizes such as max |y| are always those of the whole tensor.
    rate: the chance that the fault acts in a call of its operator; 1 is persistent, as broken hardware is.
    start, duration: it acts in forwards start <= i < start + duration, counted from 0 within its scope (a step, or a
        token of a generation); duration None is unlimited. A module called by itself counts as a forward.
    """

    family: ClassVar[str]
    fault_class: ClassVar[str]  # one of localization.verdict.CLASSES
    sized_by: ClassVar[str | None] = "magnitude"  # the field that is the fault's size: `family:SIZE` in text
    operators: ClassVar[tuple[str, ...]] = OPERATORS  # where it makes sense; the first of them where none is named
    places_itself: ClassVar[bool] = False  # `channels` is read by the fault (an inner dimension, a permutation)
    remembers: ClassVar[bool] = False  # it must see every call, also those in which it does not act

    channels: Channels = field(default=None, metadata=CHANNELS)
    rate: float = number(1.0, at_least=0, at_most=1)
    start: int = whole(0, at_least=0)
    duration: int | None = whole(None, at_least=1)
    seed: int = whole(0, at_least=0)

    def __init_subclass__(cls, **about: Any) -> None:
        """Attributes of a family are given beside its bases: `class DeadZone(Fault, family="dead_zone", ...)`."""
        super().__init_subclass__()
        for name, value in about.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def size(self) -> float | None:
        """The fault's size, whatever its family calls it; None if it has none."""
        return None if self.sized_by is None else getattr(self, self.sized_by)

    def resized(self, size: float) -> Self:
        """The same fault with another size."""
        if self.sized_by is None:
            raise InvalidInput(f"{self.family} takes no size, got {size!r}")
        changes: dict[str, Any] = {self.sized_by: size}
        return dataclasses.replace(self, **changes)

    def is_due(self, forward: int) -> bool:
        """Whether the fault may act in this forward (from 0)."""
        return forward >= self.start and (self.duration is None or forward < self.start + self.duration)

    def to_dict(self) -> dict[str, Any]:
        """JSON values only: `fault_from_dict(fault.to_dict()) == fault`."""
        return {"family": self.family, **to_json(self)}

    def act(self, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
        """The faulty output, as a new tensor of y's shape and dtype; y itself is unchanged."""
        from noisescope.faults.effects import act

        return act(self, y, call, memory)
