"""A finding and a recommendation as values, and the order in which a reader should see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from noisescope.errors import unknown
from noisescope.findings.bands import NOT_MEASURABLE

# Worst first. What could not be measured stands before what was measured and found harmless.
SEVERITIES = ("CRITICAL", "HIGH", "MODERATE", NOT_MEASURABLE, "LOW")
PRIORITIES = ("CRITICAL", "HIGH", "MEDIUM", "LOW")
EVIDENCE = ("injected", "predicted")


@dataclass(frozen=True)
class Finding:
    """A conclusion with the number behind it.

    n counts samples; `interval` is (low, high), where an end may be None (no bound). `evidence` says whether noise was
    injected and the score measured again, or the effect was predicted from one backward pass.
    """

    severity: str
    component: str
    statement: str
    value: float | None
    interval: tuple[float | None, float | None] | None
    n: int
    evidence: str = "injected"

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise unknown("severity", self.severity, SEVERITIES)
        if self.evidence not in EVIDENCE:
            raise unknown("evidence", self.evidence, EVIDENCE)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True)
class Recommendation:
    """What to do about a component, and why."""

    priority: str
    component: str
    issue: str
    action: str

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise unknown("priority", self.priority, PRIORITIES)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; alike severe ones by the size of the number, those without one last."""

    def key(finding: Finding) -> tuple[int, bool, float]:
        return SEVERITIES.index(finding.severity), finding.value is None, -abs(finding.value or 0.0)

    return sorted(findings, key=key)


def by_priority(recommendations: Iterable[Recommendation]) -> list[Recommendation]:
    """Most urgent first; alike urgent ones keep their order."""
    return sorted(recommendations, key=lambda r: PRIORITIES.index(r.priority))


def percent(share: float, digits: int = 1) -> str:
    """A share in words: 0.123 is "12.3 %"."""
    return f"{100 * share:.{digits}f} %"
