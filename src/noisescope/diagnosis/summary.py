"""From rows to what a reader needs first: findings, recommendations, risk, the next step, and what was not seen."""

from __future__ import annotations

from typing import Any

from noisescope.diagnosis.effects import SURE, Row
from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.plain_words import plain_words
from noisescope.findings import (
    ADVICE,
    LIMITS,
    NOT_MEASURABLE,
    Finding,
    Recommendation,
    Risk,
    by_priority,
    by_severity,
    operator_advice,
    outlier_advice,
    percent,
    report_risk,
)
from noisescope.sites import GROUPS

LEAST_POWER = 0.15  # a run that could have missed a larger loss than this can't call a model low-risk
MOST_CHANNEL_FINDINGS = 3


def findings(frame: Frame, sections: dict[str, Any]) -> list[Finding]:
    found: list[Finding] = []
    if frame.settings.effort == "screen":
        found += _predicted_findings(sections)
    for name, row in (sections.get("operator_analysis") or {}).items():
        found += _loss_finding(f"operator {name}", row, "sensitivity_band")
    layers = sections.get("layer_analysis") or {}
    for point in layers.get("avalanche_points", []):
        if not point["sure"]:
            continue
        found.append(
            Finding(
                point["severity"],
                f"layers {point['start']} to {point['end']}",
                f"avalanche point: noise in these layers costs {percent(point['degradation'])} of the accuracy, "
                f"{_beside(point)}",
                point["degradation"],
                (point["interval"]["low"], point["interval"]["high"]),
                point["interval"]["n"],
            )
        )
    for row in layers.get("windows", []):
        index = row.get("interaction_index")
        if row["layer_range"] in layers["compounding"] and index is not None:
            found.append(
                Finding(
                    "MODERATE",
                    f"layers {row['start_layer']} to {row['end_layer']}",
                    f"errors compound: noise in all diverges {index['value']:.2f} times as far as in each alone",
                    index["value"],
                    (index["low"], index["high"]),
                    index["n"],
                )
            )
    for row in layers.get("layers", []):
        found += [one for one in _loss_finding(f"layer {row['layer']}", row, "band") if one.severity != NOT_MEASURABLE]
    for place, row in layers.get("places", {}).items():
        found += _loss_finding(str(place), row, "band")
    found += _parted_findings(layers)
    found += _channel_findings(sections.get("channel_analysis") or {})
    return by_severity(found)


def _beside(point: Row) -> str:
    """How many times what the worse of its neighbours costs."""
    worst = max(point.get("neighbours") or [0.0])
    return f"{point['degradation'] / worst:.1f} times what those beside cost" if worst > 0 else "those beside none"


def _predicted_findings(sections: dict[str, Any]) -> list[Finding]:
    """The operator, the layer and the place with the largest predicted divergence: a rank, no band."""
    layers = sections.get("layer_analysis") or {}
    ranked = {
        "operator": {
            name: row for name, row in (sections.get("operator_analysis") or {}).items() if name not in GROUPS
        },
        "layer": {row["layer"]: row for row in layers.get("layers", [])},
        "place": layers.get("places", {}),
    }
    found = []
    for kind, rows in ranked.items():
        known = {name: row["predicted_kl"] for name, row in rows.items() if row.get("predicted_kl", {}).get("value")}
        if known:
            worst = max(known, key=lambda name: known[name]["value"])
            kl = known[worst]
            statement = f"predicted to diverge most of its kind: {kl['value']:.3g} nats a token"
            span = (kl["low"], kl["high"])
            found.append(Finding("LOW", f"{kind} {worst}", statement, kl["value"], span, kl["n"], "predicted"))
    return found


def _loss_finding(component: str, row: Row, which: str) -> list[Finding]:
    if row.get("evidence") == "failed":
        return [Finding("not measurable", component, f"could not be measured: {row['error']}", None, None, 0)]
    if row.get("evidence") != "injected" or row["degradation"]["value"] is None:
        return []
    severity = {"CRITICAL": "CRITICAL", "HIGH": "HIGH", "MODERATE": "MODERATE"}.get(row[which])
    if severity is None:
        return []
    loss = row["degradation"]
    if row.get("p_corrected", 1.0) >= SURE:
        unsure = f"which is not sure (corrected p = {row['p_corrected']:.2g}): raise --samples"
        statement = f"may cost {percent(loss['value'])} of the accuracy, {unsure}"
        return [Finding(NOT_MEASURABLE, component, statement, loss["value"], (loss["low"], loss["high"]), loss["n"])]
    accuracy = f"{percent(row['baseline_acc'])} to {percent(row['noisy_acc'])}"
    statement = f"noise here costs {percent(loss['value'])} of the accuracy ({accuracy})"
    return [Finding(severity, component, statement, loss["value"], (loss["low"], loss["high"]), loss["n"])]


def _parted_findings(layers: Row) -> list[Finding]:
    """Where injection and prediction differ the model is not linear: those sites matter most."""
    found = []
    rows = [(f"layer {row['layer']}, {row['operator']}", row) for row in layers.get("map", [])]
    rows += [(f"layer {row['layer']}", row) for row in layers.get("layers", [])]
    rows += [(str(place), row) for place, row in layers.get("places", {}).items()]
    for component, row in rows:
        if row.get("parted"):
            ratio = row["injected_over_predicted"]
            found.append(
                Finding(
                    "MODERATE",
                    component,
                    f"injected noise diverges {ratio['value']:.2f} times as far as predicted: not linear here",
                    ratio["value"],
                    (ratio["low"], ratio["high"]),
                    ratio["n"],
                )
            )
    return found


def _channel_findings(channels: Row) -> list[Finding]:
    """By the largest ratio: one or two massive channels are the worst case, however small their share."""
    rows = channels.get("per_layer", {})
    worst = sorted(rows, key=lambda name: (-rows[name]["nonfinite_channels"], -rows[name]["max_ratio"]))
    found = []
    for name in worst[:MOST_CHANNEL_FINDINGS]:
        row = rows[name]
        if row["nonfinite_channels"]:
            statement = (
                f"{row['nonfinite_channels']} of {row['total_channels']} channels hold NaN or infinity, without noise"
            )
            found.append(Finding("CRITICAL", name, statement, row["nonfinite_channels"], None, channels["n"]))
        if row["num_outliers"]:
            severity = {"CRITICAL": "HIGH", "HIGH": "MODERATE", "MODERATE": "LOW"}.get(row["band"], "LOW")
            statement = (
                f"{row['num_outliers']} of {row['total_channels']} channels are outliers, "
                f"the largest {row['max_ratio']:.1f} times the median"
            )
            found.append(Finding(severity, name, statement, row["max_ratio"], None, channels["n"]))
    return found


def counted_once(operators: dict[str, Row]) -> list[str]:
    """Names that stand for every operator once: a group that was measured as such stands for its parts."""
    groups = [name for name in operators if name in GROUPS and operators[name]["evidence"] != "absent"]
    parts = {part for name in groups for part in GROUPS[name][0]}
    return [name for name in operators if name in groups or name not in parts | GROUPS.keys()]


def recommendations(frame: Frame, sections: dict[str, Any]) -> list[Recommendation]:
    wanted: list[Recommendation] = []
    operators = sections.get("operator_analysis") or {}
    for name, row in operators.items():
        score = row.get("sensitivity_score")
        if name in counted_once(operators) and _critical(row):
            assert score is not None
            issue = f"{percent(row['degradation']['value'])} accuracy loss with {frame.settings.scale:g} noise"
            wanted.append(Recommendation("HIGH", f"Operator: {name}", issue, operator_advice(name)))
    layers = sections.get("layer_analysis") or {}
    for point in (point for point in layers.get("avalanche_points", []) if point["sure"]):
        issue = f"{percent(point['degradation'])} degradation (avalanche point)"
        wanted.append(Recommendation(point["severity"], f"Layers: {point['layer_range']}", issue, ADVICE["avalanche"]))
    for place, row in layers.get("places", {}).items():
        if row.get("band") in ("HIGH", "CRITICAL") and row.get("p_corrected", 1.0) < SURE:
            issue = f"{percent(row['degradation']['value'])} degradation from noise in {place} alone"
            wanted.append(Recommendation("HIGH", f"Place: {place}", issue, ADVICE["critical layers"]))
    channels = sections.get("channel_analysis") or {}
    rows = channels.get("per_layer", {})
    for name in sorted(rows, key=lambda name: -rows[name]["max_ratio"])[:MOST_CHANNEL_FINDINGS]:
        row = rows[name]
        if row["num_outliers"]:
            issue = f"{row['num_outliers']} outlier channels, max_ratio = {row['max_ratio']:.1f} x"
            priority = "HIGH" if row["band"] == "CRITICAL" else "MEDIUM"
            action = f"{outlier_advice()} For W8A8: {outlier_advice('W8A8')}"
            wanted.append(Recommendation(priority, f"Channels: {name}", issue, action))
    return by_priority(wanted)


def executive_summary(
    frame: Frame, sections: dict[str, Any], found: list[Finding], wanted: list[Recommendation]
) -> Row:
    operators = sections.get("operator_analysis")
    layers = sections.get("layer_analysis")
    channels = sections.get("channel_analysis") or {}
    scores = {
        name: row.get("sensitivity_score") if _critical(row) or row.get("sensitivity_score") is None else 0.0
        for name, row in (operators or {}).items()
        if name in counted_once(operators or {}) and row["evidence"] != "absent"
    }
    points = None if layers is None else [point for point in layers["avalanche_points"] if point["sure"]]
    measured = layers is not None and any(row["evidence"] == "injected" for row in layers["windows"])
    summary = channels.get("summary")
    risk = report_risk(
        scores,
        len(points) if measured and points is not None else None,
        None if summary is None else summary["total_outlier_channels"],
        None if summary is None else summary["total_channels"],
    )
    critical = [name for name in scores if _critical((operators or {})[name])]
    words = _risk_words(risk, smallest_seen(sections))
    level, step = words.split(" - ")[0], next_step(frame, sections, found)
    return {
        "critical_operators": critical,
        "num_critical_operators": len(critical),
        "avalanche_points": points or [],
        "num_avalanche_points": len(points or []),
        "total_outlier_channels": None if summary is None else summary["total_outlier_channels"],
        "overall_risk_level": words,
        "report_risk": risk.to_dict(),
        "dashboard_risk": sections["metrics"]["risk"],
        "top_findings": [finding.to_dict() for finding in found[:3]],
        "next_step": step,
        "in_plain_words": plain_words(level, wanted, sections, frame.settings.scale, frame.metric, step),
    }


def _critical(row: Row) -> bool:
    """A score above the limit, of a loss that is sure."""
    score = row.get("sensitivity_score")
    return score is not None and score > LIMITS["critical_operator_score"] and row.get("p_corrected", 1.0) < SURE


def smallest_seen(sections: dict[str, Any]) -> float | None:
    """The loss that every operator would have shown; None where no loss could be found, or none was looked for."""
    rows = [row for row in (sections.get("operator_analysis") or {}).values() if row["evidence"] == "injected"]
    seen = [row.get("smallest_detectable") for row in rows]
    return None if not seen or any(loss is None for loss in seen) else max(seen)


def _risk_words(risk: Risk, smallest: float | None) -> str:
    """LOW is for runs that could have seen otherwise."""
    if risk.level == "LOW" and (smallest is None or smallest > LEAST_POWER):
        what = "any loss" if smallest is None else f"a loss below {percent(smallest, 0)}"
        return f"{NOT_MEASURABLE} - too few samples to see {what}"
    return risk.level if risk.level == risk.meaning else f"{risk.level} - {risk.meaning}"


def next_step(frame: Frame, sections: dict[str, Any], found: list[Finding]) -> str:
    if frame.settings.effort == "screen":
        return "These are predictions. Run again with --effort standard into the same folder to confirm what matters."
    baseline = sections["metrics"]["baseline"]
    if baseline and not baseline["measurable"]:
        clean = baseline[frame.metric]
        low, high = ("..." if end is None else percent(end) for end in (clean["low"], clean["high"]))
        return (
            f"The clean {frame.metric} is {percent(clean['value'])} [{low}, {high}] (n = {clean['n']}) and does not "
            f"stand clear of chance ({percent(frame.chance)}), so no loss can be measured: raise --samples, or give "
            "data on which the model answers rightly (--data)."
        )
    urgent = [finding.component for finding in found if finding.severity in ("CRITICAL", "HIGH")]
    if urgent:  # a place says more than "every product": the narrowest first
        first = min(urgent, key=lambda name: (not name.startswith("layer "), not name.startswith("layers ")))
        return f"Validate {first} on the target hardware first; the recommendations say what to look at."
    rows = [row for row in (sections.get("operator_analysis") or {}).values() if row["evidence"] != "absent"]
    rows += (sections.get("layer_analysis") or {}).get("windows", [])
    if rows and all(row["evidence"] == "failed" for row in rows):
        return f"Every trial failed; the first says: {rows[0]['error']}"
    if not rows and sections.get("channel_analysis"):
        return "Only channels were looked at: run again with --level operator,layer to see what noise costs."
    if not any(row["evidence"] == "injected" for row in rows):
        return "No noise was injected into operators or layers: choose --level and --operators that the model has."
    smallest = smallest_seen(sections)
    if smallest is None or smallest > LEAST_POWER:
        return "Nothing is sure with so few samples: raise --samples."
    return (
        f"Nothing stands out at this noise scale; a loss of {percent(smallest)} in one operator would have been seen."
    )


def could_not_see(frame: Frame, sections: dict[str, Any], notes: list[str]) -> list[str]:
    """Limits of this very run, in plain words."""
    limits = list(notes)
    absent = [name for name, row in (sections.get("operator_analysis") or {}).items() if row["evidence"] == "absent"]
    if absent:
        limits.append(f"the model computes no {', '.join(absent)}")
    smallest = smallest_seen(sections)
    if smallest is None and sections.get("operator_analysis") and frame.settings.effort != "screen":
        limits.append("too few samples: in some operator no loss of accuracy could have been found")
    elif smallest is not None:
        limits.append(
            f"a loss of accuracy below {percent(smallest)} in one operator could have been missed (80 % power, "
            "corrected for all looks); more samples see less"
        )
    windows = [
        row for row in (sections.get("layer_analysis") or {}).get("windows", []) if row["evidence"] == "injected"
    ]
    seen = [row["smallest_detectable"] for row in windows if row.get("smallest_detectable") is not None]
    if seen:
        limits.append(f"a loss of accuracy below {percent(max(seen))} in one window could have been missed")
    elif windows:
        limits.append("too few samples: in no window could a loss of accuracy have been found")
    if frame.settings.effort != "full" and sections.get("layer_analysis"):
        limits.append(
            "layers and cells of the layer x operator map that are marked predicted were not injected: a prediction "
            "adds up over sites and can't see errors that compound (--effort full injects all)"
        )
    limits.append("noise falls on operator outputs, forward; a fault of another form may act otherwise")
    return limits
