"""The two risk scores: the report's (what the diagnosis found) and the dashboard's (what the metrics say).

They answer different questions and may disagree, so each carries its name and the terms it was made of. With two
devices compared, the assessment is never below what their worst measure says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noisescope.errors import InvalidInput
from noisescope.findings.thresholds import (
    BANDS,
    DASHBOARD_POINTS,
    LIMITS,
    NONFINITE_POINTS,
    NOT_MEASURABLE,
    REPORT_POINTS,
    RiskLevel,
    RiskName,
    band,
    meaning,
)


@dataclass(frozen=True)
class Term:
    """One term of a risk score; points are None if it could not be measured."""

    reason: str
    points: float | None


@dataclass(frozen=True)
class Risk:
    """A risk score with its level. If a term is missing the score is a lower bound, and the level is never LOW."""

    name: RiskName
    score: float
    level: RiskLevel
    meaning: str
    terms: tuple[Term, ...]


# What could not be measured is not called low.
LEVELS: tuple[RiskLevel, ...] = ("LOW", NOT_MEASURABLE, "MODERATE", "HIGH")
_MODERATE, _HIGH = ("NOTICEABLE", "MODERATE"), ("CRITICAL", "SIGNIFICANT", "POOR")  # bands of two devices' measures
_NAMES = {"mae": "MAE", "mape": "MAPE", "pearson": "correlation"}


def higher_level(one: RiskLevel, other: RiskLevel) -> RiskLevel:
    """The more serious of two risk levels."""
    return max(one, other, key=LEVELS.index)


def report_risk(
    sensitivity_scores: Mapping[str, float | None],
    avalanche_points: int | None,
    outlier_channels: int | None,
    channels: int | None,
) -> Risk:
    """30 points a critical operator, 25 an avalanche point, 5 a percent of outlier channels; > 100 HIGH, > 50 MODERATE.

    `sensitivity_scores` holds each operator once: a group or its parts, never both. `channels` is the number really
    captured. None is what was not tested or could not be measured.
    """
    terms = []
    for operator, score in sensitivity_scores.items():
        if _missing(score):
            terms.append(Term(f"operator {operator}: {NOT_MEASURABLE}", None))
        elif score is not None and score > LIMITS["critical_operator_score"]:
            terms.append(Term(f"critical operator: {operator}", REPORT_POINTS["critical operator"]))
    if not sensitivity_scores:
        terms.append(Term("operators: not measured", None))
    if avalanche_points is None:
        terms.append(Term("avalanche points: not measured", None))
    elif avalanche_points:
        points = avalanche_points * REPORT_POINTS["avalanche point"]
        terms.append(Term(f"avalanche points: {avalanche_points}", points))
    if outlier_channels is None or not channels:
        terms.append(Term("outlier channels: not measured", None))
    elif not 0 <= outlier_channels <= channels:
        raise InvalidInput(
            f"{outlier_channels} outlier channels of {channels} is impossible: give the actual channel counts"
        )
    elif outlier_channels:
        percent = 100 * outlier_channels / channels
        points = percent * REPORT_POINTS["percent of outlier channels"]
        terms.append(Term(f"outlier channels: {percent:.3g} % of {channels}", points))
    return _risk("report_risk", terms)


def dashboard_risk(degradation: float | None, mape: float | None = None) -> Risk:
    """50 / 30 / 10 points by degradation, 30 / 15 by MAPE between two devices; > 60 HIGH, > 30 MODERATE.

    mape None means that no second device was compared, which costs nothing; degradation None is not measurable. An
    infinite mape, where one device alone has NaN or infinite numbers, is HIGH by itself.
    """
    terms = []
    if mape == math.inf:
        terms.append(Term("NaN or infinite numbers on one device only", NONFINITE_POINTS))
        mape = None
    if _missing(degradation):
        terms.append(Term(f"degradation: {NOT_MEASURABLE}", None))
    for name, value in (("degradation", degradation), ("mape", mape)):
        for limit, points in DASHBOARD_POINTS[name]:
            if value is not None and value > limit:
                terms.append(Term(f"{name} {value:.3g} above {limit:g}", points))
                break
    if mape is not None and _missing(mape):
        terms.append(Term(f"mape: {NOT_MEASURABLE}", None))
    return _risk("dashboard_risk", terms)


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _risk(name: RiskName, terms: list[Term]) -> Risk:
    score = math.fsum(term.points for term in terms if term.points is not None)
    # With a term missing the score can only rise: MODERATE and HIGH stand as "at least", LOW would be a guess.
    unknown_part = any(term.points is None for term in terms)
    if unknown_part and band(name, score) == "LOW":
        return Risk(name, score, NOT_MEASURABLE, NOT_MEASURABLE, tuple(terms))
    return Risk(name, score, band(name, score), meaning(name, score), tuple(terms))


@dataclass(frozen=True)
class Assessment:
    """A risk level, and the score it started from."""

    level: str
    meaning: str
    reasons: tuple[str, ...]  # the measures that raised the level above the score's, or what is not measurable
    score: Risk

    def __str__(self) -> str:
        reasons = "; ".join(self.reasons)
        if self.level == NOT_MEASURABLE:
            return f"NOT MEASURABLE - {reasons}, so the risk is unknown"
        return f"{self.level} RISK - {self.meaning}" + (f" ({reasons})" if reasons else "")


def hardware_assessment(
    degradation: float | None,
    *,
    mae: float | None = None,
    mape: float | None = None,
    correlation: float | None = None,
) -> Assessment:
    """The higher of `dashboard_risk`'s level and the worst band of MAE, MAPE and correlation between two devices.

    The score has no points for MAE and correlation, so by itself it can call devices LOW whose MAE is CRITICAL. What is
    None was not compared; an infinite or NaN mape is as in `dashboard_risk`.
    """
    score = dashboard_risk(degradation, mape)
    finite = None if mape is None or math.isinf(mape) else mape
    measures = {"mae": mae, "mape": finite, "pearson": correlation}
    bands = {name: band(name, value) for name, value in measures.items()}
    for level, alarming in (("HIGH", _HIGH), ("MODERATE", _MODERATE)):
        reasons = tuple(
            f"{_NAMES[name]} {measures[name]:.3g} is {found}" for name, found in bands.items() if found in alarming
        )
        if score.level in ("HIGH", level):
            break
        if reasons:
            return Assessment(level, BANDS["dashboard_risk"].meanings[level], reasons, score)
    unknown = tuple(term.reason for term in score.terms if term.points is None)
    return Assessment(score.level, score.meaning, unknown if score.level == NOT_MEASURABLE else (), score)
