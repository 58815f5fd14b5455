"""The metrics dashboard of the original method notes: the model in single numbers."""

from __future__ import annotations

import math
from typing import Any, TextIO

from torch import Tensor, nn

from noisescope.comparison.measures import Sums
from noisescope.diagnosis import channels, dashboard
from noisescope.diagnosis.frame import Frame
from noisescope.diagnostic.asking import Question, Row, ask
from noisescope.diagnostic.formulas import check_activations, compute_sparsity
from noisescope.diagnostic.levels import threshold_value
from noisescope.errors import InvalidInput
from noisescope.findings import NOT_MEASURABLE, Assessment, band, hardware_assessment
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.trials import Results, Trial

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
            raise InvalidInput("npu_activations need gpu_activations to be compared with")
        if gpu_activations is not None:
            check_activations(gpu_activations, gpu_activations if npu_activations is None else npu_activations)
        full = ask(model, test_data, _METRICS, noise_scale=noise_scale, levels=("channel",), **more)
        primary, secondary = full["primary"], full["secondary"]
        sparsity = secondary["activation_sparsity"] or {"absolute": None, "relative": None}
        if gpu_activations is not None:
            sparsity = {
                "absolute": compute_sparsity(gpu_activations),
                "relative": compute_sparsity(gpu_activations, relative=RELATIVE),
            }
        self.metrics = {
            "primary": {
                "relative_degradation": _value(primary["relative_degradation"]),
                "noise_tolerance_index": _value(primary["noise_tolerance_index"]),
                "critical_threshold": threshold_value(primary["critical_threshold"]),
            },
            "secondary": {
                "snr_db": _value(secondary["snr_db"]),
                "gradient_ratio": _value(secondary["gradient_ratio"]),
                "activation_sparsity": sparsity["absolute"],
                "relative_sparsity": sparsity["relative"],
            },
        }
        if gpu_activations is not None and npu_activations is not None:
            self.metrics["hardware"] = hardware_metrics(gpu_activations, npu_activations)
        self.metrics["dashboard_risk"] = to_json(self._assessment().score)
        self.metrics["full"] = full
        return self.metrics

    def print_dashboard(self, file: TextIO | None = None) -> None:
        """The numbers as lines, on stdout if no file is given."""
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
    """How far two devices are apart, with the notes' bands, and whether the worst element is in an outlier channel.

    Channels are the last dimension. `mape` is the notes' own formula, which elements near 0 dominate; `mape_floored`
    divides by at least a tenth of the rms.
    """
    check_activations(gpu_activations, npu_activations)
    dtype = str(gpu_activations.dtype).removeprefix("torch.")
    a, b = (x.detach().cpu().double().reshape(1, -1, x.shape[-1]).numpy() for x in (gpu_activations, npu_activations))
    sums = Sums()
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
    """MAPE for the risk: infinite where one device alone has NaN or infinite numbers, NaN where no number is left."""
    if not hardware or hardware["mape"] is not None:
        return float(hardware["mape"]) if hardware else None
    return math.inf if hardware["nonfinite"] else math.nan


def _value(row: Row | None) -> float | None:
    return None if row is None else row["value"]


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


def _propose(frame: Frame, results: Results) -> list[Trial]:
    captured = channels.capture_trial(frame)
    return frame.ask(None) + dashboard.propose(frame, results, None) + ([] if captured is None else [captured])


def _conclude(frame: Frame, results: Results) -> Row:
    found: Row = to_json(dashboard.conclude(frame, results, None, channels.conclude(frame, results, None)))
    return found


_METRICS = Question(_propose, _conclude)
