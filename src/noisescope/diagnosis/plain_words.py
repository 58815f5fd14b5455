"""The report for people who decide and don't compute: what it means, what is to be done, how to know that it worked."""

from __future__ import annotations

from typing import Any

from noisescope.findings import Recommendation, percent
from noisescope.findings.bands import NOT_MEASURABLE

_MEANING = {
    "LOW": "At the noise tried here nothing in the model breaks: the usual checks on the new device will do.",
    "MODERATE": "Some parts of the model do not stand numerical error: look after them before it is moved.",
    "HIGH": "Several parts of the model break under small numerical error: it should not be moved as it is.",
    NOT_MEASURABLE: "This run can't say whether the model may be moved: what it measured was too little to be sure.",
}


def plain_words(
    level: str, wanted: list[Recommendation], sections: dict[str, Any], scale: float, metric: str, next_step: str
) -> dict[str, str]:
    """Up to three short paragraphs; every number in them stands elsewhere in the report with its interval."""
    words = {"risk": f"{_MEANING[level]} {_loss(sections, scale)}".strip()}
    if not wanted:
        words["work"] = next_step if level == NOT_MEASURABLE else "Nothing beyond the usual validation."
        return words
    urgent = sum(r.priority in ("CRITICAL", "HIGH") for r in wanted)
    named = ", ".join(r.component for r in wanted[:3]) + (", ..." if len(wanted) > 3 else "")
    count = f"{len(wanted)} {'thing' if len(wanted) == 1 else 'things'}, {urgent} of them urgent"
    words["work"] = f"Look after {count}: {named}. The recommendations say how."
    clean = (sections["metrics"]["baseline"] or {}).get(metric)
    if clean and clean["low"] is not None and clean["high"] is not None:
        words["success"] = (
            f"On the new device the model's {metric.replace('_', ' ')} on this data is no lower than the interval "
            f"measured here: {percent(clean['low'])} to {percent(clean['high'])} (n = {clean['n']})."
        )
    return words


def _loss(sections: dict[str, Any], scale: float) -> str:
    """What noise everywhere costs, in a sentence."""
    loss = sections["metrics"]["primary"]["relative_degradation"] or {}
    if loss.get("value") is None or loss["low"] is None or loss["high"] is None:
        return ""
    return (
        f"With errors of {percent(scale, 0)} in its matrix products it loses {percent(loss['value'], 0)} of its right "
        f"answers (95 % interval {percent(loss['low'], 0)} to {percent(loss['high'], 0)}, from {loss['n']} samples)."
    )
