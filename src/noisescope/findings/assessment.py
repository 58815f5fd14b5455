"""The dashboard's risk with two devices compared: never below what their worst measure says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from noisescope.findings.bands import BANDS, NOT_MEASURABLE, band
from noisescope.findings.risk import Risk, dashboard_risk

_LEVELS = BANDS["dashboard_risk"].names  # LOW, MODERATE, HIGH
# Bands of two devices' measures as levels of risk; those that are not here are LOW.
_LEVEL_OF = {
    "NOTICEABLE": "MODERATE",
    "MODERATE": "MODERATE",
    "CRITICAL": "HIGH",
    "SIGNIFICANT": "HIGH",
    "POOR": "HIGH",
}
_NAMES = {"mae": "MAE", "mape": "MAPE", "pearson": "correlation"}


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
            return f"NOT MEASURABLE - {reasons}, so the risk is not known"
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
    levels = {name: _LEVEL_OF.get(band(name, value), "LOW") for name, value in measures.items()}
    worst = max(levels.values(), key=_LEVELS.index)
    if _LEVELS.index(worst) > (_LEVELS.index(score.level) if score.level in _LEVELS else 0):
        reasons = tuple(
            f"{_NAMES[name]} {value:.3g} is {band(name, value)}"
            for name, value in measures.items()
            if levels[name] == worst
        )
        return Assessment(worst, BANDS["dashboard_risk"].meanings[_LEVELS.index(worst)], reasons, score)
    unknown = tuple(term.reason for term in score.terms if term.points is None)
    return Assessment(score.level, score.meaning, unknown if score.level == NOT_MEASURABLE else (), score)
