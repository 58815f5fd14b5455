"""What to validate first on new hardware, from a stored report. No torch here."""

from __future__ import annotations

from noisescope.api.stored import load_report
from noisescope.options.planning import MigrationOptions
from noisescope.plans import migration
from noisescope.plans.migration import MigrationSteps as MigrationSteps


def plan_migration(asked: MigrationOptions) -> MigrationSteps:
    """The plan of plans/migration.py, with commands that name the report's path."""
    path = asked.report / "report.json" if asked.report.is_dir() else asked.report
    return migration.plan_migration(load_report(asked.report).diagnosis, path=str(path), device=asked.device)
