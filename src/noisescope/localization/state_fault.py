"""Results of the checks of a model's memory: faults, how much was compared, and what was not."""

from __future__ import annotations

from dataclasses import dataclass

ADAPTED = ".base_layer"  # what peft puts into the name of a module that it adapts


@dataclass(frozen=True)
class StateFault:
    """Something wrong in a module's memory; `sure` unless a healthy model may have it."""

    module: str
    words: str
    fault_class: str = "unknown"
    sure: bool = True
    channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Faults of one kind of check, how many items were compared, and which were not, with the reason."""

    faults: tuple[StateFault, ...] = ()
    compared: int = 0
    not_compared: tuple[tuple[str, str], ...] = ()  # (name, reason)
    notes: tuple[str, ...] = ()
    own_code: tuple[str, ...] = ()  # modules of a class that the config does not give
