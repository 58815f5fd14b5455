"""New hardware by the names of the original method notes: what to validate first, and what to break on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from noisescope.api.fault_testing import run_fault_tests
from noisescope.diagnostic.asking import Row, batches_of, subject_of
from noisescope.diagnostic.integrated import IntegratedDiagnostic
from noisescope.model import Subject
from noisescope.plans.fault_tests import FaultTest, generate, to_csv
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

    Takes the report of `IntegratedDiagnostic` or noisescope's own. Ids are unique and cells of the CSV are JSON.
    """

    def __init__(self, diagnostic_report: Mapping[str, Any]) -> None:
        self.report = diagnostic_report.get("full", diagnostic_report)

    def generate_test_cases(self) -> list[Row]:
        """[{test_id, component, test_type, parameters, acceptance_criteria}]."""
        return [test.to_dict() for test in generate(self.report)]

    def export_to_csv(self, test_cases: Iterable[Mapping[str, Any]], output_path: str | Path) -> None:
        Path(output_path).write_text(to_csv(FaultTest(**case) for case in test_cases), encoding="utf-8", newline="")

    def run_test_cases(
        self, model: Subject | nn.Module, test_data: Any, test_cases: Iterable[Mapping[str, Any]], **more: Any
    ) -> list[Row]:
        """The cases carried out with the fault simulator, each with its verdict; `more`: samples, max_tokens."""
        tests = [FaultTest(**case) for case in test_cases]
        return run_fault_tests(subject_of(model), tests, batches_of(test_data), **more)
