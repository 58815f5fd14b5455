"""What a number means: bands, findings, risk scores, avalanche points and advice. No torch, no numpy.

Bands, risk and avalanches are for injected task metrics; a predicted divergence in nats has a rank and no band. What
could not be measured stays "not measurable" and never falls into a good band.
"""

from noisescope.findings.advice import ADVICE, operator_advice, outlier_advice
from noisescope.findings.assessment import Assessment, hardware_assessment
from noisescope.findings.avalanche import AvalanchePoint, Window, avalanche_points
from noisescope.findings.bands import (
    ADAPTIVE_RULES,
    BANDS,
    DASHBOARD_POINTS,
    EXPECTED_CORRELATIONS,
    GAIN_ROUND_OFF,
    LIMITS,
    NOT_MEASURABLE,
    REPORT_POINTS,
    ROUND_OFF,
    Bands,
    as_expected,
    band,
    meaning,
)
from noisescope.findings.risk import Risk, Term, dashboard_risk, report_risk
from noisescope.findings.values import (
    EVIDENCE,
    PRIORITIES,
    SEVERITIES,
    Finding,
    Recommendation,
    by_priority,
    by_severity,
    percent,
)

__all__ = [
    "ADAPTIVE_RULES",
    "ADVICE",
    "BANDS",
    "DASHBOARD_POINTS",
    "EVIDENCE",
    "EXPECTED_CORRELATIONS",
    "GAIN_ROUND_OFF",
    "LIMITS",
    "NOT_MEASURABLE",
    "PRIORITIES",
    "REPORT_POINTS",
    "ROUND_OFF",
    "SEVERITIES",
    "Assessment",
    "AvalanchePoint",
    "Bands",
    "Finding",
    "Recommendation",
    "Risk",
    "Term",
    "Window",
    "as_expected",
    "avalanche_points",
    "band",
    "by_priority",
    "by_severity",
    "dashboard_risk",
    "hardware_assessment",
    "meaning",
    "operator_advice",
    "outlier_advice",
    "percent",
    "report_risk",
]
