"""What to validate first on new hardware, from a stored report. No torch here."""

from __future__ import annotations

from typing import Any

from noisescope.api.stored import load_report
from noisescope.options.planning import MigrationOptions
from noisescope.plans import migration


def plan_migration(asked: MigrationOptions) -> dict[str, Any]:
    """The plan of plans/migration.py, with commands that name the report's path."""
    path = asked.report / "report.json" if asked.report.is_dir() else asked.report
    return migration.plan_migration(load_report(asked.report), path=str(path), device=asked.device)
