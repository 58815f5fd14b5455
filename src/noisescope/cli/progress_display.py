"""Progress on a terminal as a bar, elsewhere as a line now and then: phases by name, a fixed total, an estimate."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from noisescope.cli.output import BEFORE_PRINTING, say
from noisescope.progress import Phase, duration

SILENT = 3.0  # seconds before the first line: quick commands print none
EVERY = 10.0  # seconds between lines
SURE = 0.02  # share of the work after which its speed is known well enough for an estimate


@dataclass
class PhaseCount:
    """One phase and how far it is."""

    steps: int
    work: float
    done: int = 0
    worked: float = 0.0
    part: float = 0.0  # share of the step that runs

    @property
    def per_step(self) -> float:
        return self.work / self.steps

    @property
    def so_far(self) -> float:
        return min(self.worked + self.part * self.per_step, self.work)

    def add(self, work: float | None) -> None:
        self.done, self.part = min(self.done + 1, self.steps), 0.0
        self.worked = min(self.worked + (self.per_step if work is None else work), self.work)
        if self.done == self.steps:
            self.worked = self.work


@dataclass
class ProgressDisplay:
    """A listener of `noisescope.progress`; `with` it.

    The share that is done never falls: where an adaptive phase ends early, the rest of it counts as done at the end.
    """

    verbose: bool = False
    clock: Callable[[], float] = time.monotonic
    phases: dict[str, PhaseCount] = field(default_factory=dict)
    total: float = 0.0
    name: str = ""
    _most: float = 0.0  # share that was ever shown
    _others: dict[str, PhaseCount] = field(default_factory=dict)  # named outside the plan
    _spoken: bool = False
    _on_terminal: bool = False
    _bar: Any = None
    _task: Any = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._started = self._entered = self._last = self._stepped = self.clock()

    def __enter__(self) -> ProgressDisplay:
        self._on_terminal = sys.stderr.isatty()
        if self._on_terminal:
            BEFORE_PRINTING.append(self._hide)
        else:
            threading.Thread(target=self._tick_on, name="noisescope progress", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._on_terminal:
            self._hide()
            BEFORE_PRINTING.remove(self._hide)

    # -- what the work reports

    def planned(self, phases: Sequence[Phase]) -> None:
        with self._lock:
            self._say_phase()
            self.phases = {phase.name: PhaseCount(phase.steps, phase.total) for phase in phases}
            self.total, self._started, self.name = sum(phase.total for phase in phases), self.clock(), ""
            self._stepped, self._most = self._started, 0.0
            self._draw()

    def begun(self, name: str, steps: int) -> None:
        with self._lock:
            if name != self.name:
                self._say_phase()
                self.name, self._entered = name, self.clock()
            if name not in self.phases:
                self._others[name] = PhaseCount(steps, float(steps))
            self._draw()

    def stepped(self, name: str, work: float | None) -> None:
        with self._lock:
            if name != self.name:
                self.begun(name, 1)
            self._count(name).add(work)
            self._stepped = self.clock()
            self._draw()

    def advanced(self, share: float) -> None:
        with self._lock:
            self._count(self.name).part = share
            self._stepped = self.clock()
            self._draw()

    def ended(self) -> None:
        with self._lock:
            self._say_phase()
            self.phases, self.total, self.name = {}, 0.0, ""
            self._hide()

    # -- what is shown

    @property
    def share(self) -> float | None:
        """Of the plan that is done; None without a plan."""
        if not self.total:
            return None
        self._most = max(self._most, sum(count.so_far for count in self.phases.values()) / self.total)
        return self._most

    @property
    def seconds_left(self) -> float | None:
        """By the speed so far; None as long as that is not known, and where the last step takes longer than it should.

        It falls while a step runs. A step that takes longer than its share leaves what comes after it.
        """
        share = self.share
        if share is None or share < SURE:
            return None
        count, spent = self._count(self.name), self.clock() - self._started
        after = min(share + (1 - count.part) * count.per_step / self.total, 1.0)
        at_last_step = (self._stepped - self._started) / share
        left = max(at_last_step - spent, spent * (1 - after) / after)
        return left if left >= 1 else None

    @property
    def step_text(self) -> str:
        """Such as "operators 4 of 11": the step that is being worked on."""
        count = self._count(self.name)
        return self.name if count.steps < 2 else f"{self.name} {min(count.done + 1, count.steps)} of {count.steps}"

    def line(self) -> str:
        """The state in one line."""
        parts = [] if self.share is None else [f"{100 * self.share:.0f} %"]
        if self.seconds_left is not None:
            parts.append(f"about {duration(self.seconds_left)} left")
        else:
            since = self._started if self.total else self._entered
            parts.append(f"{duration(self.clock() - since)} so far")
        return f"{self.step_text} ({', '.join(parts)})"

    def tick(self) -> None:
        """A line, where it is time for one."""
        with self._lock:
            now = self.clock()
            if self.name and now - self._last >= (EVERY if self._spoken else SILENT):
                self._last, self._spoken = now, True
                say(self.line(), err=True)

    def _tick_on(self) -> None:
        while not self._stop.wait(0.5):
            self.tick()

    def _count(self, name: str) -> PhaseCount:
        return self.phases.get(name) or self._others.setdefault(name, PhaseCount(1, 1.0))

    def _say_phase(self) -> None:
        """With -v a line for each phase that ends, or gives way to another."""
        if self.verbose and self.name:
            count = self._count(self.name)
            steps = "" if count.steps < 2 else f", {count.done} of {count.steps} done"
            say(f"{self.name}: {self.clock() - self._entered:.1f} s{steps}", err=True)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rest]}"))
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=None, rest="")

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self) -> None:
        if not self._on_terminal or not self.name:
            return
        if self._bar is None:
            self._open_bar()
        share = self.share
        rest = "" if share is None else f"{100 * share:.0f} %"
        if self.seconds_left is not None:
            rest += f", about {duration(self.seconds_left)} left"
        total, done = (None, 0.0) if share is None else (1.0, share)
        self._bar.update(self._task, description=self.step_text, total=total, completed=done, rest=rest)
