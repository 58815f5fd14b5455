"""What a command does with its report: writes it, and says on one screen what matters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from noisescope.api.reports import Report


def finish(report: Any, output: Path | None, say: Callable[[Any], None], *, as_json: bool) -> None:
    """Writes the report where that was asked for; prints it as JSON, or in words with the paths of its files."""
    paths = [] if output is None else report.save(output)
    if as_json:
        typer.echo(report.to_json(), nl=False)
        return
    say(report)
    for path in paths:
        typer.echo(f"  {path}")


def say_summary(report: Report) -> None:
    """The first screen: risk, top findings, next step, what it cost."""
    say_findings(report)
    say_cost(report)


def say_findings(report: Report) -> None:
    from noisescope.api.reports import finding_lines

    found = report.diagnosis
    summary, run = found.executive_summary, found.run
    typer.echo(f"{run.model.source}: {run.model.architecture}, {run.model.blocks} blocks, {run.device}")
    note = f" ({run.data.note})" if run.data.note else ""
    typer.echo(f"data: {run.data.source}, {run.data.samples} samples{note}")
    typer.echo(f"\nrisk: {summary.overall_risk_level} - {summary.risk_meaning}")
    if summary.whole_model is not None:
        typer.echo(finding_lines(summary.whole_model)[0])
    for number, finding in enumerate(summary.top_findings, 1):
        first, *notes = finding_lines(finding)
        typer.echo(f"{number}. {first}")
        for line in notes:
            typer.echo(f"   {line}")
    if not summary.top_findings:
        typer.echo("nothing stands out")
    typer.echo(f"\nnext: {summary.next_step}")


def say_cost(report: Report) -> None:
    cost = report.value.run.cost
    typer.echo(
        f"\n{cost.trials_run_now} trials run now ({cost.trials} in the store), "
        f"{cost.forwards:.1f} forwards of the test data, {cost.seconds:.1f} s"
    )


# Progress: a bar with an estimate on a terminal, plain lines elsewhere.


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
