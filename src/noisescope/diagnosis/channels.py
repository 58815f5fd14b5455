"""Level 3: channels far larger than the rest, by four rules, and the channels in which noise costs most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.diagnosis.effects import StudyResults
from noisescope.diagnosis.predicted_kl import Screened, site_of
from noisescope.diagnosis.rows import WindowEffect
from noisescope.diagnosis.section_types import (
    ChannelAnalysis,
    ChannelRow,
    CostlyChannel,
    OutlierRules,
    Outliers,
    OutlierSummary,
)
from noisescope.findings import LIMITS, band
from noisescope.injection import Injection
from noisescope.sites import Site, canonical_place
from noisescope.trials import Result, Results, Trial

CONFIRMED = 3  # channels that `standard` confirms by injection; `full` takes more
CONFIRMED_FULL = 12
LISTED = 20  # channels and outliers listed by number; counts are of all
CAPTURED = ("linear", "residual")  # where quantisation meets activations


def capture_trial(context: StudyContext) -> Trial | None:
    if context.calibration is None:
        return None
    where = Injection(context.settings.perturbation, operators=frozenset(CAPTURED), phases=frozenset({"forward"}))
    return Trial(context.conditions, "capture", context.calibration, where)


def propose(context: StudyContext, results: Results, screened: Screened | None) -> list[Trial]:
    capture = capture_trial(context)
    trials = [] if capture is None else [capture]
    if context.settings.effort != "screen":
        count = CONFIRMED_FULL if context.settings.effort == "full" else CONFIRMED
        for site, channel, _ in costliest(screened)[:count]:
            trials += context.ask(channel_injection(context, site, channel))
    return trials


def channel_injection(context: StudyContext, site: Site, channel: int) -> Injection:
    return context.injection(
        operators=frozenset({site.operator}),
        places=frozenset({site.place}),
        modules=(site.module,),
        channels=(channel,),
    )


def costliest(screened: Screened | None) -> list[tuple[Site, int, float]]:
    """(site, channel, predicted KL) of linears inside the blocks, the most expensive first."""
    if screened is None or not screened.channels:
        return []
    found: list[tuple[Site, int, float]] = []
    for site in screened.sites:
        if site.operator == "linear" and isinstance(site.place, int):
            cost = screened.by_channel(site)
            found += [(site, int(channel), float(cost[channel])) for channel in np.argsort(-cost)[:LISTED]]
    return sorted(found, key=lambda entry: -entry[2])[:LISTED]


def conclude(context: StudyContext, results: Results, screened: Screened | None) -> ChannelAnalysis:
    trial = capture_trial(context)
    captured = None if trial is None else results.get(trial.id)
    study = StudyResults(context, results)
    found = ChannelAnalysis(
        evidence="none",
        error="",
        n=0 if trial is None else trial.slice.stop - trial.slice.start,
        threshold=context.settings.outlier_threshold,
        summary=None,
        per_layer={},
        costliest=tuple(_cost_row(study, *entry) for entry in costliest(screened)),
    )
    if captured is None:
        return found
    if captured.failed:
        return replace(found, evidence="failed", error=captured.error)
    per_layer = outliers_of(context, captured, screened)
    return replace(found, evidence="captured", summary=summary_of(per_layer.values()), per_layer=per_layer)


def outliers_of(context: StudyContext, captured: Result, screened: Screened | None) -> dict[str, ChannelRow]:
    """Each module's channels under the four rules; `outlier_indices` are those of the first, the default."""
    rows: dict[str, ChannelRow] = {}
    at = 0
    for facts in captured.facts["sites"]:
        site, end = site_of(facts), at + facts["channels"]
        columns = {name: array[at:end].astype(np.float64) for name, array in captured.arrays.items()}
        at = end
        name = site.module if site.operator == "linear" else f"{site.module} ({site.operator})"
        name = f"{name} #{site.occurrence}" if site.occurrence else name  # experts compute several products
        known = screened is not None and screened.channels and site in screened.sites
        fisher = screened.by_channel(site) if screened is not None and known else None
        found = outliers(columns, fisher, context.settings.outlier_threshold)
        rows[name] = ChannelRow(
            layer=canonical_place(site.place),
            operator=site.operator,
            module=site.module,
            occurrence=site.occurrence,
            sparsity=facts["sparsity"],
            relative_sparsity=facts["relative_sparsity"],
            count=facts["count"],
            **vars(found),
        )
    return rows


def summary_of(rows: Iterable[ChannelRow]) -> OutlierSummary:
    """Outliers of all modules together."""
    rows = list(rows)
    total, outlying = sum(row.total_channels for row in rows), sum(row.num_outliers for row in rows)
    return OutlierSummary(
        layers_with_outliers=sum(row.num_outliers > 0 for row in rows),
        total_outlier_channels=outlying,
        total_channels=total,
        outlier_percentage=100 * outlying / total if total else 0.0,
        nonfinite_channels=sum(row.nonfinite_channels for row in rows),
        max_ratio=max((row.max_ratio for row in rows), default=None),
        largest=max((row.global_max for row in rows), default=None),
    )


def outliers(columns: Mapping[str, Array], fisher: Array | None, threshold: float) -> Outliers:
    """The four rules on statistics [C] of one module's channels. Non-finite channels are counted separately."""
    finite = np.isfinite(columns["max"])
    columns = {name: np.where(finite, column, 0.0) for name, column in columns.items()}
    ratio = over_median(columns["max"])
    mean_ratio = over_median(columns["mean_abs"])
    middle = columns["q50"]
    spread = np.where(middle > 0, columns["q99"] / np.where(middle > 0, middle, 1.0), 0.0)
    found = np.flatnonzero(ratio > threshold)
    order = found[np.argsort(-ratio[found], kind="stable")]
    by_fisher = None
    if fisher is not None and len(fisher) == len(ratio):
        by_fisher = int((fisher > np.quantile(fisher, LIMITS["outlier_fisher_quantile"])).sum())
    return Outliers(
        outlier_indices=tuple(int(i) for i in order[:LISTED]),
        outlier_ratios=tuple(float(ratio[i]) for i in order[:LISTED]),
        num_outliers=len(found),
        total_channels=len(ratio),
        outlier_percentage=100 * len(found) / len(ratio),
        nonfinite_channels=int((~finite).sum()),
        max_ratio=float(ratio.max()),
        band=band("outlier_ratio", float(ratio.max())),
        median_max=float(np.median(columns["max"])),
        global_max=float(columns["max"].max()),
        rules=OutlierRules(
            max=len(found),
            mean=int((mean_ratio > threshold).sum()),
            quantile=int((spread > LIMITS["outlier_quantile_ratio"]).sum()),
            fisher=by_fisher,
        ),
    )


def over_median(values: Array) -> Array:
    """values / their median; if the median is 0 (most channels never fire), over the smallest non-zero value."""
    middle = float(np.median(values))
    if middle <= 0:
        alive = values[values > 0]
        middle = float(alive.min()) if len(alive) else 1.0
    ratio: Array = values / middle
    return ratio


def _cost_row(study: StudyResults, site: Site, channel: int, cost: float) -> CostlyChannel:
    known = study.effect(channel_injection(study.context, site, channel))
    assert isinstance(site.place, int)
    injected = None if known.kl is None else known.kl.mean.value
    return CostlyChannel(
        module=site.module,
        layer=site.place,
        channel=channel,
        predicted_nats=cost,
        evidence="injected" if known.injected else "predicted",
        kl=known.kl,
        injected_over_predicted=None if injected is None or cost <= 0 else injected / cost,
    )


def correlate_with_windows(
    context: StudyContext, windows: Sequence[WindowEffect], rows: Iterable[ChannelRow]
) -> stats.Correlation:
    """Outlier counts against the degradation of windows that share no layer (the cross-level correlation)."""
    measured = [
        (window, window.degradation.value)
        for window in windows
        if window.injected and window.degradation is not None and window.degradation.value is not None
    ]
    if len(measured) < 2:
        return stats.Correlation("pearson", n=len(measured), note="fewer than two windows were measured")
    rows = list(rows)
    counts = [sum(row.num_outliers for row in rows if row.layer in window.layers) for window, _ in measured]
    every = max(1, -(-min(context.settings.window, context.blocks) // context.settings.step))
    return stats.correlation(counts, [loss for _, loss in measured], method="pearson", every=every)
