"""The report for people who decide: what it means, what to do, how to know that it worked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.sections import PlainWords, Sections
from noisescope.findings import NOT_MEASURABLE, Recommendation, metric_name, percent

_MEANING = {
    "LOW": "At the noise tried here nothing in the model breaks: the usual checks on the new device are enough.",
    "MODERATE": "Some parts of the model are sensitive to numerical error: protect them before moving the model.",
    "HIGH": "The model breaks under small numerical error: do not move it as it is.",
    NOT_MEASURABLE: "This run can't say whether the model may be moved: it measured too little to be sure.",
}
WIDEST = 0.2  # an interval of the clean score that is wider than this is no criterion to pass
WANTED = 0.05  # half the width of one that is


def plain_words(
    frame: Frame, found: Sections, level: str, wanted: Sequence[Recommendation], next_step: str
) -> PlainWords:
    """Up to three short paragraphs; every number in them is elsewhere in the report with its interval."""
    risk = f"{_MEANING[level]} {_loss(frame, found)}".strip()
    if level == NOT_MEASURABLE:
        return PlainWords(risk, next_step, _success(frame, found))
    if not wanted:
        return PlainWords(risk, "Nothing beyond the usual validation.", "")
    urgent = sum(one.priority in ("CRITICAL", "HIGH") for one in wanted)
    named = ", ".join(one.component for one in wanted[:3]) + (" and others" if len(wanted) > 3 else "")
    things = f"{len(wanted)} {'item' if len(wanted) == 1 else 'items'}" + (
        f", {urgent} of them urgent" if urgent else ""
    )
    return PlainWords(risk, f"Look at {things}: {named}. The recommendations say how.", _success(frame, found))


def _success(frame: Frame, found: Sections) -> str:
    """A criterion that a device can pass or fail, or how many samples it would take to have one."""
    baseline = found.metrics.baseline
    if baseline is None or not baseline.measurable or frame.metric == "agreement":  # the clean model agrees with itself
        return ""
    clean = baseline.metrics.get(frame.metric)
    if clean is None or clean.value is None or clean.low is None or clean.high is None:
        return ""
    metric = metric_name(frame.metric_name)
    if frame.measure != "custom" and clean.high - clean.low > WIDEST:
        needed = math.ceil(1.96**2 * max(clean.value * (1 - clean.value), 0.05) / WANTED**2)
        return (
            f"{clean.n} samples are too few for a pass criterion: the {metric} on this data is known to "
            f"{percent(clean.low)} to {percent(clean.high)}. With about {needed} samples it would be known to 5 points."
        )
    return (
        f"On the new device the {metric} on this data must be no lower than the interval measured here: "
        f"{percent(clean.low)} to {percent(clean.high)} (n = {clean.n})."
    )


def _loss(frame: Frame, found: Sections) -> str:
    """What noise everywhere costs, in a sentence."""
    loss = found.metrics.primary.relative_degradation
    if loss is None or loss.value is None or loss.low is None or loss.high is None:
        return ""
    return (
        f"With errors of {percent(frame.settings.scale, 0)} in its matrix products it loses {percent(loss.value, 0)} "
        f"of its {metric_name(frame.metric_name)} (95 % interval {percent(loss.low, 0)} to {percent(loss.high, 0)}, "
        f"{loss.n} samples)."
    )
