"""A diagnosis with what may be added to it later: plans, the check of its findings, located faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from noisescope.diagnosis.fault_check import CheckResult
from noisescope.diagnosis.report import Diagnosis
from noisescope.jsonform import Json, from_json
from noisescope.plans.migration import MigrationPlan
from noisescope.plans.precision_results import PrecisionPlan
from noisescope.sites import NamedPlace


@dataclass(frozen=True)
class LocatedSuspect:
    """A site under suspicion. `channels` () means all of them; `details` depend on the method."""

    place: NamedPlace
    operator: str
    module: str
    tensor: str
    occurrence: int
    channels: tuple[int, ...]
    period: int | None
    fault_class: str
    confidence: float
    evidence: str
    score: float
    details: Mapping[str, Json]


@dataclass(frozen=True)
class LocateSection:
    """What computes wrongly. `simulated` names a fault that was put in on purpose, with the elements it changed."""

    verdict: Literal["healthy", "faulty", "undecided"]
    method: str
    suspects: tuple[LocatedSuspect, ...]
    smallest_visible: Mapping[str, Json]
    forwards: float
    checked: int
    notes: tuple[str, ...]
    unseen: tuple[str, ...]
    simulated: str | None
    elements_changed: int | None

    @classmethod
    def of(
        cls, verdict: Mapping[str, Json], *, simulated: str | None = None, elements_changed: int | None = None
    ) -> LocateSection:
        """From the JSON form of a locator's verdict."""
        return from_json(cls, {**verdict, "simulated": simulated, "elements_changed": elements_changed}, "locate")


@dataclass(frozen=True, kw_only=True)
class DiagnosisReport(Diagnosis):
    """Everything a diagnosis found, and what was added to it."""

    migration_plan: MigrationPlan | None = None
    precision_plan: PrecisionPlan | None = None
    check: CheckResult | None = None
    locate: LocateSection | None = None

    @classmethod
    def from_diagnosis(cls, found: Diagnosis) -> DiagnosisReport:
        return found if isinstance(found, cls) else cls(**vars(found))
