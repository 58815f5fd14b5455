"""From rows and ranked findings to the first screen: risk, top findings, next step; and what the run could not see."""

from __future__ import annotations

from collections.abc import Sequence

from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.plain_words import plain_words
from noisescope.diagnosis.ranking import counted_once, whole_model
from noisescope.diagnosis.rows import Effect
from noisescope.diagnosis.sections import ExecutiveSummary, Sections
from noisescope.findings import (
    BORDERLINE,
    LIMITS,
    NOT_MEASURABLE,
    Finding,
    Recommendation,
    metric_name,
    percent,
    report_risk,
)
from noisescope.findings.bands import RiskLevel
from noisescope.findings.risk import RISK_MEANINGS, higher_level

TOP = 3
LEAST_POWER = 0.15  # a run that could have missed a larger loss than this can't call a model low-risk


def executive_summary(
    frame: Frame, found: Sections, ranked: Sequence[Finding], wanted: Sequence[Recommendation]
) -> ExecutiveSummary:
    operators = {
        name: row
        for name, row in (found.operator_analysis or {}).items()
        if name in counted_once(found.operator_analysis or {}) and row.evidence != "absent"
    }
    critical = tuple(name for name, row in operators.items() if _critical(row, frame.settings.scale))
    layers = found.layer_analysis
    points = () if layers is None else tuple(point for point in layers.avalanche_points if point.decided)
    measured = layers is not None and any(row.injected for row in layers.windows)
    channels = None if found.channel_analysis is None else found.channel_analysis.summary
    risk = report_risk(
        {name: _score(row, name in critical) for name, row in operators.items()},
        len(points) if measured else None,
        None if channels is None else channels.total_outlier_channels,
        None if channels is None else channels.total_channels,
    )
    whole = whole_model(found)
    level, meaning = overall_risk(
        risk.level, [*ranked, *([] if whole is None else [whole])], smallest_detectable(found)
    )
    if level == NOT_MEASURABLE:
        meaning = _why_not(frame, found) or meaning
    step = next_step(frame, found, ranked)
    return ExecutiveSummary(
        critical_operators=critical,
        borderline_operators=tuple(
            name
            for name, row in operators.items()
            if name not in critical and _may_be_critical(row, frame.settings.scale)
        ),
        num_critical_operators=len(critical),
        avalanche_points=points,
        num_avalanche_points=len(points),
        total_outlier_channels=None if channels is None else channels.total_outlier_channels,
        overall_risk_level=level,
        risk_meaning=meaning,
        report_risk=risk,
        dashboard_risk=found.metrics.risk,
        whole_model=whole,
        top_findings=tuple(ranked[:TOP]),
        next_step=step,
        in_plain_words=plain_words(frame, found, level, list(wanted), step),
    )


def overall_risk(score_level: RiskLevel, ranked: Sequence[Finding], smallest: float | None) -> tuple[RiskLevel, str]:
    """The higher of the score's level and the worst significant finding's, with what it means.

    LOW is for runs that could have shown otherwise.
    """
    level = score_level
    for finding in ranked:
        if finding.rated:
            level = higher_level(level, "HIGH" if finding.urgent else "MODERATE")
    if level not in ("LOW", NOT_MEASURABLE):
        return level, RISK_MEANINGS[level]
    borderline = next((finding for finding in ranked if finding.severity == BORDERLINE), None)
    if borderline is not None:
        return NOT_MEASURABLE, f"the loss in {borderline.component} may be low or high; more samples decide"
    if smallest is None or smallest > LEAST_POWER:
        what = "any loss" if smallest is None else f"a loss below {percent(smallest, 0)}"
        return NOT_MEASURABLE, f"too few samples to detect {what}"
    return level, RISK_MEANINGS.get(level, "only a part of the model was measured")


def _why_not(frame: Frame, found: Sections) -> str:
    """Why no loss could be measured at all; "" where some could."""
    baseline = found.metrics.baseline
    if frame.settings.effort == "screen":
        return "a screen predicts divergence and injects nothing, so no loss was measured"
    if baseline is None:
        return "the clean model could not be measured"
    return "" if baseline.measurable else f"the clean {metric_name(frame.metric_name)} is not clear of chance"


def _critical(row: Effect, scale: float) -> bool:
    """Whether the interval of the sensitivity score (loss over scale) clears the limit."""
    loss = row.degradation
    return row.significant and loss is not None and loss.above(LIMITS["critical_operator_score"] * scale)


def _may_be_critical(row: Effect, scale: float) -> bool:
    """Whether a significant loss has an interval that holds the limit."""
    limit = LIMITS["critical_operator_score"] * scale
    loss = row.degradation
    return row.significant and loss is not None and loss.above(0.0) and (loss.high is None or loss.high > limit)


def _score(row: Effect, critical: bool) -> float | None:
    """What the report's risk counts: a score whose interval does not clear the limit counts as none."""
    return row.sensitivity_score if critical or row.sensitivity_score is None else 0.0


def smallest_detectable(found: Sections) -> float | None:
    """The loss that every operator would have shown; None where no loss could be found, or none was looked for."""
    if found.metrics.baseline is None or not found.metrics.baseline.measurable:
        return None
    rows = [row for row in (found.operator_analysis or {}).values() if row.injected]
    seen = [row.smallest_detectable for row in rows]
    known = [loss for loss in seen if loss is not None]
    return max(known) if known and len(known) == len(seen) else None


def next_step(frame: Frame, found: Sections, ranked: Sequence[Finding]) -> str:
    if found.metrics.baseline is None:
        return f"The clean model could not be measured: {found.first_error or 'its trials failed'}"
    if frame.settings.effort == "screen":
        return "These are predictions. Run again with --effort standard into the same folder to confirm what matters."
    baseline = found.metrics.baseline
    if baseline is not None and not baseline.measurable:
        return _not_measurable(frame, found)
    urgent = next((finding for finding in ranked if finding.urgent), None)
    if urgent is not None:
        place = next((finding.component for finding in ranked if finding.target.places), None)
        where = urgent.component if urgent.target.places or place is None else f"{urgent.component}, {place} first,"
        return f"Validate {where} on the target hardware; the recommendations say what to check."
    rows: list[Effect] = [row for row in (found.operator_analysis or {}).values() if row.evidence != "absent"]
    rows += found.layer_analysis.windows if found.layer_analysis is not None else ()
    if rows and all(row.evidence == "failed" for row in rows):
        return f"Every trial failed; the first error was: {rows[0].error}"
    if not rows and found.channel_analysis is not None:
        return "Only channels were measured: run again with --level operator,layer to see what noise costs."
    whole = whole_model(found)
    if whole is not None and whole.size is not None and whole.size.value is not None and ranked:
        return (
            f"Noise in all layers together costs {percent(whole.size.value)}; validate {ranked[0].component} on the "
            "target hardware first."
        )
    if not any(row.injected for row in rows):
        return "No noise was injected into operators or layers: choose --level and --operators that the model has."
    smallest = smallest_detectable(found)
    if smallest is None or smallest > LEAST_POWER:
        return "No loss is significant with so few samples: raise --samples."
    first = f" Validate {ranked[0].component} first: noise there moves the output furthest." if ranked else ""
    return f"No rated loss at this noise scale; {percent(smallest)} in one operator would have been detected.{first}"


def _not_measurable(frame: Frame, found: Sections) -> str:
    baseline = found.metrics.baseline
    assert baseline is not None
    clean = baseline.metrics[frame.metric]
    low, high = ("..." if end is None else percent(end) for end in (clean.low, clean.high))
    value = "not finite" if clean.value is None else percent(clean.value)
    return (
        f"The clean {metric_name(frame.metric_name)} is {value} [{low}, {high}] (n = {clean.n}) and is not clear of "
        f"chance ({percent(frame.chance)}), so no loss can be measured: raise --samples, or give data on which the "
        "model answers correctly (--data)."
    )


def could_not_see(frame: Frame, found: Sections, notes: Sequence[str]) -> list[str]:
    """The limits of this run."""
    limits, metric = list(notes), metric_name(frame.metric_name)
    absent = [name for name, row in (found.operator_analysis or {}).items() if row.evidence == "absent"]
    if absent:
        limits.append(f"the model computes no {', '.join(absent)}")
    smallest = smallest_detectable(found)
    reason = _why_not(frame, found)
    if reason:
        limits.append(reason)
    elif smallest is None and found.operator_analysis:
        limits.append(f"too few samples: in some operator no loss of {metric} could have been detected")
    elif smallest is not None:
        limits.append(
            f"a loss of {metric} below {percent(smallest)} in one operator could have been missed (80 % power, "
            "corrected for all rows of the table); more samples detect smaller losses"
        )
    windows = [] if found.layer_analysis is None else [row for row in found.layer_analysis.windows if row.injected]
    seen = [row.smallest_detectable for row in windows if row.smallest_detectable is not None]
    if seen and not reason:
        limits.append(f"a loss of {metric} below {percent(max(seen))} in one window could have been missed")
    elif windows and not reason:
        limits.append(f"too few samples: in no window could a loss of {metric} have been detected")
    if frame.settings.effort != "full" and found.layer_analysis is not None:
        limits.append(
            "layers and cells of the layer x operator map that are marked predicted were not injected: predictions "
            "add up over sites and can't show errors that compound (--effort full injects all)"
        )
    limits.append("noise falls on operator outputs in the forward pass; a fault of another form may act differently")
    return limits
