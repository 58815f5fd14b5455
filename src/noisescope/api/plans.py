"""Plans from a report, and their values. No torch here: plan_trials.py carries them out, plan.py is `ns.plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.options.base import takes_options
from noisescope.options.plans import BudgetOptions, PrecisionOptions
from noisescope.plans.fault_tests import FaultTest as FaultTest
from noisescope.plans.fault_tests import FaultTestResult as FaultTestResult
from noisescope.plans.kv_cache import KvCachePlan as KvCachePlan
from noisescope.plans.kv_cache import export_vllm
from noisescope.plans.kv_cache import vllm_command as vllm_command
from noisescope.plans.migration import MigrationSteps as MigrationSteps
from noisescope.plans.precision import Budget, Plan, modules_of, optimal_plan
from noisescope.plans.precision_exports import Export, export_plan, formats_of
from noisescope.plans.precision_results import OVER_PLAN as OVER_PLAN
from noisescope.plans.precision_results import PrecisionPlan as PrecisionPlan
from noisescope.plans.precision_results import coverage_notes, planned_share, predicted_plan, prediction_of
from noisescope.reports.saved_report import Report, diagnosis_of
from noisescope.untrusted_files import FileKind, read_foreign

LATENCIES = FileKind(
    "latency table", "It must be JSON of the form {module: {format: milliseconds}}; '*' for all others"
)


@takes_options(BudgetOptions)
def plan_precision(report: Report | Diagnosis, options: BudgetOptions) -> Plan:
    """A number format for each linear of the blocks, at the least predicted KL that the budget allows."""
    budget = budget_of(options)
    modules = modules_of(diagnosis_of(report), options.formats)
    bits = {name: choice.bits for name, choice in modules[0].choices.items()}
    low, high = min(bits, key=bits.__getitem__), max(bits, key=bits.__getitem__)
    if options.average_bits is not None and not bits[low] <= options.average_bits <= bits[high]:
        raise InvalidInput(
            f"these formats allow averages from {bits[low]:g} ({low}) to {bits[high]:g} bits ({high}), got "
            f"{options.average_bits:g}: change the average, or the formats to choose from"
        )
    return optimal_plan(modules, budget, granularity=options.granularity)


def budget_of(options: BudgetOptions) -> Budget:
    table = _table(options.latency_table)
    return Budget(options.average_bits, options.max_megabytes, options.max_milliseconds, table)


def predict_precision(report: Report | Diagnosis, plan: Plan, *, formats: Iterable[str] | None = None) -> PrecisionPlan:
    """A plan with its prediction, not carried out."""
    found = diagnosis_of(report)
    prediction = prediction_of(found, modules_of(found, formats), plan)
    return predicted_plan(plan, prediction, planned_share=planned_share(found), notes=coverage_notes(found))


def with_formats_of_tool(report: Report | Diagnosis, options: PrecisionOptions) -> PrecisionOptions:
    """Where a plan is for a tool and no formats were chosen, those that the tool has."""
    offered = None if options.export is None or options.formats is not None else formats_of(options.export)
    if offered is None:
        return options
    scored = modules_of(diagnosis_of(report))[0].choices
    return replace(options, formats=tuple(name for name in scored if name in offered))


def export_precision(report: Report | Diagnosis, plan: Plan, options: PrecisionOptions) -> Export:
    """The plan in the words of another tool."""
    return export_plan(plan, str(options.export), modules_of(diagnosis_of(report), options.formats))


def export_kv_cache(plan: KvCachePlan, tool: str) -> Export:
    """The plan in the words of another tool."""
    return export_vllm(plan) if tool == "vllm" else Export(json.dumps(to_json(plan), indent=1) + "\n")


def _table(given: Any) -> Mapping[str, Any]:
    """Milliseconds by module and format, from JSON where a path is given."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    return read_foreign(Path(given), dict[str, dict[str, float]], LATENCIES)
