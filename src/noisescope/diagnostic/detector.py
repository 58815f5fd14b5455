"""The outlier detector of the original method notes: channels far larger than the rest, on calibration data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisescope.api.smoothing import smooth_outliers
from noisescope.diagnosis import channels
from noisescope.diagnosis.frame import Array, Frame
from noisescope.diagnostic.activations import ActivationCapture
from noisescope.diagnostic.asking import Question, Row, ask, batches_of, subject_of
from noisescope.diagnostic.outliers import outlier_row, site_label
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.findings import LIMITS
from noisescope.model import Subject
from noisescope.quantisation.smoothing import Smoothed
from noisescope.sites import Site
from noisescope.trials import Result, Results, Trial


class ChannelOutlierDetector:
    """Outlier channels of every linear and of the residual stream, on calibration data.

        detector = ChannelOutlierDetector(model, calibration_data)
        detector.collect_statistics()
        detector.get_report()["summary"], detector.outlier_channels

    To run the model yourself, call it between register_hooks() and remove_hooks(): then linears alone are watched.
    """

    def __init__(
        self,
        model: Subject | nn.Module,
        calibration_data: Any,
        quantile_threshold: float = LIMITS["outlier_channel_ratio"],
    ) -> None:
        self.subject = subject_of(model)
        self.calibration_data = calibration_data
        self.quantile_threshold = quantile_threshold
        self._capture = ActivationCapture(self.subject, "", keep_activations=False)
        self._rows: dict[str, Row] | None = None
        self._columns: dict[str, dict[str, Array]] = {}

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    def collect_statistics(self, *, samples: int = 1000, **more: Any) -> None:
        """Run at most `samples` of the calibration data through the model, padding left out."""
        found = ask(
            self.subject,
            self.calibration_data,
            _CAPTURE,
            levels=("channel",),
            samples=samples,
            calibration_samples=samples,
            **more,
        )
        self._columns = {name: columns for name, (_, columns) in found.items()}
        self._rows = {
            name: {**facts, **outlier_row(name, columns, self.quantile_threshold)}
            for name, (facts, columns) in found.items()
        }

    def register_hooks(self) -> None:
        """Begin to watch the linears."""
        self._capture.register_hooks()

    def remove_hooks(self) -> None:
        """Leave the model as it was, and look at what was seen."""
        self._capture.remove_hooks()
        if self._capture.statistics:
            self._columns = {name: columns for name, (_, columns) in self._capture.columns().items()}
            self._rows = self._capture.rows(self.quantile_threshold)

    @property
    def activation_stats(self) -> dict[str, dict[str, list[Tensor]]]:
        """max, mean, std and q99 of |x| in each channel [C], by module; lists of one, for all batches."""
        return {name: _of_sizes(columns) for name, columns in self._columns.items()}

    @property
    def outlier_channels(self) -> dict[str, Row]:
        """Modules that have outliers; {} before anything was collected."""
        return {name: row for name, row in (self._rows or {}).items() if row["num_outliers"]}

    def get_report(self) -> Row:
        """{"summary": counts, "per_layer": outlier_channels}."""
        if self._rows is None:
            raise InvalidInput("no statistics yet: call collect_statistics() first")
        summary = {
            "layers_with_outliers": len(self.outlier_channels),
            "total_outlier_channels": sum(row["num_outliers"] for row in self._rows.values()),
            "total_channels": sum(row["total_channels"] for row in self._rows.values()),
        }
        return {"summary": summary, "per_layer": self.outlier_channels}

    def apply_smoothquant_scaling(self, alpha: float = 0.5) -> Smoothed:
        """A copy of the model, smoothed where outliers are made and where they are read: in the block after."""
        self.get_report()  # asks for statistics where there are none
        made = {row["layer"] for row in self.outlier_channels.values() if isinstance(row["layer"], int)}
        if not made:
            raise InvalidInput(
                f"no channel is {self.quantile_threshold:g} times the median: there is nothing to smooth"
            )
        places = frozenset(made | {layer + 1 for layer in made})
        return smooth_outliers(self.subject, batches_of(self.calibration_data), alpha=alpha, places=places)


def _of_sizes(columns: dict[str, Array]) -> dict[str, list[Tensor]]:
    """Statistics of |x|; its variance is E x^2 - (E |x|)^2."""
    square = columns["std"] ** 2 + columns["mean"] ** 2
    spread = np.sqrt(np.maximum(square - columns["mean_abs"] ** 2, 0.0))
    found = {"max": columns["max"], "mean": columns["mean_abs"], "std": spread, "q99": columns["q99"]}
    return {name: [torch.from_numpy(column.copy())] for name, column in found.items()}


def _propose_capture(frame: Frame, results: Results) -> list[Trial]:
    trial = channels.capture_trial(frame)
    assert trial is not None  # the level asked for is "channel"
    return [trial]


def _captured(frame: Frame, results: Results) -> dict[str, tuple[Row, dict[str, Array]]]:
    """Facts and statistics [C] of every module captured."""
    result: Result = results[_propose_capture(frame, results)[0].id]
    if result.failed:
        raise NoisescopeError(f"the capture failed: {result.error}")
    facts = result.facts["sites"]
    ends = np.cumsum([entry["channels"] for entry in facts])[:-1]
    columns = {name: np.split(array.astype(np.float64), ends) for name, array in result.arrays.items()}
    found = {}
    for i, entry in enumerate(facts):
        site = Site(entry["operator"], entry["place"], entry["module"], occurrence=entry["occurrence"])
        about = {"layer": site.place, "operator": site.operator}
        found[site_label(site)] = (about, {name: parts[i] for name, parts in columns.items()})
    return found


_CAPTURE = Question(_propose_capture, _captured)
