"""Progress: a bar with an estimate on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import typer

_EVERY = 10.0  # seconds between plain lines


class Shown:
    """Told of waves and steps by the executor; waves add up to one count, since later ones depend on earlier ones."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0
        self.failed = 0
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()
        self._started = time.monotonic()

    def __enter__(self) -> Shown:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.__enter__()
            self._task = self._bar.add_task("trials", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)

    def wave(self, trials: int) -> None:
        self.total += trials
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def step(self, trial: Any, result: Any, seconds: float) -> None:
        self.done += 1
        self.failed += bool(result.failed)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            spent = self._last - self._started
            left = spent / self.done * (self.total - self.done)
            typer.echo(
                f"{self.done} of {self.total} trials, about {left:.0f} s left of what is known to be needed", err=True
            )
