"""Compares checkpoints with a baseline during training: the original method notes' name for the gate.

A baseline in the notes' own shape holds degradations alone. An operator fails where noise in it costs more than 1.2
times the baseline's degradation and the interval lies above the baseline's: near a baseline of 0 every number is 1.2
times as large, so there the interval decides. The largest cost fails where its interval lies above the limit. What the
interval leaves open is undecided. The baseline's own uncertainty is not known, so these intervals count the
checkpoint's alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from noisescope.api.gates import gate
from noisescope.compat.diagnostic.adapter import (
    Row,
    batches_of,
    diagnosis_in,
    full_report,
    loss_of,
    notes_name,
    subject_of,
)
from noisescope.compat.diagnostic.levels import operator_level_diagnosis
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, percent
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, Verdict, overall
from noisescope.jsonform import from_json, to_json
from noisescope.model.loading import Subject
from noisescope.plans.gate_rows import DivergenceRow, GateRow, LimitRow, ScoreRow
from noisescope.reports.palette import on_paper
from noisescope.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def baseline_degradations(report: Mapping[str, Any]) -> dict[str, float | None]:
    """{operator: degradation} of a report in the notes' shape."""
    rows = report.get("operator_analysis")
    if not isinstance(rows, Mapping) or not rows:
        came = ", ".join(map(str, report)) or "nothing"
        raise InvalidInput(
            "a baseline must be a report from IntegratedDiagnostic or noisescope, or a dictionary with "
            f"operator_analysis ({{operator: {{'degradation': 0.08}}}}); got {came}"
        )
    without = [str(name) for name, row in rows.items() if not isinstance(row, Mapping) or "degradation" not in row]
    if without:
        raise InvalidInput(f"operator_analysis of the baseline has no degradation for {', '.join(without)}")
    return {str(name): loss_of(row) for name, row in rows.items()}


def compared(
    model: Subject | nn.Module,
    test_data: Any,
    baseline: Mapping[str, float | None],
    *,
    limit: float,
    worse_than: float = LIMITS["gate_worse_than_baseline"],
    **more: Any,
) -> Row:
    """The verdict on a model: operators of the baseline measured again, each compared, and the largest cost."""
    rows = operator_level_diagnosis(model, test_data, operators=baseline, **more)
    limits = [
        {"operator": name, "degradation": row["degradation_interval"], "verdict": _within(row, limit)}
        for name, row in rows.items()
        if row["degradation_interval"] is not None
    ]
    verdicts = {name: _against(rows[name], baseline[name], worse_than) for name in baseline if name in rows}
    costs = [row["degradation"] for row in rows.values() if row["degradation"] is not None]
    over = [row["operator"] for row in limits if row["verdict"] == FAIL]
    failed = [(name, f"more than {worse_than:g} times the baseline's") for name in verdicts if verdicts[name] == FAIL]
    failed += [(name, f"above the limit of {percent(limit)}") for name in over]
    warnings = [_loss_warning(name, rows[name], baseline[name], why) for name, why in failed]
    return {
        "verdict": overall([*verdicts.values(), *(row["verdict"] for row in limits)]),
        "max_degradation": max(costs, default=None),
        "warnings": warnings,
        "limits": limits,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _against(row: Row, baseline: float | None, worse_than: float) -> Verdict:
    cost, interval = row["degradation"], row["degradation_interval"]
    if cost is None or baseline is None:
        return UNDECIDED
    if cost > worse_than * baseline and interval["low"] > baseline:
        return FAIL
    return PASS if interval["high"] <= max(worse_than * baseline, 0.0) else UNDECIDED


def _within(row: Row, limit: float) -> Verdict:
    interval = row["degradation_interval"]
    if interval["value"] is None:
        return UNDECIDED
    return FAIL if interval["low"] > limit else PASS if interval["high"] <= limit else UNDECIDED


def _loss_warning(name: str, row: Row, baseline: float | None, why: str) -> Row:
    message = f"noise in {name} costs {percent(row['degradation'])} of the accuracy, {why}"
    return _warning(name, baseline, row["degradation"], message)


def _warning(operator: str | None, baseline: float | None, current: float | None, message: str) -> Row:
    """A failed check in the notes' shape."""
    found = {"operator": operator, "baseline": baseline, "current": current}
    return {**found, "severity": "WARNING", "message": message}


class RobustnessMonitor:
    """Whether checkpoints are as robust to noise as a baseline was.

        monitor = RobustnessMonitor(diagnostic.generate_report())
        result = monitor.check_checkpoint(model, test_data, checkpoint_step=1000)
        result["pass"], result["max_degradation"], result["warnings"]
        monitor.plot_robustness_trend().savefig("trend.png")

    The baseline is the report of `IntegratedDiagnostic` or noisescope's own, or the path of one. Each check is
    `noisescope gate`: decided with intervals, and by the divergence of the outputs first, which shows a change long
    before the accuracy does. A baseline that holds the notes' `operator_analysis` and no more (a degradation per
    operator) is checked by the notes' rule, the accuracy alone.
    """

    def __init__(
        self, baseline_report: Mapping[str, Any] | str | Path, max_degradation: float = LIMITS["gate_degradation"]
    ) -> None:
        self.baseline = full_report(baseline_report)
        self.max_degradation = max_degradation
        self.history: list[Row] = []
        self._degradations = None if "schema_version" in self.baseline else baseline_degradations(self.baseline)

    def check_checkpoint(
        self, model: Subject | nn.Module, test_data: Any, checkpoint_step: int, *, effort: str = "standard", **more: Any
    ) -> Row:
        """{checkpoint_step, pass, max_degradation, warnings, timestamp} and under `full` the gate's own verdict.

        A warning is a check that failed. `pass` is False where one did, and True where none did or none could be
        decided: `verdict` tells these apart. `more` is any keyword of the gate: samples, seeds, max_worse.
        """
        if self._degradations is None:
            if "worse_than" in more:  # the notes give a multiple of the baseline, the gate takes what lies above 1
                more["max_worse"] = more.pop("worse_than") - 1
            result = gate(
                subject_of(model),
                diagnosis_in(self.baseline),
                batches_of(test_data),
                max_degradation=self.max_degradation,
                effort=effort,
                step=checkpoint_step,
                **more,
            )
            found = to_json(result)
            warnings = [_gate_warning(row) for row in result.checks if row.verdict == FAIL]
        else:
            limit = self.max_degradation
            found = compared(model, test_data, self._degradations, limit=limit, effort=effort, **more)
            warnings = found["warnings"]
        row = {
            "checkpoint_step": checkpoint_step,
            "pass": found["verdict"] != FAIL,
            "verdict": found["verdict"],
            "max_degradation": found["max_degradation"],
            "warnings": warnings,
            "timestamp": found["finished"],
            "full": found,
        }
        self.history.append(row)
        return row

    @property
    def alerts(self) -> list[Row]:
        """Failed checks of all checkpoints, the oldest first."""
        return [{"checkpoint_step": row["checkpoint_step"], **one} for row in self.history for one in row["warnings"]]

    def plot_robustness_trend(self) -> Figure:
        """The largest cost of noise, checkpoint by checkpoint, and the limit."""
        if not self.history:
            raise InvalidInput(
                "no checkpoint has been checked yet: call check_checkpoint(model, test_data, step) first"
            )
        from matplotlib.figure import Figure

        found = [(float(row["checkpoint_step"]), _worst(row["full"])) for row in self.history]
        known = [(step, loss, loss.value) for step, loss in found if loss is not None and loss.value is not None]
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.plot([step for step, _, _ in known], [value for _, _, value in known], marker="o")
        for step, loss, value in known:
            low, high = (value if end is None else end for end in (loss.low, loss.high))
            axes.vlines(step, low, high, color=on_paper("text"), linewidth=1)
        axes.axhline(self.max_degradation, color=on_paper("critical"), linestyle="--", label="limit")
        axes.set(xlabel="step", ylabel="share of the clean accuracy", title="Largest accuracy loss under noise")
        axes.legend()
        return figure


def _worst(found: Row) -> Estimate | None:
    losses = [row["degradation"] for row in found["limits"] if row["degradation"]["value"] is not None]
    worst = max(losses, key=lambda loss: float(loss["value"]), default=None)
    return None if worst is None else from_json(Estimate, worst)


def _gate_warning(row: GateRow) -> Row:
    """A failed check of the gate; baseline and current are median nats where it compares."""
    operator, before, now = None, None, None
    if isinstance(row, DivergenceRow):
        operator, before, now = row.operator, row.baseline, row.candidate
    elif isinstance(row, LimitRow):
        operator, before, now = row.operator, row.limit, row.degradation.value
    elif isinstance(row, ScoreRow):
        before = row.limit
    return _warning(operator and notes_name(operator), before, now, f"{row.name}: {row.message}")
