"""What to do, from the ranked findings: the same order, each with the advice for its kind."""

from __future__ import annotations

from noisescope.diagnosis.ranking import RATED, STANDS_OUT, typical_nats
from noisescope.diagnosis.sections import ChannelAnalysis, Sections
from noisescope.findings import ADVICE, Finding, Recommendation, by_priority, operator_advice, outlier_advice
from noisescope.findings.values import Urgency

FAR = 2 * STANDS_OUT  # times the nats of the median layer: look here first, though no loss was significant


def recommendations(found: Sections, ranked: list[Finding]) -> list[Recommendation]:
    """One for each finding about a place, an operator or a module with outlier channels."""
    typical = typical_nats(found.layer_analysis)
    wanted = []
    for finding in ranked:
        if finding.unit == "count":
            wanted.append(Recommendation("CRITICAL", finding.component, finding.statement, _advice(found, finding)))
        elif finding.unit == "share" and finding.severity in RATED:
            priority = _urgency(finding)
            wanted.append(Recommendation(priority, finding.component, finding.statement, _advice(found, finding)))
        elif finding.unit == "nats" and finding.nats is not None:
            priority = "MEDIUM" if finding.nats >= FAR * typical else "LOW"
            wanted.append(Recommendation(priority, finding.component, finding.statement, _advice(found, finding)))
        elif finding.unit == "ratio" and found.channel_analysis is not None:
            wanted.append(_channel_advice(finding, found.channel_analysis))
    return by_priority(wanted)


def _urgency(finding: Finding) -> Urgency:
    if finding.severity == "CRITICAL" or finding.severity == "HIGH":
        return finding.severity
    return "MEDIUM"


def _advice(found: Sections, finding: Finding) -> str:
    target = finding.target
    if target.kind == "channels":
        return "Find where the numbers leave the range of the dtype: noisescope locate MODEL names the first operator."
    if target.kind == "operator":
        return operator_advice(target.operators[0])
    if target.kind == "cell":
        return f"{operator_advice(target.operators[0])} {ADVICE['critical layers']}"
    points = found.layer_analysis.avalanche_points if found.layer_analysis is not None else ()
    inside = any(point.decided and set(target.layers) <= set(range(point.start, point.end + 1)) for point in points)
    return ADVICE["avalanche"] if target.layers and inside else ADVICE["critical layers"]


def _channel_advice(finding: Finding, channels: ChannelAnalysis) -> Recommendation:
    row = channels.per_layer[finding.component]
    action = f"{outlier_advice()} For W8A8: {outlier_advice('W8A8')}"
    priority: Urgency = "MEDIUM" if row.band == "CRITICAL" and row.operator == "linear" else "LOW"
    return Recommendation(priority, finding.component, finding.statement, action)
