"""`noisescope plan WHAT REPORT`: what to do about a report's findings, tried out on the model where that tells more."""

from __future__ import annotations

import typer

from noisescope.cli.building import add_command
from noisescope.cli.plan_fault_tests import plan_fault_tests
from noisescope.cli.plan_migration import plan_hardware_migration
from noisescope.cli.plan_precision import plan_precision
from noisescope.cli.plan_smoothquant import plan_smoothquant
from noisescope.options.planning import FaultTestOptions, MigrationOptions, PrecisionOptions, SmoothquantOptions

plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What to do about a report's findings.")
add_command(plan, PrecisionOptions, plan_precision)
add_command(plan, SmoothquantOptions, plan_smoothquant)
add_command(plan, MigrationOptions, plan_hardware_migration)
add_command(plan, FaultTestOptions, plan_fault_tests)
