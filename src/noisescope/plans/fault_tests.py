"""Fault injection tests from a report: the operators, layers and channels it warns of, broken on purpose.

A test says what is broken and how, in words for a hardware team and in the texts of noisescope's simulator, and what
must hold then. Where a report warns of no operator or no layers, the one that noise moves furthest is tested.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.findings import LIMITS, percent
from noisescope.plans.evidence import Row, cost

COLUMNS = ("test_id", "component", "test_type", "parameters", "acceptance_criteria")
FAULT_RATE = 0.01  # of an operator's calls
MOST_CHANNEL_TESTS = 5
RECOVERY = f"< {LIMITS['fault_recovery_steps']:g} steps"
_MODULE = re.compile(r"(?P<module>.*?)(?: \((?P<operator>\w+)\))?(?: #(?P<call>\d+))?")


@dataclass(frozen=True)
class FaultTest:
    """One test. `parameters["faults"]` are what `faulty` and `locate --simulate` take, all at once."""

    test_id: str
    component: str
    test_type: str
    parameters: Row
    acceptance_criteria: Row

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def generate(report: Row) -> list[FaultTest]:
    """Tests of a diagnosis: operators, then windows of layers, then channels."""
    if "executive_summary" not in report:
        raise InvalidInput("fault tests are made from a diagnosis, and this report is none: noisescope diagnose MODEL")
    tests = [*_operator_tests(report), *_window_tests(report), *_channel_tests(report)]
    if not tests:
        raise InvalidInput("the report has neither operators nor layers nor channels: diagnose with all levels first")
    return tests


def from_columns(case: Row) -> FaultTest:
    """A test from its columns, as `to_dict` gives them."""
    if not isinstance(case, Mapping) or set(case) != set(COLUMNS):
        came = ", ".join(map(str, case)) if isinstance(case, Mapping) else f"a {type(case).__name__}"
        raise InvalidInput(f"a test case has the columns {', '.join(COLUMNS)}; got {came}")
    for name in ("parameters", "acceptance_criteria"):
        if not isinstance(case[name], Mapping):
            raise InvalidInput(f"{case['test_id']}: {name} is a dictionary (a CSV has it as JSON); got {case[name]!r}")
    return FaultTest(**case)


def check_runnable(test: FaultTest) -> None:
    """Refuse a test that says nothing to break, or that wants what is not judged here."""
    faults = test.parameters.get("faults")
    if not isinstance(faults, (list, tuple)) or not faults:
        raise InvalidInput(
            f"{test.test_id}: parameters['faults'] lists what to break, such as 'gain:0.05@7/linear'; got {faults!r}"
        )
    if not test.acceptance_criteria:
        raise InvalidInput(f"{test.test_id} has no acceptance criteria, so it can't fail: {', '.join(_JUDGES)}")
    for name, limit in test.acceptance_criteria.items():
        if name not in _JUDGES:
            raise unknown("criterion", name, _JUDGES)
        if name in _ONLY and limit != _ONLY[name]:
            raise InvalidInput(f"{test.test_id}: {name} can only be {_ONLY[name]!r}; got {limit!r}")
        if name not in _ONLY and not (isinstance(limit, (int, float)) and 0 <= limit <= 1):
            raise InvalidInput(f"{test.test_id}: {name} is a share from 0 to 1, such as 0.05; got {limit!r}")


def to_csv(tests: Iterable[FaultTest]) -> str:
    """One line a test; parameters and criteria are JSON."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for test in tests:
        cells = test.to_dict()
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in cells.values()])
    return text.getvalue()


def _operator_tests(report: Row) -> Iterable[FaultTest]:
    """Bits that flip now and then in every call of an operator."""
    rows = report.get("operator_analysis") or {}
    critical = sorted(report["executive_summary"]["critical_operators"], key=lambda name: -cost(rows.get(name, {})))
    reason = "critical in the report"
    if not critical and any(cost(row) for row in rows.values()):
        critical, reason = [max(rows, key=lambda name: cost(rows[name]))], "none is critical; noise in it costs most"
    for name in critical:
        yield FaultTest(
            f"OP_{name.upper()}",
            f"Operator: {name}",
            "operator_fault",
            {
                "operator": name,
                "fault_rate": FAULT_RATE,
                "fault_type": "bit_flip",
                "reason": reason,
                "faults": [f"bit_flip:rate={FAULT_RATE:g}@*/{name}"],
            },
            {"max_degradation": LIMITS["fault_operator_degradation"], "max_nan_rate": LIMITS["fault_nan_rate"]},
        )


def _window_tests(report: Row) -> Iterable[FaultTest]:
    """The outputs of neighbouring layers are zero for one step: one token of a generation."""
    section = report.get("layer_analysis") or {}
    points = [(point["start"], point["end"], f"avalanche point, {percent(point['degradation'])} lost")
              for point in report["executive_summary"]["avalanche_points"]]  # fmt: skip
    known = [row for row in section.get("windows", []) if cost(row)]
    if not points and known:
        worst = max(known, key=cost)
        points = [
            (worst["start_layer"], worst["end_layer"], "no avalanche point; noise here moves the output furthest")
        ]
    for start, end, reason in points:
        yield FaultTest(
            f"LAYER_L{start}-{end}",
            f"Layers: L{start}-{end}",
            "layer_fault",
            {
                "layer_range": f"L{start}-{end}",
                "fault_model": "stuck_at_zero",
                "fault_duration": "1_step",
                "reason": reason,
                "faults": [
                    f"dead_lane:channels=all,start=1,duration=1@{layer}/residual" for layer in range(start, end + 1)
                ],
            },
            {
                "max_degradation": LIMITS["fault_layer_degradation"],
                "recovery_time": RECOVERY,
            },
        )


def _channel_tests(report: Row) -> Iterable[FaultTest]:
    """Outlier channels give one constant in place of their values."""
    rows = (report.get("channel_analysis") or {}).get("per_layer", {})
    found = [name for name in rows if rows[name]["num_outliers"]]
    for name in sorted(found, key=lambda name: -rows[name]["max_ratio"])[:MOST_CHANNEL_TESTS]:
        row = rows[name]
        channels = row["outlier_indices"]
        yield FaultTest(
            f"CHANNEL_{re.sub(r'[^0-9A-Za-z]+', '_', name).strip('_')}",
            f"Outlier channels in {name}",
            "channel_fault",
            {
                "layer": name,
                "channel_indices": channels,
                "fault_type": "value_corruption",
                "reason": f"the largest is {row['max_ratio']:.1f} times the median",
                "faults": [f"stuck_lane:1,channels={'+'.join(map(str, sorted(channels)))}@{_where(name, row)}"],
            },
            {"max_degradation": LIMITS["fault_channel_degradation"], "detection_required": True},
        )


def _where(name: str, row: Row) -> str:
    """A row of the channel analysis as the simulator's place."""
    parts = _MODULE.fullmatch(name)
    assert parts is not None
    call = "" if parts["call"] is None else f"#{parts['call']}"
    return f"{row['layer']}/{row['operator']}{call}/{parts['module']}"


# -- judging what came out


def judge(test: FaultTest, measured: Row) -> dict[str, Any]:
    """Each criterion of a test against what was measured, and the test as a whole.

    Decided by the value; a degradation whose interval holds the limit says that it is not sure.
    """
    criteria = [
        {"criterion": name, **_JUDGES[name](limit, measured)} for name, limit in test.acceptance_criteria.items()
    ]
    if measured["changed"] == 0:
        criteria = [{**row, "verdict": "undecided", "message": "the fault changed nothing"} for row in criteria]
    verdicts = {row["verdict"] for row in criteria}
    return {
        "test_id": test.test_id,
        "name": f"{test.test_id} ({test.component})",
        "verdict": next((verdict for verdict in ("fail", "undecided") if verdict in verdicts), "pass"),
        "message": "; ".join(f"{row['criterion']}: {row['message']}" for row in criteria),
        "criteria": criteria,
        "measured": dict(measured),
    }


def could_not_run(test: FaultTest, reason: str) -> dict[str, Any]:
    """A test that the model or the data do not allow."""
    return {
        "test_id": test.test_id,
        "name": f"{test.test_id} ({test.component})",
        "verdict": "undecided",
        "message": f"could not be carried out: {reason}",
        "criteria": [],
        "measured": {},
    }


def _degradation(limit: float, measured: Row) -> dict[str, Any]:
    loss = measured["degradation"]
    if loss["value"] is None:
        return {"value": None, "verdict": "undecided", "message": "the clean score does not stand clear of chance"}
    low, high = loss["low"], loss["high"]
    sure = (low is not None and low > limit) or (high is not None and high <= limit)
    words = f"{percent(loss['value'])} of the accuracy lost, {100 * limit:g} % allowed, n = {loss['n']}"
    verdict = "fail" if loss["value"] > limit else "pass"
    return {"value": loss["value"], "verdict": verdict, "message": words if sure else f"{words}, not sure"}


def _nan_rate(limit: float, measured: Row) -> dict[str, Any]:
    rate = measured["nan_rate"]
    words = f"{percent(rate, 2)} of the tokens not finite, {percent(limit, 2)} allowed"
    return {"value": rate, "verdict": "fail" if rate > limit else "pass", "message": words}


def _recovery(limit: str, measured: Row) -> dict[str, Any]:
    """By the slowest sample; None is one that is still wrong at its last step, and all are watched for long enough."""
    steps = measured["recovery_steps"]
    if None in steps:
        words = f"{steps.count(None)} of {len(steps)} samples are not right again within the steps watched"
        return {"value": None, "verdict": "fail", "message": f"{words}, {limit} wanted"}
    slowest = max(steps)
    words = f"right again {slowest} steps after the fault in the slowest of {len(steps)} samples, {limit} wanted"
    verdict = "pass" if slowest < LIMITS["fault_recovery_steps"] else "fail"
    return {"value": slowest, "verdict": verdict, "message": words}


def _detection(limit: bool, measured: Row) -> dict[str, Any]:
    found = measured["detected"]
    return {"value": found, "verdict": "pass" if found else "fail", "message": f"locate {measured['located']}"}


_JUDGES: dict[str, Any] = {
    "max_degradation": _degradation,
    "max_nan_rate": _nan_rate,
    "recovery_time": _recovery,
    "detection_required": _detection,
}
_ONLY: Row = {"recovery_time": RECOVERY, "detection_required": True}  # criteria without a choice
