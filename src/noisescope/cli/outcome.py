"""What a command does with its report: writes it, and says on one screen what matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from noisescope.api.stored import Report


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
    from noisescope.api.words import finding_lines

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
