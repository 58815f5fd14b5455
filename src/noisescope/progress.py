"""How far a long piece of work is: reported by the code that does it, shown by whoever listens.

    with progress.plan(Phase("calibration", 16), Phase("folds", 30, work=60)):
        for batch in progress.track("calibration", batches): ...

A plan is made before the work begins, so that its total never changes. Without a listener nothing happens. A plan
inside another one adds nothing to the outer total; its phases are only named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Phase:
    """A named part of a plan. `work` is that of all its steps, in any unit that the plan's phases share."""

    name: str
    steps: int = 1
    work: float | None = None  # None: as much as it has steps

    @property
    def total(self) -> float:
        return float(self.steps) if self.work is None else self.work


class Listener(Protocol):
    """Whoever shows progress."""

    def planned(self, phases: Sequence[Phase]) -> None: ...
    def begun(self, name: str, steps: int) -> None: ...
    def stepped(self, name: str, work: float | None) -> None: ...
    def advanced(self, share: float) -> None: ...
    def ended(self) -> None: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("noisescope_progress", default=None)
_PLANNED: ContextVar[bool] = ContextVar("noisescope_progress_planned", default=False)


@contextmanager
def shown_by(listener: Listener | None) -> Iterator[None]:
    """Inside, `listener` hears of all progress; None silences it."""
    heard = _LISTENER.set(listener)
    planned = _PLANNED.set(False)
    try:
        yield
    finally:
        _PLANNED.reset(planned)
        _LISTENER.reset(heard)


def heard() -> bool:
    """Whether anybody listens: a plan that takes time to make is made only then."""
    return _LISTENER.get() is not None


@contextmanager
def plan(*phases: Phase) -> Iterator[None]:
    """Inside, the phases are worked through; they make up the whole."""
    listener = _LISTENER.get()
    if listener is None or _PLANNED.get():
        yield
        return
    listener.planned([phase for phase in phases if phase.steps])
    before = _PLANNED.set(True)
    try:
        yield
    finally:
        _PLANNED.reset(before)
        listener.ended()


def begin(name: str, steps: int = 1) -> None:
    """A phase begins, or goes on after another one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.begun(name, steps)


def step(name: str, work: float | None = None) -> None:
    """A step of a phase is done; `work` is its share of the phase, where steps differ."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.stepped(name, work)


def part(share: float) -> None:
    """This share of the step that runs is done: for a step that takes long."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.advanced(share)


def parts(items: Sequence[T]) -> Iterator[T]:
    """The items, each an equal part of the step that runs."""
    for number, item in enumerate(items, 1):
        yield item
        part(number / len(items))


def track(name: str, items: Iterable[T], steps: int | None = None) -> Iterator[T]:
    """The items, each of them a step of the phase."""
    if steps is None:
        items = list(items)
        steps = len(items)
    begin(name, steps)
    for item in items:
        yield item
        step(name)


def duration(seconds: float) -> str:
    """Such as "45 s", "12 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
