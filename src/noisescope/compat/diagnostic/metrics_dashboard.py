"""Correlations between metrics, and the metrics dashboard, under the names of the original method notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor, nn

from noisescope import stats
from noisescope.comparison.measures import ErrorSums
from noisescope.compat.diagnostic.adapter import Question, Row, ask, ends_of, layer_of, loss_of, value_of
from noisescope.compat.diagnostic.levels import threshold_value
from noisescope.compat.diagnostic.metrics import check_activations, compute_sparsity
from noisescope.diagnosis import channels, metrics_dashboard
from noisescope.diagnosis.context import StudyContext
from noisescope.errors import InvalidInput
from noisescope.findings import (
    EXPECTED_CORRELATIONS,
    NOT_MEASURABLE,
    Assessment,
    as_expected,
    band,
    hardware_assessment,
)
from noisescope.jsonform import to_json
from noisescope.model.loading import Subject
from noisescope.trials import Results, Trial

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Profile:
    """A window of layers and what noise costs there: its degradation, or where that is not given its score."""

    label: str
    start: int
    end: int
    cost: float | None


def correlate_layer_and_channel_sensitivity(
    sliding_window_results: Rows, outlier_report: Mapping[str, Any]
) -> tuple[list[Row], float | None]:
    """Each window's outlier channels beside its degradation, and Pearson's correlation of the two.

    The correlation is over windows that share no layer, since overlapping ones are no independent points; None where
    fewer than three are left or all are alike. A module belongs to the layer that its row says (`layer`), else to the
    number in its name.
    """
    windows = _windows(sliding_window_results)
    counts = _outliers(windows, outlier_report)
    rows = []
    for window in windows:
        row = sliding_window_results[window.label]
        score, outliers = row.get("sensitivity_score"), counts[window.label]
        found = {"sensitivity_score": score, "total_outliers": outliers, "degradation": loss_of(row)}
        rows.append({"layer_range": window.label, **found})
    return rows, _correlated(windows, counts, "the outlier report")[0]


def validate_metric_correlations(diagnostic_results: Mapping[str, Any]) -> dict[str, Row]:
    """Whether metrics relate as the notes expect: {name: {r, p, n, held, interpretation}}.

    Takes the report of `IntegratedDiagnostic` (its correlations over single layers), or a dict with `layer_results` and
    `channel_results` and perhaps `hessian_traces` and `sparsity` by window ("L0-2"), all in the notes' shape. Sparsity
    is set against degradation, where a negative correlation is expected; against robustness, as in the notes, it would
    be positive.
    """
    if "full" in diagnostic_results:
        known = diagnostic_results["full"]["correlations"]
        found = {name: known[name]["correlation"] for name in EXPECTED_CORRELATIONS if name in known}
        return {name: _judged(name, row["value"], row.get("p"), row["n"]) for name, row in found.items()}
    for part in ("layer_results", "channel_results"):
        if part not in diagnostic_results:
            raise InvalidInput(
                f"{part!r} is missing: pass a report from IntegratedDiagnostic, or a dictionary with layer_results "
                f"and channel_results; got {', '.join(map(str, diagnostic_results)) or 'an empty one'}"
            )
    windows = _windows(diagnostic_results["layer_results"])
    profiles = {
        "hessian_sensitivity": ("hessian_traces", diagnostic_results.get("hessian_traces")),
        "outliers_sensitivity": ("channel_results", _outliers(windows, diagnostic_results["channel_results"])),
        "sparsity_degradation": ("sparsity", diagnostic_results.get("sparsity")),
    }
    return {
        name: _judged(name, *_correlated(windows, profile, source))
        for name, (source, profile) in profiles.items()
        if profile is not None
    }


def _judged(name: str, r: float | None, p: float | None, n: int) -> Row:
    sign, bound = EXPECTED_CORRELATIONS[name]
    held = as_expected(name, r)
    words = {True: "as expected", False: "not as expected", None: "undecided"}[held]
    return {"r": r, "p": p, "n": n, "held": held, "interpretation": f"r {sign} {bound} is expected: {words}"}


def _windows(results: Rows) -> list[Profile]:
    found = []
    for label, row in results.items():
        start, end = (row["start_layer"], row["end_layer"]) if "start_layer" in row else ends_of(label)
        cost = loss_of(row) if "degradation" in row else row.get("sensitivity_score")
        found.append(Profile(label, start, end, cost))
    return sorted(found, key=lambda window: (window.start, window.end))


def _outliers(windows: Sequence[Profile], report: Mapping[str, Any]) -> dict[str, int]:
    """Outlier channels of each window's layers."""
    by_layer: Counter[Any] = Counter()
    for name, info in report["per_layer"].items():
        layer = info["layer"] if "layer" in info else layer_of(name)
        if layer is None:
            raise InvalidInput(
                f"{name} has no `layer` and no number in its name, such as model.layers.9.mlp.down_proj: use the "
                "report of ChannelOutlierDetector or IntegratedDiagnostic"
            )
        by_layer[layer] += info["num_outliers"]
    return {window.label: sum(by_layer[n] for n in range(window.start, window.end + 1)) for window in windows}


def _correlated(
    windows: Sequence[Profile], profile: Mapping[str, float], source: str
) -> tuple[float | None, float | None, int]:
    """Pearson's r, p and n of a profile by window with the cost, over measured windows that share no layer."""
    apart: list[Profile] = []
    for window in windows:
        if window.cost is not None and (not apart or window.start > apart[-1].end):
            apart.append(window)
    missing = [window.label for window in apart if window.label not in profile]
    if missing:
        raise InvalidInput(f"{source} has no value for {', '.join(missing)}: every window needs one")
    if len(apart) < 3:
        return None, None, len(apart)
    costs = [window.cost for window in apart if window.cost is not None]
    found = stats.correlation([profile[window.label] for window in apart], costs, method="pearson")
    return found.value, found.p, found.n


RELATIVE = 0.01  # of the tensor's rms: what counts as near zero behind SiLU and GELU


class MetricsDashboard:
    """Primary, secondary and, with the activations of two devices, hardware metrics.

    `metrics` holds numbers, None where one could not be measured; with intervals and bands they are in
    metrics["full"]. An infinite critical threshold was not reached at the highest noise tried.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Row] = {}

    def compute_all_metrics(
        self,
        model: Subject | nn.Module,
        test_data: Any,
        gpu_activations: Tensor | None = None,
        npu_activations: Tensor | None = None,
        *,
        noise_scale: float = 0.05,
        **more: Any,
    ) -> dict[str, Row]:
        """Measure the model under noise on all its products.

        The SNR is measured at the logits. Sparsity is that of `gpu_activations`, else of all linears on the test data.
        """
        if gpu_activations is None and npu_activations is not None:
            raise InvalidInput("npu_activations need gpu_activations to compare with")
        if gpu_activations is not None:
            check_activations(gpu_activations, gpu_activations if npu_activations is None else npu_activations)
        full = ask(model, test_data, _METRICS, noise_scale=noise_scale, levels=("channel",), **more)
        primary, secondary = full["primary"], full["secondary"]
        found = secondary["activation_sparsity"] or {"absolute": None, "relative": None}
        sparsity, relative_sparsity = found["absolute"], found["relative"]
        if gpu_activations is not None:
            sparsity = compute_sparsity(gpu_activations)
            relative_sparsity = compute_sparsity(gpu_activations, relative=RELATIVE)
        self.metrics = {
            "primary": {
                "relative_degradation": value_of(primary["relative_degradation"]),
                "noise_tolerance_index": value_of(primary["noise_tolerance_index"]),
                "critical_threshold": threshold_value(primary["critical_threshold"]),
            },
            "secondary": {
                "snr_db": value_of(secondary["snr_db"]),
                "gradient_ratio": value_of(secondary["gradient_ratio"]),
                "activation_sparsity": sparsity,
                "relative_sparsity": relative_sparsity,
            },
        }
        if gpu_activations is not None and npu_activations is not None:
            self.metrics["hardware"] = hardware_metrics(gpu_activations, npu_activations)
        self.metrics["dashboard_risk"] = to_json(self._assessment().score)
        self.metrics["full"] = full
        return self.metrics

    def print_dashboard(self, file: TextIO | None = None) -> None:
        """Print the metrics as lines, to stdout if no file is given."""
        primary, secondary = self._known("primary"), self._known("secondary")
        lines = [
            "Primary",
            f"  relative degradation   {_percent(primary['relative_degradation'])}",
            f"  noise tolerance index  {_tolerance(primary)}",
            f"  critical threshold     {_threshold(primary['critical_threshold'], self.metrics['full'])}",
            "Secondary",
            f"  SNR of the logits      {_number(secondary['snr_db'])} dB",
            f"  gradient ratio         {_number(secondary['gradient_ratio'])}",
            f"  activation sparsity    {_percent(secondary['activation_sparsity'])}"
            f" ({_percent(secondary['relative_sparsity'])} below {RELATIVE:.0%} of the rms)",
        ]
        if "hardware" in self.metrics:
            hardware = self.metrics["hardware"]
            lines += [
                "Hardware divergence",
                f"  MAE                    {_number(hardware['mae'])}",
                f"  MAPE                   {_percent(hardware['mape'])}"
                f" ({_percent(hardware['mape_floored'])} where elements near 0 count as a tenth of the rms)",
                f"  correlation            {_number(hardware['correlation'], 6)}",
                f"  largest error          {_number(hardware['max_error'])}"
                f"{' in an outlier channel' if hardware['max_error_in_outlier_channel'] else ''}",
            ]
            if hardware["nonfinite"]:
                lines.append(f"  NaN or infinite        {hardware['nonfinite']} elements, on one device only")
        print("\n".join([*lines, f"Risk: {self.get_risk_assessment()}"]), file=file)

    def get_risk_assessment(self) -> str:
        """The risk level and what it means: the dashboard's score (50, 30 or 10 points by degradation, 30 or 15 by
        MAPE), or where that is higher the worst band of two devices' MAE, MAPE and correlation.

        The score alone stays in metrics["dashboard_risk"].
        """
        return str(self._assessment())

    def _assessment(self) -> Assessment:
        hardware = self.metrics.get("hardware") or {}
        return hardware_assessment(
            self._known("primary")["relative_degradation"],
            mae=hardware.get("mae"),
            mape=_apart(hardware),
            correlation=hardware.get("correlation"),
        )

    def _known(self, part: str) -> Row:
        if not self.metrics:
            raise InvalidInput("no metrics yet: call compute_all_metrics(model, test_data) first")
        return self.metrics[part]


def hardware_metrics(gpu_activations: Tensor, npu_activations: Tensor) -> Row:
    """How far apart two devices are, with the notes' bands, and whether the worst element is in an outlier channel.

    Channels are the last dimension. `mape` is the notes' own formula, which elements near 0 dominate; `mape_floored`
    divides by at least a tenth of the rms.
    """
    check_activations(gpu_activations, npu_activations)
    dtype = str(gpu_activations.dtype).removeprefix("torch.")
    a, b = (x.detach().cpu().double().reshape(1, -1, x.shape[-1]).numpy() for x in (gpu_activations, npu_activations))
    sums = ErrorSums()
    sums.add(0, a, b, dtype)
    sums.add_percent(a, b)
    found = sums.measures()
    return {
        "mae": found.mae,
        "mape": found.mape_notes,
        "mape_floored": found.mape,
        "correlation": found.pearson,
        "max_error": found.max_error,
        "max_error_in_outlier_channel": found.where is not None and found.where.outlier_channel,
        "nonfinite": found.nonfinite,
        "bands": {
            "mae": band("mae", found.mae),
            "mape": band("mape", found.mape_notes),
            "correlation": band("pearson", found.pearson),
        },
    }


def _apart(hardware: Row) -> float | None:
    """MAPE for the risk: infinite if only one device has NaN or infinite numbers, NaN if no number remains."""
    if not hardware or hardware["mape"] is not None:
        return float(hardware["mape"]) if hardware else None
    return math.inf if hardware["nonfinite"] else math.nan


def _number(value: float | None, digits: int = 4) -> str:
    return NOT_MEASURABLE if value is None else f"{value:.{digits}g}"


def _percent(value: float | None) -> str:
    return NOT_MEASURABLE if value is None else f"{100 * value:.2f} %"


def _tolerance(primary: Row) -> str:
    if primary["relative_degradation"] is not None and primary["noise_tolerance_index"] is None:
        return "unbounded (nothing was lost)"
    return _number(primary["noise_tolerance_index"])


def _threshold(value: float | None, full: Row) -> str:
    if value is not None and math.isinf(value):
        return str(full["primary"]["critical_threshold"]["label"])
    return _percent(value)


def _propose(context: StudyContext, results: Results) -> list[Trial]:
    captured = channels.capture_trial(context)
    return (
        context.ask(None) + metrics_dashboard.propose(context, results, None) + ([] if captured is None else [captured])
    )


_METRICS = Question(
    _propose,
    lambda context, results: to_json(
        metrics_dashboard.conclude(context, results, None, channels.conclude(context, results, None))
    ),
)
