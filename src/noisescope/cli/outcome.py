"""What a command does with its report: writes it, and says on one screen what matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def finish(report: Any, output: Path | None, say: Callable[[Any], None], *, as_json: bool) -> None:
    """Writes the report where that was asked for; prints it as JSON, or in words with the paths of its files."""
    paths = [] if output is None else report.save(output)
    if as_json:
        typer.echo(report.to_json(), nl=False)
        return
    say(report)
    for path in paths:
        typer.echo(f"  {path}")


def say_summary(report: Any) -> None:
    """The first screen: risk, top findings, next step, what it cost."""
    say_findings(report)
    say_cost(report)


def say_findings(report: Any) -> None:
    from noisescope.api.words import finding_span

    summary = report["executive_summary"]
    run = report["run"]
    typer.echo(
        f"{run['model']['source']}: {run['model']['architecture']}, {run['model']['blocks']} blocks, {run['device']}"
    )
    data = run["data"]
    note = f" ({data['note']})" if data["note"] else ""
    typer.echo(f"data: {data['source']}, {data['samples']} samples{note}")
    typer.echo(f"\nrisk: {summary['overall_risk_level']} (report score {summary['report_risk']['score']:g})")
    for i, row in enumerate(summary["top_findings"], 1):
        typer.echo(f"{i}. [{row['severity']}] {row['component']}: {row['statement']}{finding_span(row)}")
    if not summary["top_findings"]:
        typer.echo("nothing stands out")
    typer.echo(f"\nnext: {summary['next_step']}")


def say_cost(report: Any) -> None:
    cost = report["run"]["cost"]
    typer.echo(
        f"\n{cost['trials_run_now']} trials run now ({cost['trials']} in the store), "
        f"{cost['forwards']:.1f} forwards of the test data, {cost['seconds']:.1f} s"
    )
