"""New hardware by the names of the original method notes: what to validate first, and what to break on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from noisescope.api.fault_testing import run_fault_tests
from noisescope.diagnostic.asking import (
    Row,
    batches_of,
    diagnosis_in,
    ends_of,
    full_report,
    layer_of,
    our_name,
    subject_of,
)
from noisescope.diagnostic.integrated import IntegratedDiagnostic
from noisescope.errors import InvalidInput
from noisescope.findings import percent
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.plans.fault_tests import WeakChannels, WeakOperator, WeakPoints, WeakWindow, tests_for, weak_points
from noisescope.plans.fault_values import from_columns, to_csv
from noisescope.plans.migration import plan_migration


def plan_hardware_migration(
    model: Subject | nn.Module, test_data: Any = None, calibration_data: Any = None, **more: Any
) -> Row:
    """Layers in three priorities, ranked by the evidence of a diagnosis made here: {priority_1_layers, ...}.

    `recommendations` has precision, validation and fallback in words; `full` is noisescope's own plan, with the
    evidence for each layer and the commands to run next. `more` is any keyword of `noisescope.diagnose`.
    """
    diagnostic = IntegratedDiagnostic(model, test_data, calibration_data)
    diagnostic.run_full_diagnosis(**more)
    assert diagnostic.full_report is not None
    plan = plan_migration(diagnostic.full_report.diagnosis)
    first, second, third = plan.priorities
    precision = {**first.precision, **second.precision}
    return {
        **{f"priority_{entry.priority}_layers": list(entry.layers) for entry in plan.priorities},
        "recommendations": {
            "precision": ", ".join(f"{place}: {bits}" for place, bits in precision.items())
            or f"all layers: {next(iter(third.precision.values()))}",
            "validation": f"priority 1: {first.validation}; priority 2: {second.validation}",
            "fallback": plan.fallback,
        },
        "full": to_json(plan),
    }


class FaultInjectionTestGenerator:
    """Fault tests for a hardware team from a diagnostic report: operators, avalanche points, outlier channels.

    Takes the report of `IntegratedDiagnostic`, noisescope's own, the path of one, or a dictionary with what the notes'
    report holds and no more. Ids are unique and cells of the CSV are JSON.
    """

    def __init__(self, diagnostic_report: Mapping[str, Any] | str | Path) -> None:
        self.report = full_report(diagnostic_report)
        own = "schema_version" in self.report
        self.weak_points = weak_points(diagnosis_in(self.report)) if own else _from_notes(self.report)

    def generate_test_cases(self) -> list[Row]:
        """[{test_id, component, test_type, parameters, acceptance_criteria}]."""
        return [test.to_dict() for test in tests_for(self.weak_points)]

    def export_to_csv(self, test_cases: Iterable[Mapping[str, Any]], output_path: str | Path) -> None:
        """Write the cases as CSV; the folder is made where there is none."""
        text = to_csv(map(from_columns, test_cases))
        Path(output_path).parent.mkdir(parents=True, exist_ok=True)
        Path(output_path).write_text(text, encoding="utf-8", newline="")

    def run_test_cases(
        self, model: Subject | nn.Module, test_data: Any, test_cases: Iterable[Mapping[str, Any]], **more: Any
    ) -> list[Row]:
        """The cases carried out with the fault simulator, each with its verdict; `more`: samples, max_tokens."""
        tests = list(map(from_columns, test_cases))
        results = run_fault_tests(subject_of(model), tests, batches_of(test_data), **more)
        return [to_json(result) for result in results]


def _from_notes(report: Mapping[str, Any]) -> WeakPoints:
    """What the notes' report warns of, with noisescope's names and places."""
    summary, channels = report.get("executive_summary"), report.get("channel_analysis") or {}
    if not isinstance(summary, Mapping):
        raise InvalidInput("fault tests are made from a diagnosis, and this report has no executive_summary")
    windows = []
    for point in summary.get("avalanche_points", ()):
        start, end = ends_of(str(point.get("layer_range")))
        windows.append(WeakWindow(start, end, f"avalanche point, {percent(point['degradation'])} lost"))
    rows = [_weak_channels(name, row) for name, row in channels.get("per_layer", {}).items()]
    return WeakPoints(
        tuple(WeakOperator(our_name(name), "critical in the report") for name in summary.get("critical_operators", ())),
        tuple(windows),
        tuple(sorted((row for row in rows if row.channels), key=lambda row: -row.max_ratio)),
    )


def _weak_channels(name: str, row: Mapping[str, Any]) -> WeakChannels:
    layer = layer_of(name)
    if layer is None:
        raise InvalidInput(
            f"the report names {name!r}, which is not a module of a layer such as model.layers.9.mlp.down_proj"
        )
    return WeakChannels(name, layer, "linear", name, 0, tuple(row["outlier_indices"]), float(row["max_ratio"]))
