"""`noisescope plan migration REPORT`: what to validate first on new hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.cli.report import load_report

MOST_REASONS = 2


def plan_hardware_migration(
    report: common.ReportPath,
    device: Annotated[
        str, typer.Option("--device", help="The new machine's, for the commands: cuda, npu ...")
    ] = "cuda",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Which layers to validate first on new hardware.

    Three priorities with their evidence, precision and validation, and the commands to run next.

    \b
    noisescope plan migration noisescope-demo
    noisescope plan migration out/report.json --device npu -o migration.json
    """
    from noisescope.plans.migration import plan_migration

    path = report / "report.json" if report.is_dir() else report
    plan = plan_migration(load_report(report), path=str(path), device=device)
    if output is not None:
        common.written(output, json.dumps(plan, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(plan, indent=1))
        return
    say_plan(plan)


def say_plan(plan: dict[str, Any]) -> None:
    from noisescope.plans.words import counted

    for priority in plan["priorities"]:
        entries = priority["evidence"]
        typer.echo(f"priority {priority['priority']}: {counted(len(entries), 'place')}. {priority['validation']}")
        if priority["priority"] == 3:
            continue
        for entry in entries:
            where = f"layer {entry['place']}" if isinstance(entry["place"], int) else entry["place"]
            reasons = "; ".join(entry["reasons"][:MOST_REASONS])
            typer.echo(f"  {where:<12} {priority['precision'][str(entry['place'])]:<5} {reasons}")
    typer.echo(f"\nif a comparison fails: {plan['fallback']}\n")
    for at, step in enumerate(plan["commands"], 1):
        typer.echo(f"{at}. {step['where']}\n   {step['command']}")
    for note in plan["notes"]:
        typer.echo(f"note: {note}")
