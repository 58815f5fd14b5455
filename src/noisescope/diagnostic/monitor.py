"""Checkpoints against a baseline while training goes on, by the original method notes' name for the gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from noisescope.api.guarding import gate
from noisescope.diagnostic.asking import Row, batches_of, full_report, notes_name, subject_of
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS
from noisescope.model import Subject
from noisescope.plans.gate import FAIL, checks
from noisescope.reports.document import Curve
from noisescope.reports.figures import figure_of
from noisescope.reports.trend import trend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RobustnessMonitor:
    """Whether checkpoints stand noise as well as a baseline did.

        monitor = RobustnessMonitor(diagnostic.generate_report())
        result = monitor.check_checkpoint(model, test_data, checkpoint_step=1000)
        result["pass"], result["max_degradation"], result["warnings"]
        monitor.plot_robustness_trend().savefig("trend.png")

    The baseline is the report of `IntegratedDiagnostic` or noisescope's own, or the path of one. Each check is
    `noisescope gate`: decided with intervals, and by the divergence of the outputs first, which shows a change long
    before the accuracy does.
    """

    def __init__(
        self, baseline_report: Mapping[str, Any] | str | Path, max_degradation: float = LIMITS["gate_degradation"]
    ) -> None:
        self.baseline = full_report(baseline_report)
        self.max_degradation = max_degradation
        self.history: list[Row] = []

    def check_checkpoint(
        self, model: Subject | nn.Module, test_data: Any, checkpoint_step: int, *, effort: str = "standard", **more: Any
    ) -> Row:
        """{checkpoint_step, pass, max_degradation, warnings, timestamp} and under `full` the gate's own verdict.

        A warning is a check that failed. `pass` is False where one did, and True where none did or none could be
        decided: `verdict` tells these apart. `more` is any keyword of the gate: samples, seeds, max_worse.
        """
        found = gate(
            subject_of(model),
            self.baseline,
            batches_of(test_data),
            max_degradation=self.max_degradation,
            effort=effort,
            step=checkpoint_step,
            **more,
        )
        result = {
            "checkpoint_step": checkpoint_step,
            "pass": found["verdict"] != FAIL,
            "verdict": found["verdict"],
            "max_degradation": found["max_degradation"],
            "warnings": [_warning(row) for row in checks(found) if row["verdict"] == FAIL],
            "timestamp": found["finished"],
            "full": found,
        }
        self.history.append(result)
        return result

    @property
    def alerts(self) -> list[Row]:
        """Checks of all checkpoints that failed, the oldest first."""
        return [{"checkpoint_step": row["checkpoint_step"], **one} for row in self.history for one in row["warnings"]]

    def plot_robustness_trend(self) -> Figure:
        """What noise costs at its worst, checkpoint by checkpoint, and the limit."""
        if not self.history:
            raise InvalidInput("no checkpoint was checked yet: call check_checkpoint(model, test_data, step) first")
        document = trend([row["full"] for row in self.history])
        curves = [block for section in document.sections for block in section.blocks if isinstance(block, Curve)]
        return figure_of(next(curve for curve in curves if curve.key == "gate-degradation"))


def _warning(row: Row) -> Row:
    """A failed check in the notes' words; baseline and current are median nats where it compares."""
    operator = row.get("operator")
    return {
        "operator": None if operator is None else notes_name(operator),
        "baseline": row.get("baseline", row.get("limit")),
        "current": row.get("candidate", (row.get("degradation") or {}).get("value")),
        "severity": "WARNING",
        "message": f"{row['name']}: {row['message']}",
    }
