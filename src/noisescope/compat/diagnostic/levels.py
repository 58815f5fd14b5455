"""The three levels under the names of the original method notes: operators, sliding windows, thresholds, one report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from noisescope import api
from noisescope.atomic_write import write_file
from noisescope.compat.diagnostic.adapter import (
    Question,
    Row,
    ask,
    batches_of,
    loss_of,
    operator_rows,
    our_name,
    subject_of,
    window_rows,
)
from noisescope.diagnosis import layers, operators, robustness_curve
from noisescope.diagnosis.context import GROUP, StudyContext
from noisescope.errors import InvalidInput, NoisescopeError, NothingInjected
from noisescope.findings import BANDS, LIMITS, NOT_MEASURABLE, Window, avalanche_points, band
from noisescope.jsonform import to_json
from noisescope.model.loading import Subject
from noisescope.reports.saved_report import Report
from noisescope.trials import Results, Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NOTES_OPERATORS = ("matmul", "softmax", "silu", "gelu", "layernorm")


def operator_level_diagnosis(
    model: Subject | nn.Module,
    test_data: Any,
    noise_scale: float = 0.05,
    *,
    operators: Iterable[str] | None = None,
    **more: Any,
) -> dict[str, Row]:
    """The cost of noise in one kind of operation: {operator: {degradation, sensitivity_score, ...}}.

    "matmul" means every matrix product, linears included (noisescope's `gemm`), and "layernorm" every norm. Without
    `operators` they are matmul, softmax, silu, gelu and layernorm, as far as the model has them. A row also has its
    interval (`degradation_interval`), n and the KL divergence; one that failed says why in `error`.
    """
    present = subject_of(model).anatomy.operators()
    wanted = [our_name(name) for name in (NOTES_OPERATORS if operators is None else operators)]
    if operators is None:
        wanted = [name for name in wanted if name == GROUP or name in present]
    found = operator_rows(ask(model, test_data, _OPERATORS, noise_scale=noise_scale, operators=wanted, **more))
    for name in wanted:
        if not any(row["operator"] == name for row in found.values()):
            raise NothingInjected(f"the model computes no {name}: it has {', '.join(sorted(present))}")
    return found


def operator_sensitivity_analysis(
    model: Subject | nn.Module, data: Any, noise_scale: float = 0.05, **more: Any
) -> list[tuple[str, float]]:
    """(operator, accuracy under its noise), the most sensitive operator first.

    One scale for all, unlike the notes' 1e-5 for products and 1e-6 for softmax: with a tenth of the noise softmax would
    look ten times as robust, and in 16 bits neither survives rounding.
    """
    rows = operator_level_diagnosis(model, data, noise_scale, **more)
    for name, row in rows.items():
        if row["noisy_acc"] is None:
            raise NoisescopeError(f"{name} could not be measured: {row.get('error', 'no sample has a finite score')}")
    return sorted(((name, row["noisy_acc"]) for name, row in rows.items()), key=lambda pair: pair[1])


def sliding_window_diagnosis(
    model: Subject | nn.Module,
    test_data: Any,
    window_size: int = 3,
    noise_scale: float = 0.05,
    step_size: int = 1,
    **more: Any,
) -> dict[str, Row]:
    """The cost of noise in the products of adjacent layers: {"L0-2": {start_layer, end_layer, degradation, ...}}.

    A model with fewer blocks than `window_size` has one window.
    """
    rows = ask(model, test_data, _WINDOWS, noise_scale=noise_scale, window=window_size, step=step_size, **more)
    return window_rows(rows)


def identify_avalanche_points(sensitivity_map: Mapping[str, Mapping[str, Any]], threshold: float = 0.15) -> list[Row]:
    """Windows that lose more than `threshold`, and more than 1.5 times as much as adjacent windows.

    Beside means without a common layer. The notes compare with the next window, which overlaps: one hot layer lifts
    them alike, and nothing would ever be found. Overlapping hits are one point, named by the worst.
    """
    labels = {(row["start_layer"], row["end_layer"]): label for label, row in sensitivity_map.items()}
    windows = [Window(*ends, loss_of(sensitivity_map[label])) for ends, label in labels.items()]
    points = avalanche_points(windows, threshold=threshold)
    return [{"layer_range": labels[point.start, point.end], **to_json(point)} for point in points]


def find_critical_threshold(
    model: Subject | nn.Module,
    test_data: Any,
    target_degradation: float = LIMITS["critical_threshold_degradation"],
    *,
    highest: float = 0.20,
    **more: Any,
) -> float | None:
    """The smallest noise on all products that costs `target_degradation` of the accuracy, by bisection.

    Infinity where `highest` does not reach it (the notes would return `highest`); None where nothing can be measured,
    as for a model at chance.
    """
    settings = {"target_degradation": target_degradation, "highest_scale": highest}
    return threshold_value(ask(model, test_data, _THRESHOLD, settings=settings, levels=("operator",), **more))


def threshold_value(row: Mapping[str, Any] | None) -> float | None:
    """A critical threshold as one number: inf if it was not reached, None if it is unknown."""
    if row is None or not row["n"]:
        return None
    return math.inf if row["value"] is None else float(row["value"])


def _propose_windows(context: StudyContext, results: Results) -> list[Trial]:
    noisy = [trial for window in context.windows for trial in context.ask(layers.window_injection(context, window))]
    return context.ask(None) + noisy


_OPERATORS = Question(
    lambda context, results: context.ask(None) + operators.propose(context, results),
    lambda context, results: to_json(operators.conclude(context, results, None)),
)
_WINDOWS = Question(_propose_windows, lambda context, results: to_json(layers.conclude(context, results, None).windows))
_THRESHOLD = Question(
    lambda context, results: context.ask(None) + robustness_curve.propose(context, results),
    lambda context, results: to_json(robustness_curve.conclude(context, results)),
)


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
        channels = full["channel_analysis"] or {}
        outliers = {name: row for name, row in channels.get("per_layer", {}).items() if row["num_outliers"]}
        self.channel_results = {**channels, "per_layer": outliers}
        self.full_report = full

    def generate_report(self) -> dict[str, Any]:
        """executive_summary, operator_analysis, layer_analysis, channel_analysis, recommendations; and under `full`
        noisescope's own report, with every interval and what the run could not see."""
        full = self._full()
        critical = [name for name, row in (self.operator_results or {}).items() if _critical(row)]
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
        """Write the report to OUTPUT_PATH.json and .md, whatever dots the name has; returns the paths."""
        full, name = self._full(), str(output_path)
        for ending in (".json", ".md"):
            name = name.removesuffix(ending)
        numbers = json.dumps(self.generate_report(), indent=1, allow_nan=False) + "\n"
        return [write_file(Path(f"{name}.json"), numbers), write_file(Path(f"{name}.md"), full.to_markdown())]

    def _full(self) -> Report:
        if self.full_report is None:
            raise InvalidInput("nothing to report yet: call run_full_diagnosis() first")
        return self.full_report


def _critical(row: Row) -> bool:
    """Whether an operator, or one of the products that "matmul" includes, is critical."""
    scores = [part["sensitivity_score"] for part in (row, *row.get("parts", {}).values())]
    return any(score is not None and score > LIMITS["critical_operator_score"] for score in scores)


# From harmless to critical, light to dark, so that they differ in grey and for the colour-blind too.
COLOURS = dict(zip(BANDS["window"].names, ("#a6dba0", "#fee391", "#fe9929", "#d7301f", "#7f0000"), strict=True))
COLOURS[NOT_MEASURABLE] = "#bdbdbd"


def plot_sensitivity_heatmap(
    sensitivity_map: Mapping[str, Mapping[str, Any]], window_size: int | None = None
) -> Figure:
    """Accuracy lost in each window, in percent, as a matplotlib Figure: `figure.savefig("windows.png")`.

    It is made without pyplot, so no window opens and nothing is left behind. A window that could not be measured has a
    grey label and no bar.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not sensitivity_map:
        raise InvalidInput("no windows to plot: pass the result of sliding_window_diagnosis")
    ordered = sorted(sensitivity_map.items(), key=lambda pair: pair[1]["start_layer"])
    labels = [label for label, _ in ordered]
    losses = [loss_of(row) for _, row in ordered]
    bands = [band("window", loss) for loss in losses]
    size = window_size or max(row["end_layer"] - row["start_layer"] + 1 for _, row in ordered)

    figure = Figure(figsize=(max(6.0, 0.45 * len(labels)), 4.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(labels)), [100 * (loss or 0.0) for loss in losses], color=[COLOURS[name] for name in bands])
    for position, name in enumerate(bands):
        if name == NOT_MEASURABLE:
            axes.text(position, 0, NOT_MEASURABLE, rotation=90, ha="center", va="bottom", color="#636363", fontsize=8)
    limit = 100 * LIMITS["avalanche_degradation"]
    line = axes.axhline(limit, color="#525252", linestyle="--", linewidth=1, label=f"avalanche level ({limit:g} %)")
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_xlabel("layers with noise")
    axes.set_ylabel("accuracy lost (%)")
    axes.set_title(f"Sensitivity of layers, windows of {size}")
    patches = [Patch(color=colour, label=name.lower()) for name, colour in COLOURS.items() if name in bands]
    axes.legend(handles=[*patches, line], fontsize=8)
    return figure
