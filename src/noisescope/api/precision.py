"""Precision plans from a report. No torch here: carrying one out is in planning.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.options.planning import BudgetOptions, PrecisionOptions
from noisescope.options.signatures import asks
from noisescope.plans.coverage import coverage_notes, planned_share
from noisescope.plans.exports import Export, export_plan
from noisescope.plans.precision import Budget, Plan, modules_of, optimal_plan
from noisescope.plans.prediction import prediction_of

NO_MEASUREMENT = {"kl": None, "uniform_kl": None, "seeds_rule_kl": None, "random": {"n": 0, "median_kl": None}}  # yet


@asks(BudgetOptions)
def plan_precision(report: Mapping[str, Any], asked: BudgetOptions) -> Plan:
    """A number format for each linear of the blocks, at the least predicted KL that the budget allows."""
    budget = Budget(asked.average_bits, asked.max_megabytes, asked.max_milliseconds, _table(asked.latency_table))
    return optimal_plan(modules_of(report, asked.formats), budget, granularity=asked.granularity)


def planned(report: Mapping[str, Any], asked: PrecisionOptions) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what `noisescope plan precision` says of it before anything is measured."""
    plan = plan_precision(report, options=asked)
    return plan, {
        **NO_MEASUREMENT,
        **plan.to_dict(),
        "prediction": prediction_of(report, modules_of(report, asked.formats), plan),
        "planned_share": planned_share(report),
        "verified": asked.verify,
        "notes": coverage_notes(report),
    }


def exported(report: Mapping[str, Any], plan: Plan, asked: PrecisionOptions) -> Export:
    """The plan in the words of another tool."""
    return export_plan(plan, str(asked.export), modules_of(report, asked.formats))


def _table(given: Any) -> Mapping[str, Any]:
    """Milliseconds by module and format, from JSON where a path is given."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    try:
        table = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{given} is no latency table: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise InvalidInput(f"{given} must be JSON of the form {{module: {{format: milliseconds}}}}; '*' for all others")
    return table
