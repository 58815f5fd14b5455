"""Fault tests as values: what is broken, what must hold then, and what came out.

`parameters` and `acceptance_criteria` have the columns of the original method notes in CSV and JSON: dictionaries whose
keys depend on the kind of test. Inside they are typed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from noisescope.errors import InvalidInput, unknown
from noisescope.findings import LIMITS
from noisescope.findings.verdicts import Verdict
from noisescope.jsonform import Json, to_json
from noisescope.stats import Estimate

COLUMNS = ("test_id", "component", "test_type", "parameters", "acceptance_criteria")
RECOVERY = f"< {LIMITS['fault_recovery_steps']:g} steps"


@dataclass(frozen=True)
class FaultParameters:
    """What is broken: `faults` are what `faulty` and `locate --simulate` take, all at once.

    `described` says the same in the words of the method notes, for people.
    """

    faults: tuple[str, ...]
    reason: str = ""
    described: Mapping[str, Json] = field(default_factory=dict)

    def columns(self) -> dict[str, Json]:
        reason = {"reason": self.reason} if self.reason else {}
        return {**to_json(self.described), **reason, "faults": list(self.faults)}


@dataclass(frozen=True)
class Criteria:
    """What must hold under the fault; None and False: not asked for."""

    max_degradation: float | None = None
    max_nan_rate: float | None = None
    recovery_time: str | None = None
    detection_required: bool = False

    def columns(self) -> dict[str, Json]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


CRITERIA = tuple(one.name for one in fields(Criteria))


@dataclass(frozen=True)
class FaultTest:
    """One test; one that breaks nothing, or could never fail, is refused."""

    test_id: str
    component: str
    test_type: str
    parameters: FaultParameters
    acceptance_criteria: Criteria

    def __post_init__(self) -> None:
        _check_faults(self.test_id, self.parameters.faults)
        _check_criteria(self.test_id, self.acceptance_criteria.columns())

    @property
    def name(self) -> str:
        return f"{self.test_id} ({self.component})"

    def to_dict(self) -> dict[str, Json]:
        """The columns of the method notes."""
        cells = (self.parameters.columns(), self.acceptance_criteria.columns())
        return dict(zip(COLUMNS, (self.test_id, self.component, self.test_type, *cells), strict=True))


def from_columns(case: object) -> FaultTest:
    """A test from its columns, as `to_dict` gives them."""
    if not isinstance(case, Mapping) or set(case) != set(COLUMNS):
        came = ", ".join(map(str, case)) if isinstance(case, Mapping) else f"a {type(case).__name__}"
        raise InvalidInput(f"a test case has the columns {', '.join(COLUMNS)}; got {came}")
    test_id = str(case["test_id"])
    for name in ("parameters", "acceptance_criteria"):
        if not isinstance(case[name], Mapping):
            raise InvalidInput(f"{test_id}: {name} is a dictionary (a CSV has it as JSON); got {case[name]!r}")
    described, criteria = dict(case["parameters"]), case["acceptance_criteria"]
    faults, reason = described.pop("faults", None), described.pop("reason", "")
    _check_faults(test_id, faults)
    _check_criteria(test_id, criteria)
    parameters = FaultParameters(tuple(faults), str(reason), described)
    return FaultTest(test_id, str(case["component"]), str(case["test_type"]), parameters, Criteria(**criteria))


def _check_faults(test_id: str, faults: object) -> None:
    if not isinstance(faults, (list, tuple)) or not faults or not all(isinstance(fault, str) for fault in faults):
        raise InvalidInput(
            f"{test_id}: parameters['faults'] lists what to break, such as 'gain:0.05@7/linear'; got {faults!r}"
        )


def _check_criteria(test_id: str, cell: Mapping[str, Json]) -> None:
    if not cell:
        raise InvalidInput(f"{test_id} has no acceptance criteria, so it can't fail: {', '.join(CRITERIA)}")
    only: dict[str, str | bool] = {"recovery_time": RECOVERY, "detection_required": True}  # criteria without a choice
    for name, limit in cell.items():
        if name not in CRITERIA:
            raise unknown("criterion", name, CRITERIA)
        if name in only and limit != only[name]:
            raise InvalidInput(f"{test_id}: {name} can only be {only[name]!r}; got {limit!r}")
        if name not in only and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit <= 1):
            raise InvalidInput(f"{test_id}: {name} is a share from 0 to 1, such as 0.05; got {limit!r}")


def to_csv(tests: Iterable[FaultTest]) -> str:
    """One line per test; parameters and criteria are JSON."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for test in tests:
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in test.to_dict().values()])
    return text.getvalue()


# -- results


@dataclass(frozen=True)
class Hits:
    """What a fault hit: calls of its sites, those in which it acted, and the output elements that it changed."""

    calls: int
    acted: int
    changed: int

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.calls + other.calls, self.acted + other.acted, self.changed + other.changed)

    def __str__(self) -> str:
        return f"the fault acted in {self.acted:,} of {self.calls:,} calls and changed {self.changed:,} elements"


@dataclass(frozen=True)
class Measured:
    """What came out under a fault. `recovery_steps` are by sample (None: not recovered at the last step watched)."""

    hits: Hits
    metric: str
    degradation: Estimate
    nan_rate: float
    recovery_steps: tuple[int | None, ...] = ()
    detected: bool | None = None
    located: str = ""


@dataclass(frozen=True)
class CriterionResult:
    """One criterion with the number that it was decided by."""

    criterion: str
    verdict: Verdict
    message: str
    value: bool | float | None


@dataclass(frozen=True)
class FaultTestResult:
    """A test carried out; `measured` is None where that was not possible, and the message says why."""

    test_id: str
    name: str
    verdict: Verdict
    message: str
    criteria: tuple[CriterionResult, ...]
    measured: Measured | None
    seconds: float = 0.0
