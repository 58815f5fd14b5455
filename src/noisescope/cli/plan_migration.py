"""`noisescope plan migration REPORT`: what to validate first on new hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from noisescope.cli import common
from noisescope.options.planning import MigrationOptions

if TYPE_CHECKING:
    from noisescope.api.migrating import MigrationSteps

MOST_REASONS = 2


def plan_hardware_migration(asked: MigrationOptions) -> None:
    """Which layers to validate first on new hardware.

    Three priorities with their evidence, precision and validation, and the commands to run next.

    \b
    noisescope plan migration noisescope-demo
    noisescope plan migration out/report.json --device npu -o migration.json
    """
    from noisescope.api.drawing import as_json
    from noisescope.api.migrating import plan_migration

    plan = plan_migration(asked)
    if asked.output is not None:
        common.written(asked.output, as_json(plan))
    if asked.json:
        typer.echo(as_json(plan), nl=False)
        return
    say_plan(plan)


def say_plan(plan: MigrationSteps) -> None:
    from noisescope.api.words import counted

    for priority in plan.priorities:
        typer.echo(f"priority {priority.priority}: {counted(len(priority.evidence), 'place')}. {priority.validation}")
        if priority.priority == 3:
            continue
        for entry in priority.evidence:
            where = f"layer {entry.place}" if isinstance(entry.place, int) else entry.place
            reasons = "; ".join(entry.reasons[:MOST_REASONS])
            typer.echo(f"  {where:<12} {priority.precision[str(entry.place)]:<5} {reasons}")
    typer.echo(f"\nif a comparison fails: {plan.fallback}\n")
    for at, step in enumerate(plan.commands, 1):
        typer.echo(f"{at}. {step.where}\n   {step.command}")
    for note in plan.notes:
        typer.echo(f"note: {note}")
