"""Builds the first screen of the report from sections and ranked findings.

Recommendations in the order of the findings, the risk level with its reasons, the next step, plain words for people who
decide, and what the run could not detect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.ranked_findings import RATED, STANDS_OUT, counted_once, typical_nats, whole_model
from noisescope.diagnosis.rows import Effect
from noisescope.diagnosis.section_types import Baseline, ExecutiveSummary, PlainWords, Sections
from noisescope.findings import (
    ADVICE,
    BANDS,
    BORDERLINE,
    LIMITS,
    NOT_MEASURABLE,
    Finding,
    Recommendation,
    by_priority,
    metric_name,
    operator_advice,
    outlier_advice,
    percent,
    report_risk,
)
from noisescope.findings.finding import Urgency, counted
from noisescope.findings.risk_scores import higher_level
from noisescope.findings.thresholds import RiskLevel
from noisescope.options.fields import OUTPUTS

FAR = 2 * STANDS_OUT  # times the nats of the median layer: look here first, though no loss was significant


def recommendations(found: Sections, ranked: list[Finding], on: str = OUTPUTS) -> list[Recommendation]:
    """One for each finding about a place, an operator or a module with outlier channels."""
    typical = typical_nats(found.layer_analysis)
    return by_priority(
        Recommendation(priority, finding.component, finding.statement, _advice(found, finding, on))
        for finding in ranked
        if (priority := _priority(found, finding, typical)) is not None
    )


def _priority(found: Sections, finding: Finding, typical: float) -> Urgency | None:
    """None if a finding requires nothing."""
    if finding.unit == "count":
        return "CRITICAL"
    if finding.unit == "share" and finding.severity in RATED:
        return finding.severity if finding.severity == "CRITICAL" or finding.severity == "HIGH" else "MEDIUM"
    if finding.unit == "nats" and finding.nats is not None:
        return "MEDIUM" if finding.nats >= FAR * typical else "LOW"
    if finding.unit == "ratio" and found.channel_analysis is not None:
        row = found.channel_analysis.per_layer[finding.component]
        return "MEDIUM" if row.band == "CRITICAL" and row.operator == "linear" else "LOW"
    return None


def _advice(found: Sections, finding: Finding, on: str) -> str:
    target = finding.target
    if finding.unit == "ratio":
        return f"{outlier_advice()} For W8A8: {outlier_advice('W8A8')}"
    if target.kind == "channels":
        return "Find where the numbers leave the range of the dtype: noisescope locate MODEL names the first operator."
    if on != OUTPUTS:
        return ADVICE["weights outside" if target.kind == "place" and on == "weights" else on]
    if target.kind == "operator":
        return operator_advice(target.operators[0])
    if target.kind == "cell":
        return f"{operator_advice(target.operators[0])} {ADVICE['critical layers']}"
    points = found.layer_analysis.avalanche_points if found.layer_analysis is not None else ()
    inside = any(point.decided and set(target.layers) <= set(range(point.start, point.end + 1)) for point in points)
    return ADVICE["avalanche"] if target.layers and inside else ADVICE["critical layers"]


_MEANING = {
    "LOW": "At the noise level tested, nothing in the model breaks: the usual checks on the new device are enough.",
    "MODERATE": "Some parts of the model are sensitive to numerical error: protect them before moving the model.",
    "HIGH": "The model breaks under small numerical error: do not move it as it is.",
    NOT_MEASURABLE: "This run can't tell whether the model is safe to move: it measured too little to be sure.",
}
_FORMAT_MEANING = {
    "LOW": "With {} nothing in the model breaks: the usual checks before deployment are enough.",
    "MODERATE": "With {} some parts of the model lose too much: give those more bits before deploying it so.",
    "HIGH": "The model breaks with {}: do not deploy it so.",
    NOT_MEASURABLE: "This run can't say whether {} will do: it measured too little to be sure.",
}
_PROTECT = {  # what to do about the places named; REPORT is the folder of the run
    "weights": "Give {} more bits: noisescope plan precision REPORT --average-bits 5 --verify",
    "activations": "Leave the inputs of {} in 16 bits, or smooth them first: noisescope plan smoothquant REPORT "
    "(of a diagnosis with the channel level)",
    "kv-cache": "Keep the cache of {} in 16 bits: noisescope plan kv-cache REPORT --verify",
}
_ROUNDING = {
    "weights": "weights were rounded to nearest where they are used, without calibration (GPTQ and AWQ lose less), and "
    "products were computed in {dtype}; embeddings and lm_head were rounded by themselves alone{tied}",
    "activations": "inputs of the linears in the blocks were rounded, with scales found token by token; products were "
    "computed in {dtype}, and attention's own inputs were left as they are",
    "kv-cache": "keys and values were rounded where attention reads them, for every token, the last one included; "
    "queries, scores and sums stayed in {dtype}, and a kernel that computes in the cache's format may lose more",
}
WIDEST = 0.2  # an interval of the clean score wider than this is not a usable criterion
WANTED = 0.05  # half the width of one that is
TOP = 3
LEAST_POWER = 0.15  # a run that could have missed a larger loss than this can't call a model low-risk


def plain_words(
    context: StudyContext, found: Sections, level: str, wanted: Sequence[Recommendation], next_step: str
) -> PlainWords:
    """Up to three short paragraphs; every number in them is also in the report with its interval."""
    question = context.settings.question
    meaning = _MEANING[level] if question is None else _FORMAT_MEANING[level].format(question.phrase)
    risk = f"{meaning} {_loss(context, found)}".strip()
    if level == NOT_MEASURABLE:
        return PlainWords(risk, next_step, _success(context, found))
    if not wanted:
        return PlainWords(risk, "Nothing beyond the usual validation.", "")
    urgent = sum(one.priority in ("CRITICAL", "HIGH") for one in wanted)
    named = ", ".join(one.component for one in wanted[:3]) + (" and others" if len(wanted) > 3 else "")
    items = counted(len(wanted), "item") + (f", {urgent} of them urgent" if urgent else "")
    return PlainWords(risk, f"Look at {items}: {named}. The recommendations say how.", _success(context, found))


def _success(context: StudyContext, found: Sections) -> str:
    """A criterion that a device can pass or fail, or how many samples one would need."""
    baseline = found.metrics.baseline
    clean_always_agrees = context.metric == "agreement"
    if baseline is None or not baseline.measurable or clean_always_agrees:
        return ""
    clean = baseline.metrics.get(context.metric)
    if clean is None or clean.value is None or clean.low is None or clean.high is None:
        return ""
    metric = metric_name(context.metric_name)
    if context.metric == "perplexity":
        return (
            f"On the new device the perplexity on this data must be no higher than the interval measured here: "
            f"{clean.low:.3g} to {clean.high:.3g} (n = {clean.n})."
        )
    if context.measure != "custom" and clean.high - clean.low > WIDEST:
        needed = math.ceil(1.96**2 * max(clean.value * (1 - clean.value), 0.05) / WANTED**2)
        return (
            f"{clean.n} samples are too few for a pass criterion: the {metric} on this data is known to "
            f"{percent(clean.low)} to {percent(clean.high)}. With about {needed} samples it would be known to 5 points."
        )
    where = "On the new device" if context.settings.question is None else "After rounding"
    return (
        f"{where} the {metric} on this data must be no lower than the interval measured here: "
        f"{percent(clean.low)} to {percent(clean.high)} (n = {clean.n})."
    )


def _loss(context: StudyContext, found: Sections) -> str:
    """The cost of noise everywhere, or of the format in all blocks, as a sentence."""
    loss = found.metrics.primary.relative_degradation
    if loss is None or loss.value is None or loss.low is None or loss.high is None:
        return ""
    question, scale = context.settings.question, context.settings.scale
    if question is not None:
        errors = f"{question.phrase} in all blocks"
    else:
        assert scale is not None
        errors = f"errors of {percent(scale, 0)} in its matrix products"
    return (
        f"With {errors} it loses {percent(loss.value, 0)} "
        f"of its {metric_name(context.metric_name)} (95 % interval {percent(loss.low, 0)} to {percent(loss.high, 0)}, "
        f"{loss.n} samples)."
    )


def executive_summary(
    context: StudyContext, found: Sections, ranked: Sequence[Finding], wanted: Sequence[Recommendation]
) -> ExecutiveSummary:
    rows = found.operator_analysis or {}
    operators = {name: rows[name] for name in counted_once(rows) if rows[name].evidence != "absent"}
    critical = tuple(name for name, row in operators.items() if _critical(row, _critical_loss(context)))
    layers = found.layer_analysis
    points = () if layers is None else tuple(point for point in layers.avalanche_points if point.decided)
    measured = layers is not None and any(row.injected for row in layers.windows)
    channels = None if found.channel_analysis is None else found.channel_analysis.summary
    risk = report_risk(
        {name: _score(context, row, name in critical) for name, row in operators.items()},
        len(points) if measured else None,
        None if channels is None else channels.total_outlier_channels,
        None if channels is None else channels.total_channels,
    )
    whole = whole_model(found, context.settings.words)
    every = [*ranked] if whole is None else [*ranked, whole]
    level, meaning = overall_risk(risk.level, every, smallest_detectable(found))
    if level == NOT_MEASURABLE:
        meaning = _why_not(context, found) or meaning
    step = next_step(context, found, ranked)
    return ExecutiveSummary(
        critical_operators=critical,
        borderline_operators=tuple(
            name
            for name, row in operators.items()
            if name not in critical and _may_be_critical(row, _critical_loss(context))
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
        in_plain_words=plain_words(context, found, level, list(wanted), step),
    )


def overall_risk(score_level: RiskLevel, ranked: Sequence[Finding], smallest: float | None) -> tuple[RiskLevel, str]:
    """The higher of the score's level and the worst significant finding's, with what it means.

    LOW is for runs that could have shown otherwise.
    """
    level = score_level
    for finding in ranked:
        if finding.rated:
            level = higher_level(level, "HIGH" if finding.urgent else "MODERATE")
    meanings = BANDS["report_risk"].meanings
    if level not in ("LOW", NOT_MEASURABLE):
        return level, meanings[level]
    borderline = next((finding for finding in ranked if finding.severity == BORDERLINE), None)
    if borderline is not None:
        return NOT_MEASURABLE, f"the loss in {borderline.component} may be low or high; more samples would decide"
    if smallest is None or smallest > LEAST_POWER:
        what = "any loss" if smallest is None else f"a loss below {percent(smallest, 0)}"
        return NOT_MEASURABLE, f"too few samples to detect {what}"
    return level, meanings.get(level, "only part of the model was measured")


def _why_not(context: StudyContext, found: Sections) -> str:
    """Why no loss could be measured; "" if some could."""
    baseline = found.metrics.baseline
    if context.settings.effort == "screen":
        return "a screen predicts divergence without injecting noise, so no loss was measured"
    if baseline is None:
        return "the clean model could not be measured"
    if baseline.measurable:
        return ""
    known = "known too roughly" if _above_chance(context, baseline) else "not significantly above chance"
    return f"the clean {metric_name(context.metric_name)} is {known}"


def _above_chance(context: StudyContext, baseline: Baseline) -> bool:
    """Of a score that is not measurable all the same: its own error is too large a share of it."""
    low = baseline.metrics[context.metric].low
    return low is not None and low > context.chance


def _critical_loss(context: StudyContext) -> float:
    """The loss beyond which an operator is critical: 3 times the scale of the noise.

    A number format has no scale: the limit is that of the band CRITICAL, a fifth of the score.
    """
    scale = context.settings.scale
    return BANDS["degradation"].limits[-1] if scale is None else LIMITS["critical_operator_score"] * scale


def _critical(row: Effect, limit: float) -> bool:
    """Whether the interval of the loss clears the limit."""
    loss = row.degradation
    return row.significant and loss is not None and loss.above(limit)


def _may_be_critical(row: Effect, limit: float) -> bool:
    """Whether a significant loss has an interval that holds the limit."""
    loss = row.degradation
    return row.significant and loss is not None and loss.above(0.0) and (loss.high is None or loss.high > limit)


def _score(context: StudyContext, row: Effect, critical: bool) -> float | None:
    """What the report's risk counts: a score whose interval does not clear the limit counts as none.

    Without a scale there is no score: what is critical counts as beyond any limit.
    """
    if context.settings.scale is None:
        measured = row.degradation is not None and row.degradation.value is not None
        return (math.inf if critical else 0.0) if measured else None
    return row.sensitivity_score if critical or row.sensitivity_score is None else 0.0


def smallest_detectable(found: Sections) -> float | None:
    """The loss that every operator would have shown; None where no loss could be found, or none was tested for."""
    if found.metrics.baseline is None or not found.metrics.baseline.measurable:
        return None
    rows = [row for row in (found.operator_analysis or {}).values() if row.injected]
    seen = [row.smallest_detectable for row in rows]
    known = [loss for loss in seen if loss is not None]
    return max(known) if known and len(known) == len(seen) else None


def next_step(context: StudyContext, found: Sections, ranked: Sequence[Finding]) -> str:
    if found.metrics.baseline is None:
        return f"The clean model could not be measured: {found.first_error or 'its trials failed'}"
    if found.metrics.baseline.nonfinite:
        tokens = counted(found.metrics.baseline.nonfinite, "token")
        return f"Without any noise the logits of {tokens} are NaN or infinite: noisescope locate MODEL finds where."
    if context.settings.effort == "screen":
        return "These are predictions. Run again with --effort standard into the same folder to confirm what matters."
    if not found.metrics.baseline.measurable:
        return _not_measurable(context, found.metrics.baseline)
    urgent = next((finding for finding in ranked if finding.urgent), None)
    if urgent is not None:
        place = next((finding.component for finding in ranked if finding.target.places), None)
        where = urgent.component if urgent.target.places or place is None else f"{urgent.component}, {place} first,"
        if context.settings.question is not None:
            return _PROTECT[context.settings.on].format(where)
        return f"Validate {where} on the target hardware; the recommendations say what to check."
    rows: list[Effect] = [row for row in (found.operator_analysis or {}).values() if row.evidence != "absent"]
    rows += found.layer_analysis.windows if found.layer_analysis is not None else ()
    if rows and all(row.evidence == "failed" for row in rows):
        return f"Every trial failed; the first error was: {rows[0].error}"
    if not rows and found.channel_analysis is not None:
        return "Only channels were measured: run again with --level operator,layer to see what noise costs."
    whole, question = whole_model(found), context.settings.question
    if whole is not None and whole.size is not None and whole.size.value is not None and ranked:
        lost, first = percent(whole.size.value), ranked[0].component
        if question is not None:
            inside = next((finding.component for finding in ranked if finding.target.layers), first)
            return f"In all blocks together, {question.rounded} cost {lost}. {_PROTECT[question.on].format(inside)}"
        return f"Noise in all layers together costs {lost}; validate {first} on the target hardware first."
    if not any(row.injected for row in rows):
        return "No noise was injected into operators or layers: choose --level and --operators that the model has."
    smallest = smallest_detectable(found)
    if smallest is None or smallest > LEAST_POWER:
        return "No loss is significant with so few samples: raise --samples."
    if question is not None:
        first = f" Rounding moves the output most in {ranked[0].component}." if ranked else ""
        return f"No rated loss with {question.phrase}; {percent(smallest)} would have been detected.{first}"
    first = f" Validate {ranked[0].component} first: noise there moves the output most." if ranked else ""
    return f"No rated loss at this noise scale; {percent(smallest)} in one operator would have been detected.{first}"


def _not_measurable(context: StudyContext, baseline: Baseline) -> str:
    clean = baseline.metrics[context.metric]
    if context.metric_name == "perplexity":
        return f"{clean.n} samples have a finite perplexity: too few to measure a loss; raise --samples."
    low, high = ("..." if end is None else percent(end) for end in (clean.low, clean.high))
    value = "not finite" if clean.value is None else percent(clean.value)
    if _above_chance(context, baseline):
        return (
            f"The clean {metric_name(context.metric_name)} is {value} [{low}, {high}] (n = {clean.n}), known too "
            "roughly to measure which share of it is lost: raise --samples."
        )
    return (
        f"The clean {metric_name(context.metric_name)} is {value} [{low}, {high}] (n = {clean.n}) and is not "
        f"significantly above chance ({percent(context.chance)}), so no loss can be measured: raise --samples, or "
        "give data on which the model answers correctly (--data)."
    )


def could_not_see(context: StudyContext, found: Sections, notes: Sequence[str]) -> list[str]:
    """The limits of this run."""
    limits, metric = list(notes), metric_name(context.metric_name)
    absent = [name for name, row in (found.operator_analysis or {}).items() if row.evidence == "absent"]
    if absent:
        limits.append(f"the model computes no {', '.join(absent)}")
    smallest = smallest_detectable(found)
    reason = _why_not(context, found)
    if reason:
        limits.append(reason)
    elif smallest is None and found.operator_analysis:
        limits.append(f"too few samples: for some operators, no loss of {metric} could have been detected")
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
    if context.settings.effort != "full" and found.layer_analysis is not None:
        limits.append(
            "rows and cells marked predicted were not injected: predictions add up over sites and can't show "
            "errors that compound (--effort full injects everywhere)"
        )
    limits.append(_form_of_error(context))
    return limits


def _form_of_error(context: StudyContext) -> str:
    """What was put in, and what that leaves out."""
    if context.settings.question is None:
        return "noise falls on operator outputs in the forward pass; a fault of another form may act differently"
    tied = ", together where they share one weight" if context.tied else ""
    return _ROUNDING[context.settings.on].format(dtype=context.conditions.dtype, tied=tied)
