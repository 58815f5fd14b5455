"""New hardware by the names of the original method notes: what to validate first, and what to break on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from noisescope.api.fault_testing import run_fault_tests
from noisescope.diagnostic.asking import Row, batches_of, ends_of, full_report, layer_of, our_name, subject_of
from noisescope.diagnostic.integrated import IntegratedDiagnostic
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.plans.fault_tests import from_columns, generate, to_csv
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
    plan = plan_migration(diagnostic.full_report)
    first, second, third = plan["priorities"]
    return {
        **{f"priority_{entry['priority']}_layers": entry["layers"] for entry in plan["priorities"]},
        "recommendations": {
            "precision": ", ".join(
                f"{place}: {bits}" for place, bits in {**first["precision"], **second["precision"]}.items()
            )
            or f"all layers: {next(iter(third['precision'].values()))}",
            "validation": f"priority 1: {first['validation']}; priority 2: {second['validation']}",
            "fallback": plan["fallback"],
        },
        "full": plan,
    }


class FaultInjectionTestGenerator:
    """Fault tests for a hardware team from a diagnostic report: operators, avalanche points, outlier channels.

    Takes the report of `IntegratedDiagnostic`, noisescope's own, the path of one, or a dictionary with what the notes'
    report holds and no more. Ids are unique and cells of the CSV are JSON.
    """

    def __init__(self, diagnostic_report: Mapping[str, Any] | str | Path) -> None:
        report = full_report(diagnostic_report)
        self.report = report if "schema_version" in report else _from_notes(report)

    def generate_test_cases(self) -> list[Row]:
        """[{test_id, component, test_type, parameters, acceptance_criteria}]."""
        return [test.to_dict() for test in generate(self.report)]

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
        return run_fault_tests(subject_of(model), tests, batches_of(test_data), **more)


def _from_notes(report: Mapping[str, Any]) -> Row:
    """The parts of the notes' report that tests are made from, with noisescope's names and places."""
    summary, channels = report.get("executive_summary"), report.get("channel_analysis") or {}
    if not isinstance(summary, Mapping):
        raise InvalidInput("fault tests are made from a diagnosis, and this report has no executive_summary")
    points = []
    for point in summary.get("avalanche_points", ()):
        start, end = ends_of(str(point.get("layer_range")))
        points.append({"start": start, "end": end, "degradation": point["degradation"]})
    modules = {}
    for name, row in channels.get("per_layer", {}).items():
        layer = layer_of(name)
        if layer is None:
            raise InvalidInput(
                f"the report names {name!r}, which is not a module of a layer such as model.layers.9.mlp.down_proj"
            )
        modules[name] = {"layer": layer, "operator": "linear", **row}
    return {
        "executive_summary": {
            "critical_operators": list(map(our_name, summary.get("critical_operators", ()))),
            "avalanche_points": points,
        },
        "operator_analysis": {our_name(name): row for name, row in (report.get("operator_analysis") or {}).items()},
        "channel_analysis": {"per_layer": modules},
    }
