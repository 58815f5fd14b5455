"""All three levels in one call and one report, in the shape of the original method notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from noisescope import api
from noisescope.diagnostic.asking import Row, batches_of, operator_rows, our_name, subject_of, window_rows
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS
from noisescope.model import Subject
from noisescope.reports.report import Report


class IntegratedDiagnostic:
    """Operators, layers and channels of a model, and what to do about them.

    Without calibration data channels are captured on the test data. Results of the last run are in `operator_results`,
    `layer_results`, `channel_results`, and noisescope's own report in `full_report`.
    """

    def __init__(self, model: Subject | nn.Module, test_data: Any = None, calibration_data: Any = None) -> None:
        self.subject = subject_of(model)
        self.test_data = batches_of(test_data)
        self.calibration_data = batches_of(calibration_data)
        self.operator_results: dict[str, Row] | None = None
        self.layer_results: dict[str, Row] | None = None
        self.channel_results: Row | None = None
        self.full_report: Report | None = None

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    def run_full_diagnosis(
        self, noise_scale: float = 0.05, window_size: int = 3, outlier_threshold: float = 10.0, **more: Any
    ) -> None:
        """Measure. `more` is any keyword of `noisescope.diagnose`: step, samples, seeds, metric, effort, options ..."""
        if more.get("operators") is not None:
            more["operators"] = [our_name(name) for name in more["operators"]]
        full = api.diagnose(
            self.subject,
            self.test_data,
            calibration=self.calibration_data,
            noise_scale=noise_scale,
            window=window_size,
            outlier_threshold=outlier_threshold,
            **more,
        )
        self.operator_results = operator_rows(full["operator_analysis"] or {})
        self.layer_results = window_rows((full["layer_analysis"] or {}).get("windows", ()))
        self.channel_results = _with_outliers(full["channel_analysis"] or {})
        self.full_report = full

    def generate_report(self) -> dict[str, Any]:
        """executive_summary, operator_analysis, layer_analysis, channel_analysis, recommendations; and under `full`
        noisescope's own report, with every interval and what the run could not see."""
        full = self._full()
        assert self.operator_results is not None
        critical = [name for name, row in self.operator_results.items() if _critical(row)]
        return {
            "executive_summary": {
                **full["executive_summary"],
                "critical_operators": critical,
                "num_critical_operators": len(critical),
            },
            "operator_analysis": self.operator_results,
            "layer_analysis": self.layer_results,
            "channel_analysis": self.channel_results,
            "recommendations": full["recommendations"],
            "full": dict(full),
        }

    def save_report(self, output_path: str | Path) -> list[Path]:
        """Write the report to OUTPUT_PATH.json and .md, whatever dots the name has; the paths."""
        full, name = self._full(), str(output_path)
        for ending in (".json", ".md"):
            name = name.removesuffix(ending)
        paths = [Path(f"{name}.json"), Path(f"{name}.md")]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(self.generate_report(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        paths[1].write_text(full.to_markdown(), encoding="utf-8")
        return paths

    def _full(self) -> Report:
        if self.full_report is None:
            raise InvalidInput("there is nothing to report yet: call run_full_diagnosis() first")
        return self.full_report


def _critical(row: Row) -> bool:
    """Whether an operator, or one of the products that "matmul" stands for, is critical."""
    scores = [part["sensitivity_score"] for part in (row, *row.get("parts", {}).values())]
    return any(score is not None and score > LIMITS["critical_operator_score"] for score in scores)


def _with_outliers(section: Row) -> Row:
    """The channel section with only those modules under `per_layer` that have outliers."""
    rows = section.get("per_layer", {})
    return {**section, "per_layer": {name: row for name, row in rows.items() if row["num_outliers"]}}
