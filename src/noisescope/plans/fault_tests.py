"""Fault tests from a diagnosis: faults in the operators, layers and channels it warns about, and their verdicts.

A test states the fault, as a description for a hardware team and as text for noisescope's simulator, and what must hold
under it. If a report warns about no operator or no layers, the one whose noise changes the output most is tested.

`parameters` and `acceptance_criteria` have the columns of the original method notes in CSV and JSON: dictionaries whose
keys depend on the kind of test. Inside they are typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput, unknown
from noisescope.findings import LIMITS, metric_name, percent
from noisescope.findings.finding import counted, span
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, Verdict, at_most, overall
from noisescope.jsonform import Json, to_json
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table, Tabular

COLUMNS = ("test_id", "component", "test_type", "parameters", "acceptance_criteria")
RECOVERY = f"< {LIMITS['fault_recovery_steps']:g} steps"
FAULT_RATE = 0.01  # of an operator's calls
MOST_CHANNEL_TESTS = 5


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
    """What must hold under the fault; None and False: not required."""

    max_degradation: float | None = None
    max_nan_rate: float | None = None
    recovery_time: str | None = None
    detection_required: bool = False

    def columns(self) -> dict[str, Json]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


CRITERIA = tuple(one.name for one in fields(Criteria))


@dataclass(frozen=True)
class FaultTest:
    """One test; a test without a fault, or that could never fail, is rejected."""

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
        raise InvalidInput(f"a test case needs the columns {', '.join(COLUMNS)}; got {came}")
    test_id = str(case["test_id"])
    for name in ("parameters", "acceptance_criteria"):
        if not isinstance(case[name], Mapping):
            raise InvalidInput(f"{test_id}: {name} must be a dictionary (JSON in a CSV file); got {case[name]!r}")
    described, criteria = dict(case["parameters"]), case["acceptance_criteria"]
    faults, reason = described.pop("faults", None), described.pop("reason", "")
    _check_faults(test_id, faults)
    _check_criteria(test_id, criteria)
    parameters = FaultParameters(tuple(faults), str(reason), described)
    return FaultTest(test_id, str(case["component"]), str(case["test_type"]), parameters, Criteria(**criteria))


def _check_faults(test_id: str, faults: object) -> None:
    if not isinstance(faults, (list, tuple)) or not faults or not all(isinstance(fault, str) for fault in faults):
        raise InvalidInput(
            f"{test_id}: parameters['faults'] must list the faults to inject, such as 'gain:0.05@7/linear'; got "
            f"{faults!r}"
        )


def _check_criteria(test_id: str, cell: Mapping[str, Json]) -> None:
    if not cell:
        raise InvalidInput(
            f"{test_id} has no acceptance criteria, so it can't fail. Give at least one of {', '.join(CRITERIA)}"
        )
    only: dict[str, str | bool] = {"recovery_time": RECOVERY, "detection_required": True}  # criteria without a choice
    for name, limit in cell.items():
        if name not in CRITERIA:
            raise unknown("criterion", name, CRITERIA)
        if name in only and limit != only[name]:
            raise InvalidInput(f"{test_id}: {name} must be {only[name]!r}; got {limit!r}")
        if name not in only and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit <= 1):
            raise InvalidInput(f"{test_id}: {name} must be a share from 0 to 1, such as 0.05; got {limit!r}")


def to_csv(tests: Iterable[FaultTest]) -> str:
    """One line per test; parameters and criteria are JSON."""
    return _table(tests).to_csv()


def _table(tests: Iterable[FaultTest]) -> Table:
    return Table(COLUMNS, tuple(tuple(test.to_dict().values()) for test in tests))


# -- tests from what a diagnosis warns of


def generate(found: Diagnosis) -> list[FaultTest]:
    """Tests of a diagnosis: operators, then windows of layers, then channels."""
    if found.run.settings.question is not None:
        raise InvalidInput(
            f"this report is of {found.run.settings.question.name}, and fault tests break what noise breaks: "
            "noisescope diagnose MODEL, without --perturbation"
        )
    return refuse_none(propose_tests(found))


def propose_tests(found: Diagnosis) -> list[FaultTest]:
    """A test for everything that a diagnosis warns about; without a warning, for what is closest to one."""
    return [*_operator_tests(found), *_window_tests(found), *_channel_tests(found)]


def refuse_none(tests: list[FaultTest]) -> list[FaultTest]:
    if not tests:
        raise InvalidInput("the report has no operators, layers or channels: run diagnose with all levels first")
    return tests


def _operator_tests(found: Diagnosis) -> Iterable[FaultTest]:
    rows = found.operator_analysis or {}
    nats = {name: row.nats for name, row in rows.items()}
    critical = [name for name in found.executive_summary.critical_operators if name in rows]
    for name in sorted(critical, key=lambda name: -nats[name]):
        yield operator_test(name, "critical in the report")
    if not critical and any(nats.values()):
        yield operator_test(
            max(nats, key=lambda name: nats[name]), "no operator is critical; noise in this one costs most"
        )


def _window_tests(found: Diagnosis) -> Iterable[FaultTest]:
    section = found.layer_analysis
    if section is None:
        return
    for point in section.avalanche_points:
        loss = point.degradation.value
        lost = "" if loss is None else f", {percent(loss)} of the {metric_name(section.windows[0].metric)} lost"
        kind = "avalanche point" if point.decided else "borderline avalanche point"
        yield window_test(point.start, point.end, f"{kind}{lost}")
    known = [row for row in section.windows if row.nats]
    if not section.avalanche_points and known:
        worst = max(known, key=lambda row: row.nats)
        verb = "moves" if worst.injected else "is predicted to move"
        reason = f"no avalanche point; noise here {verb} the output most"
        yield window_test(worst.start_layer, worst.end_layer, reason)


def _channel_tests(found: Diagnosis) -> Iterable[FaultTest]:
    section = found.channel_analysis
    rows = [] if section is None else [(name, row) for name, row in section.per_layer.items() if row.num_outliers]
    for name, row in sorted(rows, key=lambda entry: -entry[1].max_ratio)[:MOST_CHANNEL_TESTS]:
        call = f"#{row.occurrence}" if row.occurrence else ""
        where = f"{row.layer}/{row.operator}{call}/{row.module}"
        yield channel_test(name, where, row.outlier_indices, row.max_ratio)


def operator_test(name: str, reason: str) -> FaultTest:
    """Random bit flips in every call of an operator."""
    described = {"operator": name, "fault_rate": FAULT_RATE, "fault_type": "bit_flip"}
    parameters = FaultParameters((f"bit_flip:rate={FAULT_RATE:g}@*/{name}",), reason, described)
    criteria = Criteria(max_degradation=LIMITS["fault_operator_degradation"], max_nan_rate=LIMITS["fault_nan_rate"])
    return FaultTest(f"OP_{name.upper()}", f"Operator: {name}", "operator_fault", parameters, criteria)


def window_test(start: int, end: int, reason: str) -> FaultTest:
    """The outputs of the layers from start to end are zero for one step: one token of a generation."""
    layers, dead = f"L{start}-{end}", "dead_lane:channels=all,start=1,duration=1"
    faults = tuple(f"{dead}@{layer}/residual" for layer in range(start, end + 1))
    described = {"layer_range": layers, "fault_model": "stuck_at_zero", "fault_duration": "1_step"}
    criteria = Criteria(max_degradation=LIMITS["fault_layer_degradation"], recovery_time=RECOVERY)
    parameters = FaultParameters(faults, reason, described)
    return FaultTest(f"LAYER_{layers}", f"Layers: {layers}", "layer_fault", parameters, criteria)


def channel_test(name: str, where: str, channels: tuple[int, ...], max_ratio: float) -> FaultTest:
    """Outlier channels return a constant instead of their values; `where` is their site in the simulator's syntax."""
    fault = f"stuck_lane:1,channels={'+'.join(map(str, sorted(channels)))}@{where}"
    described = {"layer": name, "channel_indices": channels, "fault_type": "value_corruption"}
    parameters = FaultParameters((fault,), f"the largest is {max_ratio:.1f} times the median", described)
    criteria = Criteria(max_degradation=LIMITS["fault_channel_degradation"], detection_required=True)
    test_id = f"CHANNEL_{re.sub(r'[^0-9A-Za-z]+', '_', name).strip('_')}"
    return FaultTest(test_id, f"Outlier channels in {name}", "channel_fault", parameters, criteria)


# -- results


@dataclass(frozen=True)
class Hits:
    """What a fault hit: calls of its sites, calls in which it acted, and the output elements it changed."""

    calls: int
    acted: int
    changed: int

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.calls + other.calls, self.acted + other.acted, self.changed + other.changed)

    def __str__(self) -> str:
        return f"the fault acted in {self.acted:,} of {self.calls:,} calls and changed {self.changed:,} elements"


@dataclass(frozen=True)
class FaultMeasurement:
    """What was measured under a fault. `recovery_steps` is per sample (None: not recovered by the last step)."""

    hits: Hits
    metric: str
    degradation: Estimate
    nan_rate: float
    recovery_steps: tuple[int | None, ...] = ()
    detected: bool | None = None
    located: str = ""


@dataclass(frozen=True)
class CriterionResult:
    """One criterion with the number that decided it."""

    criterion: str
    verdict: Verdict
    message: str
    value: bool | float | None


@dataclass(frozen=True)
class FaultTestResult:
    """The result of a test; `measured` is None if it could not run, and the message says why."""

    test_id: str
    name: str
    verdict: Verdict
    message: str
    criteria: tuple[CriterionResult, ...]
    measured: FaultMeasurement | None
    seconds: float = 0.0


@dataclass(frozen=True)
class FaultTests(Tabular):
    """The tests of a report, and a result for each where they were carried out."""

    tests: tuple[FaultTest, ...]
    results: tuple[FaultTestResult, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """Of all tests together; None where none was carried out."""
        return overall([result.verdict for result in self.results]) if self.results else None

    def sheet(self) -> Sheet:
        tables = {"tests": _table(self.tests)}
        if not self.results:
            heads = {"test_id": "test", "component": "component", "acceptance_criteria": "accepted"}
            return Sheet(f"{counted(len(self.tests), 'fault test')}, not carried out", tables, heads)
        tables["results"] = Table.of(FaultTestResult, self.results, without=("criteria",))
        heads = {"name": "test", "verdict": "verdict", "message": ""}
        tone = {FAIL: "critical", UNDECIDED: "moderate"}.get(str(self.verdict), "low")
        title = f"{self.verdict}: {counted(len(self.results), 'fault test')}"
        return Sheet(title, tables, heads, shown=tables["results"], tone=tone)


def judge(test: FaultTest, measured: FaultMeasurement, *, seconds: float = 0.0) -> FaultTestResult:
    """Check each criterion of a test against what was measured, and the test as a whole.

    A loss is decided by its whole interval. A fault that changed nothing decides nothing.
    """
    asked = test.acceptance_criteria.columns()
    criteria = tuple(_JUDGES[name](test.acceptance_criteria, measured) for name in asked)
    if not measured.hits.changed:
        criteria = tuple(replace(row, verdict=UNDECIDED, message="the fault changed nothing") for row in criteria)
    verdict = overall([row.verdict for row in criteria])
    open_ = [row.criterion for row in criteria if row.verdict == UNDECIDED]
    words = "; ".join(f"{row.criterion}: {row.message}" for row in criteria)
    undecided = f" ({len(open_)} of {len(criteria)} criteria undecided)" if open_ and verdict != UNDECIDED else ""
    return FaultTestResult(
        test.test_id, test.name, verdict, f"{measured.hits}; {words}{undecided}", criteria, measured, seconds
    )


def could_not_run(test: FaultTest, reason: str, *, seconds: float = 0.0) -> FaultTestResult:
    """A test that the model or the data does not allow."""
    message = f"could not be run: {reason}"
    return FaultTestResult(test.test_id, test.name, UNDECIDED, message, (), None, seconds)


def _degradation(wanted: Criteria, measured: FaultMeasurement) -> CriterionResult:
    loss, limit = measured.degradation, wanted.max_degradation or 0.0
    if loss.value is None:
        message = "not measurable: the clean score is not significantly above chance"
        return CriterionResult("max_degradation", UNDECIDED, message, None)
    verdict = at_most(loss, limit)
    words = f"{percent(loss.value)} {span(loss, '.1f', 100)} of the {metric_name(measured.metric)} lost"
    why = ": the interval includes the limit" if verdict == UNDECIDED else ""
    message = f"{words}, {100 * limit:g} % allowed, n = {loss.n}{why}"
    return CriterionResult("max_degradation", verdict, message, loss.value)


def _nan_rate(wanted: Criteria, measured: FaultMeasurement) -> CriterionResult:
    rate, limit = measured.nan_rate, wanted.max_nan_rate or 0.0
    message = f"{percent(rate, 2)} of the tokens are not finite, {percent(limit, 2)} allowed"
    return CriterionResult("max_nan_rate", FAIL if rate > limit else PASS, message, rate)


def _recovery(wanted: Criteria, measured: FaultMeasurement) -> CriterionResult:
    """By the slowest sample; None is one still wrong at its last step, and all are observed for long enough."""
    steps, limit = measured.recovery_steps, wanted.recovery_time
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        wrong = f"{len(steps) - len(known)} of {len(steps)} samples did not recover within the steps observed"
        return CriterionResult("recovery_time", FAIL, f"{wrong}, {limit} required", None)
    slowest = max(known)
    message = f"recovered after {counted(slowest, 'step')} in the slowest of {len(steps)} samples, {limit} required"
    verdict: Verdict = PASS if slowest < LIMITS["fault_recovery_steps"] else FAIL
    return CriterionResult("recovery_time", verdict, message, slowest)


def _detection(wanted: Criteria, measured: FaultMeasurement) -> CriterionResult:
    found = bool(measured.detected)
    return CriterionResult("detection_required", PASS if found else FAIL, f"locate {measured.located}", found)


_JUDGES: dict[str, Callable[[Criteria, FaultMeasurement], CriterionResult]] = {
    "max_degradation": _degradation,
    "max_nan_rate": _nan_rate,
    "recovery_time": _recovery,
    "detection_required": _detection,
}
