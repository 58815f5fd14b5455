"""The whole diagnosis as one propose / conclude pair: the trials needed now, and the report's sections."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from noisescope import stats
from noisescope.diagnosis import (
    channels,
    format_costs,
    gate_baseline,
    layers,
    metrics_dashboard,
    operators,
    predicted_kl,
)
from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.effects import StudyResults
from noisescope.diagnosis.metrics_dashboard import correlations
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.diagnosis.ranked_findings import ranked_findings
from noisescope.diagnosis.section_types import Conclusions, Sections
from noisescope.diagnosis.summary import could_not_see, executive_summary, recommendations
from noisescope.estimate import Estimate
from noisescope.findings import Target
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


def propose(context: StudyContext, results: Results) -> list[Trial]:
    """Clean first, then the screen, then the injections that those suggest."""
    trials = context.ask(None)
    if context.measure != "custom":
        trials += predicted_kl.propose(context, results)
    if any(trial.id not in results for trial in trials):
        return trials
    screened, levels = _usable(_screened(context, results)), context.settings.levels
    if "operator" in levels:
        trials += operators.propose(context, results) + gate_baseline.propose(context, results)
    if "layer" in levels:
        trials += layers.propose(context, results, screened)
    if "channel" in levels:
        trials += channels.propose(context, results, screened)
    trials += metrics_dashboard.propose(context, results, screened)
    return trials + format_costs.propose(context)


def conclude(context: StudyContext, results: Results, notes: Sequence[str] = ()) -> Conclusions:
    """Everything but the run's own facts: the same results give the same values, bit for bit."""
    screened = _screened(context, results)
    found = _sections(context, results, _usable(screened))
    excess = functools.partial(_excess, StudyResults(context, results))
    ranked = ranked_findings(found, excess, context.settings.words)
    wanted = recommendations(found, ranked, context.settings.on)
    limits = could_not_see(context, found, notes)
    if screened is not None and screened.error:
        limits.insert(0, f"the screen failed, so nothing was predicted: {screened.error}")
    if screened is not None and screened.unpredicted:
        count, first = len(screened.unpredicted), screened.unpredicted[0]
        why = "modified in place" if context.settings.question is None else "of fused experts"
        limits.append(f"{count} sites {why} have no prediction, such as {first}")
    return Conclusions(
        **vars(found),
        executive_summary=executive_summary(context, found, ranked, wanted),
        findings=tuple(ranked),
        recommendations=tuple(wanted),
        could_not_see=tuple(limits),
    )


def _screened(context: StudyContext, results: Results) -> Screened | None:
    return None if context.measure == "custom" else predicted_kl.conclude(context, results)


def _usable(screened: Screened | None) -> Screened | None:
    """A failed screen predicts nothing."""
    return None if screened is None or screened.error else screened


def _excess(study: StudyResults, whole: Target, part: Target) -> Estimate | None:
    """The cost of noise in a whole beyond noise in a part of it, sample by sample; None if one was not injected."""
    scores = study.scores(_injection(study.context, whole), _injection(study.context, part))
    return stats.degradation_excess(*scores) if scores is not None and len(scores[0]) > 1 else None


def _injection(context: StudyContext, target: Target) -> Injection:
    """The injection by which a row about the target was measured."""
    if target.kind == "operator":
        return operators.injection(context, target.operators[0])
    if target.kind == "place":
        return layers.place_injection(context, str(target.place))
    if target.kind == "cell":
        return layers.cell_injection(context, target.layers[0], target.operators[0])
    return context.injection(layers=frozenset(target.layers))


def _sections(context: StudyContext, results: Results, screened: Screened | None) -> Sections:
    levels = context.settings.levels
    layer_analysis = layers.conclude(context, results, screened) if "layer" in levels else None
    captured = channels.conclude(context, results, screened) if "channel" in levels else None
    metrics = metrics_dashboard.conclude(context, results, screened, captured)
    return Sections(
        operator_analysis=operators.conclude(context, results, screened) if "operator" in levels else None,
        layer_analysis=layer_analysis,
        channel_analysis=captured,
        metrics=metrics,
        correlations=correlations(context, layer_analysis, metrics.hessian_trace, captured),
        format_scores=format_costs.conclude(context, results),
        gate=gate_baseline.conclude(context, results) if "operator" in levels else None,
    )
