"""Whether metrics relate as the original method notes expect, over the layers that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from noisescope import stats
from noisescope.diagnosis import channels
from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.rows import LayerAnalysis, LayerEffect
from noisescope.diagnosis.sections import ChannelAnalysis, ChannelRow, ExpectedCorrelation, HessianTraces
from noisescope.findings import EXPECTED_CORRELATIONS
from noisescope.stats import Correlation


def correlations(
    frame: Frame, found: LayerAnalysis | None, traces: HessianTraces | None, captured: ChannelAnalysis | None
) -> dict[str, ExpectedCorrelation]:
    """Each expected pair. A layer's sensitivity is its injected KL where all layers have one, else the predicted."""
    against, sensitivity = ("", None) if found is None else _sensitivity(found.layers)
    if found is None or sensitivity is None:
        return {}
    rows: dict[str, ExpectedCorrelation] = {}
    if traces is not None and traces.layers:
        values = [traces.layers[str(layer)].trace for layer in range(frame.blocks)]
        rows["hessian_sensitivity"] = _expected("hessian_sensitivity", values, sensitivity, against)
    if captured is not None and captured.per_layer:
        by_layer = _by_layer(frame, captured.per_layer)
        counts = [sum(row.num_outliers for row in rows) for rows in by_layer]
        sparse = [float(np.mean([row.relative_sparsity for row in rows])) for rows in by_layer]
        rows["outliers_sensitivity"] = _expected("outliers_sensitivity", counts, sensitivity, against)
        rows["sparsity_degradation"] = _expected("sparsity_degradation", sparse, sensitivity, against)
        windows = channels.correlate_with_layers(frame, found.windows, captured.per_layer.values())
        rows["outliers_windows"] = ExpectedCorrelation(windows, "degradation of windows", "", "undecided", None, False)
    return rows


def _by_layer(frame: Frame, rows: Mapping[str, ChannelRow]) -> list[list[ChannelRow]]:
    return [[row for row in rows.values() if row.layer == layer] for layer in range(frame.blocks)]


def _sensitivity(layers: Sequence[LayerEffect]) -> tuple[str, list[float] | None]:
    injected = [row.kl.typical.value for row in layers if row.kl is not None and row.kl.typical.value is not None]
    if layers and len(injected) == len(layers):
        return "injected KL", injected
    predicted = [
        row.predicted_kl.typical.value
        for row in layers
        if row.predicted_kl is not None and row.predicted_kl.typical.value is not None
    ]
    return ("predicted KL", predicted) if layers and len(predicted) == len(layers) else ("", None)


def _expected(name: str, values: Sequence[float], sensitivity: Sequence[float], against: str) -> ExpectedCorrelation:
    sign, bound = EXPECTED_CORRELATIONS[name]
    expected = f"r {'above' if sign == '>' else 'below'} {bound}"
    if len(values) < 3:
        nothing = Correlation("pearson", None, None, None, None, len(values), note="fewer than three layers")
        return ExpectedCorrelation(nothing, against, expected, "undecided", None, False)
    found = stats.correlation(values, sensitivity, method="pearson")
    influence = stats.influence(values, sensitivity, method="pearson")
    without = None if influence is None else influence.without
    carried = _beyond(found.value, sign, bound) and not _beyond(without, sign, bound)
    return ExpectedCorrelation(found, against, expected, _held(found, sign, bound), without, carried)


def _beyond(value: float | None, sign: str, bound: float) -> bool:
    return value is not None and (value > bound if sign == ">" else value < bound)


def _held(found: Correlation, sign: str, bound: float) -> Literal["yes", "no", "undecided"]:
    """Decided where the whole interval lies on one side of the limit."""
    if found.low is None or found.high is None:
        return "undecided"
    if found.low > bound or found.high < bound:
        return "yes" if (found.low > bound) == (sign == ">") else "no"
    return "undecided"
