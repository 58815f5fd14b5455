"""The report for people who decide and don't compute: what it means, what is to be done, how to know that it worked."""

from __future__ import annotations

from typing import Any

from noisescope.findings import LIMITS, Recommendation, percent
from noisescope.findings.bands import NOT_MEASURABLE

_MEANING = {
    "LOW": "The model can be deployed with the usual checks: at the noise tried here nothing in it breaks.",
    "MODERATE": "The model can be deployed after a few targeted fixes: some of its parts do not stand numerical error.",
    "HIGH": "The model should not be moved as it is: several of its parts break under small numerical error.",
    NOT_MEASURABLE: "This run can't say whether the model may be deployed: what it measured was too little to be sure.",
}


def plain_words(level: str, wanted: list[Recommendation], sections: dict[str, Any], scale: float) -> dict[str, str]:
    """Three short paragraphs; every number in them stands elsewhere in the report with its interval."""
    urgent = [r for r in wanted if r.priority in ("CRITICAL", "HIGH")]
    words = {"risk": f"{_MEANING[level]} {_loss(sections, scale)}".strip()}
    if wanted:
        named = ", ".join(r.component for r in wanted[:3]) + (", ..." if len(wanted) > 3 else "")
        words["work"] = (
            f"{len(wanted)} {_plural(len(wanted), 'fix', 'fixes')}, {len(urgent)} of them urgent: {named}. Each is a "
            "change of precision, scaling or kernel settings, or a check of one operation on the device; none of them "
            "needs other hardware."
        )
    elif level == NOT_MEASURABLE:
        words["work"] = "First measure again with more samples; the next step above says how."
    else:
        words["work"] = "None beyond the usual validation."
    layers = sorted({layer for p in (sections.get("layer_analysis") or {}).get("avalanche_points", []) if p["sure"]
                     for layer in range(p["start"], p["end"] + 1)})  # fmt: skip
    where = f"layers {', '.join(map(str, layers))}" if layers else "the parts named above"
    words["success"] = (
        f"On the new device {where} differ from the old one by less than {percent(LIMITS['migration_mape'], 0)} on "
        "average (MAPE), and this diagnosis, run again after the fixes, no longer names them."
    )
    return words


def _loss(sections: dict[str, Any], scale: float) -> str:
    """What noise everywhere costs, in a sentence."""
    loss = sections["metrics"]["primary"]["relative_degradation"] or {}
    if loss.get("value") is None:
        return ""
    low, high = ("?" if loss[end] is None else f"{100 * max(loss[end], 0):.0f}" for end in ("low", "high"))
    return (
        f"With errors of {percent(scale, 0)} in its matrix products it loses {percent(loss['value'], 0)} of its right "
        f"answers (between {low} and {high} %, from {loss['n']} questions)."
    )


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
