"""What a number means: bands, findings, risk scores, avalanche points and advice. No torch.

Bands, risk and avalanches are for injected task metrics; a predicted divergence in nats has a rank and no band. What
could not be measured stays "not measurable" and never falls into a good band.
"""

from noisescope.findings.advice import ADVICE, operator_advice, outlier_advice
from noisescope.findings.avalanche import PointAvalanche, Window, avalanche_points, neighbours
from noisescope.findings.bands import (
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
    band_range,
    meaning,
)
from noisescope.findings.risk import Assessment, Risk, Term, dashboard_risk, hardware_assessment, report_risk
from noisescope.findings.values import (
    BORDERLINE,
    METRIC_NAMES,
    NOT_RATED,
    PRIORITIES,
    SEVERITIES,
    Finding,
    Recommendation,
    Target,
    by_priority,
    metric_name,
    percent,
)

__all__ = [
    "ADVICE",
    "BANDS",
    "BORDERLINE",
    "DASHBOARD_POINTS",
    "EXPECTED_CORRELATIONS",
    "GAIN_ROUND_OFF",
    "LIMITS",
    "METRIC_NAMES",
    "NOT_MEASURABLE",
    "NOT_RATED",
    "PRIORITIES",
    "REPORT_POINTS",
    "ROUND_OFF",
    "SEVERITIES",
    "Assessment",
    "Bands",
    "Finding",
    "PointAvalanche",
    "Recommendation",
    "Risk",
    "Target",
    "Term",
    "Window",
    "as_expected",
    "avalanche_points",
    "band",
    "band_range",
    "by_priority",
    "dashboard_risk",
    "hardware_assessment",
    "meaning",
    "metric_name",
    "neighbours",
    "operator_advice",
    "outlier_advice",
    "percent",
    "report_risk",
]
