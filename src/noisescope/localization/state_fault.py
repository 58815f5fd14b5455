"""What the checks of a model's memory give: faults, how much was compared, and what was not."""

from __future__ import annotations

from dataclasses import dataclass

ADAPTED = ".base_layer"  # what peft puts into the name of a module that it adapts


@dataclass(frozen=True)
class StateFault:
    """Something in a module's memory that is not as it should be; `sure` unless a healthy model may have it."""

    module: str
    words: str
    fault_class: str = "unknown"
    sure: bool = True
    channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Faults of one kind of check, how many things were compared, and what was not, with the reason."""

    faults: tuple[StateFault, ...] = ()
    compared: int = 0
    not_compared: tuple[tuple[str, str], ...] = ()  # (name, reason)
    notes: tuple[str, ...] = ()
