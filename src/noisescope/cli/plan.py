"""`noisescope plan WHAT REPORT`: what to do about a report's findings, tried out on the model where that tells more."""

from __future__ import annotations

import typer

from noisescope.cli.plan_fault_tests import plan_fault_tests
from noisescope.cli.plan_migration import plan_hardware_migration
from noisescope.cli.plan_precision import plan_precision
from noisescope.cli.plan_smoothquant import plan_smoothquant

plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What to do about a report's findings.")
plan.command("precision")(plan_precision)
plan.command("smoothquant")(plan_smoothquant)
plan.command("migration")(plan_hardware_migration)
plan.command("fault-tests")(plan_fault_tests)
