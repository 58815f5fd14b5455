"""The metrics dashboard: the model in single numbers, curvature per layer, and how the metrics correlate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from noisescope import stats
from noisescope.diagnosis import channels, robustness_curve
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.diagnosis.effects import NOTHING, StudyResults, clean_score, divergence
from noisescope.diagnosis.perplexity import PERPLEXITY
from noisescope.diagnosis.predicted_kl import Screened, finite_mean
from noisescope.diagnosis.rows import Divergence, LayerAnalysis, LayerEffect
from noisescope.diagnosis.section_types import (
    Baseline,
    ChannelAnalysis,
    ExpectedCorrelation,
    GradientRatio,
    HessianTraces,
    Metrics,
    PrimaryMetrics,
    SecondaryMetrics,
    Sparsity,
    Trace,
)
from noisescope.findings import EXPECTED_CORRELATIONS, as_expected, band, band_range, dashboard_risk
from noisescope.sites import GROUPS
from noisescope.stats import Correlation
from noisescope.trials import Results, Trial

LAYERS_WITH_THRESHOLD = 5  # in a full diagnosis: the most sensitive ones


def curvature_trials(context: StudyContext) -> list[Trial]:
    if context.curvature_slice is None or context.settings.effort == "screen":
        return []
    settings = {"probes": context.settings.probes, "seed": 0}
    return [Trial(context.conditions, "curvature", context.curvature_slice, None, settings)]


def gradient_trials(context: StudyContext) -> list[Trial]:
    """Clean, and with noise forward and backward, as training on such hardware would have it.

    None for a number format: it is for inference.
    """
    settings = context.settings
    if context.curvature_slice is None or settings.effort == "screen" or settings.question is not None:
        return []
    noisy = dataclasses.replace(context.injection(), phases=frozenset({"forward", "backward"}))
    return [Trial(context.conditions, "gradients", context.curvature_slice, one) for one in (None, noisy)]


def propose(context: StudyContext, results: Results, screened: Screened | None) -> list[Trial]:
    if context.settings.effort == "screen":
        return []
    trials = context.ask(context.injection()) + gradient_trials(context) + curvature_trials(context)
    for sites in threshold_sites(context, screened).values():
        trials += robustness_curve.propose(context, results, **sites)
    return trials


def threshold_sites(context: StudyContext, screened: Screened | None) -> dict[str, dict[str, Any]]:
    """Where critical thresholds are measured: the model; in a full diagnosis also operators and the worst layers.

    A number format has no scale to search.
    """
    if context.settings.question is not None:
        return {}
    sites: dict[str, dict[str, Any]] = {"model": {}}
    if context.settings.effort == "full":
        for operator in context.present_operators:
            if operator not in GROUPS:
                sites[f"operator {operator}"] = {"operators": frozenset({operator})}
        if screened is not None:
            cost = {layer: finite_mean(screened.in_layer(layer)) for layer in range(context.blocks)}
            for layer in sorted(cost, key=lambda layer: -cost[layer])[:LAYERS_WITH_THRESHOLD]:
                sites[f"layer {layer}"] = {"layers": frozenset({layer})}
    return sites


def conclude(
    context: StudyContext, results: Results, screened: Screened | None, captured: ChannelAnalysis | None
) -> Metrics:
    # as many comparisons as in the table of the operators, where there is one
    comparisons = len(context.present_operators) if "operator" in context.settings.levels else 1
    study = StudyResults(context, results, screened)
    whole = study.effect(context.injection(), comparisons=max(comparisons, 1))
    index = whole.noise_tolerance_index or NOTHING
    tolerance = math.inf if index.note == stats.UNBOUNDED else index.value
    snr_bands = band_range("snr_db", whole.snr_db or NOTHING)
    loss = None if whole.degradation is None else whole.degradation.value
    wanted = {} if context.settings.effort == "screen" else threshold_sites(context, screened)
    thresholds = {name: robustness_curve.conclude(context, results, **sites) for name, sites in wanted.items()}
    return Metrics(
        primary=PrimaryMetrics(
            relative_degradation=whole.degradation,
            degradation_band=whole.band,
            noise_tolerance_index=whole.noise_tolerance_index,
            noise_tolerance_band=band("noise_tolerance_index", tolerance),
            critical_threshold=thresholds.get("model"),
        ),
        secondary=SecondaryMetrics(
            snr_db=whole.snr_db,
            snr_band=snr_bands[0],
            snr_band_upper=snr_bands[1],
            nominal_snr_db=None if context.settings.scale is None else -20 * float(np.log10(context.settings.scale)),
            gradient_ratio=_gradient_ratio(study),
            activation_sparsity=_sparsity(captured),
        ),
        critical_thresholds=thresholds,
        hessian_trace=_traces(study),
        fisher=_fisher(study),
        baseline=_baseline(study),
        risk=dashboard_risk(loss),
    )


def _baseline(study: StudyResults) -> Baseline | None:
    """The clean model, metric by metric."""
    context, clean = study.context, study.answer(None)
    if clean is None or clean.error:
        return None
    known = clean.values(context.metric)[0]
    names = dict.fromkeys([*clean.metrics, context.metric])
    return Baseline(
        metrics={name: clean_score(context, clean, name) for name in names if name != "nonfinite"},
        nonfinite=clean.nonfinite,
        measurable=_measurable(context, known[np.isfinite(known)]),
        chance=context.chance,
    )


def _gradient_ratio(study: StudyResults) -> GradientRatio | None:
    trials = gradient_trials(study.context)
    found = [study.results[trial.id] for trial in trials if trial.id in study.results]
    if len(found) != 2 or any(result.failed for result in found):
        return None
    clean, noisy = (result.facts["norms"] for result in found)
    total = float(np.hypot.reduce(list(noisy.values())) / max(np.hypot.reduce(list(clean.values())), 1e-30))
    return GradientRatio(
        value=total,
        point_band=band("gradient_ratio", total),
        n=trials[0].slice.stop - trials[0].slice.start,
        seeds=1,
        per_layer={layer: noisy[layer] / clean[layer] if clean[layer] > 0 else None for layer in clean},
    )


def _sparsity(captured: ChannelAnalysis | None) -> Sparsity | None:
    """Mean over the captured linears, by an absolute threshold of 1e-6 and by 1 % of the tensor's rms."""
    rows = [] if captured is None else [row for row in captured.per_layer.values() if row.operator == "linear"]
    if not rows:
        return None
    relative = float(np.mean([row.relative_sparsity for row in rows]))
    return Sparsity(float(np.mean([row.sparsity for row in rows])), relative, band("sparsity", relative))


def _traces(study: StudyResults) -> HessianTraces | None:
    for trial in curvature_trials(study.context):
        found = study.results.get(trial.id)
        if found is not None:
            layers = {} if found.failed else {name: Trace(**row) for name, row in found.facts["traces"].items()}
            return HessianTraces(found.error, layers)
    return None


def _fisher(study: StudyResults) -> dict[str, Divergence] | None:
    """Predicted KL of each layer: the Fisher information of its activations, weighted by the noise."""
    screened = study.screened
    if screened is None:
        return None
    return {str(layer): divergence(screened.in_layer(layer)) for layer in range(study.context.blocks)}


def correlations(
    context: StudyContext, found: LayerAnalysis | None, traces: HessianTraces | None, captured: ChannelAnalysis | None
) -> dict[str, ExpectedCorrelation]:
    """Whether metrics relate as the original method notes expect, over the layers that were measured.

    A layer's sensitivity is its injected KL where all layers have one, else the predicted.
    """
    against, sensitivity = ("", None) if found is None else _sensitivity(found.layers)
    if found is None or sensitivity is None:
        return {}
    rows: dict[str, ExpectedCorrelation] = {}
    if traces is not None and traces.layers:
        values = [traces.layers[str(layer)].trace for layer in range(context.blocks)]
        rows["hessian_sensitivity"] = _expected("hessian_sensitivity", values, sensitivity, against)
    if captured is not None and captured.per_layer:
        captured_rows = captured.per_layer.values()
        by_layer = [[row for row in captured_rows if row.layer == layer] for layer in range(context.blocks)]
        counts = [sum(row.num_outliers for row in rows) for rows in by_layer]
        sparse = [float(np.mean([row.relative_sparsity for row in rows])) for rows in by_layer]
        rows["outliers_sensitivity"] = _expected("outliers_sensitivity", counts, sensitivity, against)
        rows["sparsity_degradation"] = _expected("sparsity_degradation", sparse, sensitivity, against)
        windows = channels.correlate_with_windows(context, found.windows, captured_rows)
        rows["outliers_windows"] = ExpectedCorrelation(windows, "degradation of windows", "", "undecided", None, False)
    return rows


def _sensitivity(layers: Sequence[LayerEffect]) -> tuple[str, list[float] | None]:
    columns = {"injected KL": [row.kl for row in layers], "predicted KL": [row.predicted_kl for row in layers]}
    for name, column in columns.items():
        known = [kl.typical.value for kl in column if kl is not None and kl.typical.value is not None]
        if layers and len(known) == len(layers):
            return name, known
    return "", None


def _expected(name: str, values: Sequence[float], sensitivity: Sequence[float], against: str) -> ExpectedCorrelation:
    sign, bound = EXPECTED_CORRELATIONS[name]
    expected = f"r {'above' if sign == '>' else 'below'} {bound}"
    if len(values) < 3:
        nothing = Correlation("pearson", n=len(values), note="fewer than three layers")
        return ExpectedCorrelation(nothing, against, expected, "undecided", None, False)
    found = stats.correlation(values, sensitivity, method="pearson")
    influence = stats.influence(values, sensitivity, method="pearson")
    without = None if influence is None else influence.without
    carried = bool(as_expected(name, found.value)) and not as_expected(name, without)
    return ExpectedCorrelation(found, against, expected, _held(found, sign, bound), without, carried)


def _held(found: Correlation, sign: str, bound: float) -> Literal["yes", "no", "undecided"]:
    """Decided if the whole interval lies on one side of the limit."""
    if found.low is None or found.high is None:
        return "undecided"
    if found.low > bound or found.high < bound:
        return "yes" if (found.low > bound) == (sign == ">") else "no"
    return "undecided"


def _measurable(context: StudyContext, clean: Array) -> bool:
    """Whether a share of the clean score can be lost; of a perplexity it always can, since no model guesses it."""
    if context.metric == PERPLEXITY:
        return len(clean) >= 2
    return stats.measurable(clean, context.chance)
