"""Rows made by hand, for tests of what is concluded from rows."""

from __future__ import annotations

from typing import Any

from noisescope.diagnosis.rows import CellEffect, Divergence, Effect, LayerAnalysis, LayerEffect, WindowEffect, as_row
from noisescope.diagnosis.section_types import ChannelAnalysis, Metrics, PrimaryMetrics, SecondaryMetrics, Sections
from noisescope.findings import band_range, dashboard_risk
from noisescope.stats import Estimate


def nats(value: float) -> Divergence:
    """A divergence known to a fifth."""
    size = Estimate(value, 0.8 * value, 1.2 * value, 100)
    return Divergence(size, size)


def lost(
    loss: float, *, half: float = 0.02, p: float = 0.0, moved: float = 0.1, seen: float = 0.05, **more: Any
) -> Effect:
    """An injected row that loses a share of the accuracy, known to plus or minus `half`."""
    degradation = Estimate(loss, loss - half, loss + half, 100)
    lower, upper = band_range(more.pop("bands", "degradation"), degradation)
    return Effect(
        evidence="injected",
        baseline_acc=0.9,
        noisy_acc=0.9 * (1 - loss),
        degradation=degradation,
        band=lower,
        band_upper=upper,
        p=p,
        p_corrected=p,
        smallest_detectable=seen,
        kl=nats(moved),
        nats=moved,
        sensitivity_score=loss / 0.05,
        **more,
    )


def predicted(moved: float) -> Effect:
    """A row that only the screen knows."""
    return Effect(evidence="predicted", predicted_kl=nats(moved), nats=moved)


def sections(
    *,
    operators: dict[str, Effect] | None = None,
    windows: dict[tuple[int, int], Effect] | None = None,
    layers: dict[int, Effect] | None = None,
    places: dict[str, Effect] | None = None,
    cells: dict[tuple[int, str], Effect] | None = None,
    channels: ChannelAnalysis | None = None,
) -> Sections:
    """A diagnosis's sections from rows by place."""
    found = LayerAnalysis(
        operators=("gemm",),
        window=3,
        step=1,
        windows=tuple(
            as_row(row, WindowEffect, layer_range=f"L{a}-{b}", start_layer=a, end_layer=b, interaction_index=None)
            for (a, b), row in (windows or {}).items()
        ),
        layers=tuple(as_row(row, LayerEffect, layer=layer) for layer, row in (layers or {}).items()),
        places=places or {},
        map=tuple(
            as_row(row, CellEffect, layer=layer, operator=operator) for (layer, operator), row in (cells or {}).items()
        ),
        avalanche_points=(),
        compounding=(),
        prediction_scale=1.0,
        point_rule_avalanches=(),
    )
    nothing = PrimaryMetrics(None, "not measurable", None, "not measurable", None)
    metrics = Metrics(
        primary=nothing,
        secondary=SecondaryMetrics(None, "not measurable", "not measurable", 26.0, None, None),
        critical_thresholds={},
        hessian_trace=None,
        fisher=None,
        baseline=None,
        risk=dashboard_risk(None),
    )
    return Sections(
        operator_analysis=operators,
        layer_analysis=found,
        channel_analysis=channels,
        metrics=metrics,
        correlations={},
        format_scores=None,
        gate=None,
    )
