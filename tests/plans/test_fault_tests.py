"""Fault tests from a diagnosis: what is broken, in which words, and how results are judged."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.faults import parse_fault
from noisescope.jsonform import from_json, to_json
from noisescope.plans.fault_tests import (
    COLUMNS,
    Criteria,
    FaultMeasurement,
    FaultParameters,
    FaultTest,
    FaultTestResult,
    Hits,
    could_not_run,
    from_columns,
    generate,
    judge,
    to_csv,
)
from noisescope.stats import Estimate


def diagnosis(made: Any, **changed: Any) -> Diagnosis:
    def module(place: int, ratio: float, indices: tuple[int, ...], operator: str = "linear", **more: Any) -> Any:
        name = more.pop("module", f"model.layers.{place}.mlp.down_proj")
        found = {"outlier_indices": indices, "num_outliers": len(indices), **more}
        return made.channels(place, ratio, operator, module=name, **found)

    windows = [made.window(i, i + 2, i + 1.0, None) for i in range(4)]
    sections: dict[str, Any] = {
        "executive_summary": made.summary(critical_operators=("softmax", "gemm")),
        "operator_analysis": {
            "gemm": made.effect(0.5), "softmax": made.effect(0.1), "norm": made.effect(0.01),
            "gelu": made.effect(0.0, evidence="absent"),
        },
        "layer_analysis": made.layers(windows=windows, points=[made.point(9, 11, (9, 11), 0.18)]),
        "channel_analysis": made.captured(
            module(1, 60.0, (5, 3)),
            module(2, 90.0, (7,)),
            module(2, 40.0, (7,), "residual", module="model.layers.2"),
            module(3, 30.0, (1,), module="model.layers.3.mlp.experts", occurrence=1),
            module(4, 2.0, ()),
            *(module(i, 20.0 + i, (1,), module=f"model.layers.{i}.self_attn.o_proj") for i in range(5, 9)),
        ),
    }  # fmt: skip
    return made.diagnosis(**{**sections, **changed})


def test_what_the_report_warns_of_is_tested(made: Any) -> None:
    """Operators by cost, avalanche windows, and the five modules with the largest outliers; ids are unique."""
    tests = generate(diagnosis(made))
    ids = [test.test_id for test in tests]
    assert ids[:3] == ["OP_GEMM", "OP_SOFTMAX", "LAYER_L9-11"] and len(set(ids)) == len(ids) == 8
    assert [test.parameters.described["layer"] for test in tests[3:6]] == [
        "model.layers.2.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2 (residual)",
    ]
    assert tests[2].parameters.reason == "avalanche point, 18.0 % of the accuracy lost"
    assert {test.test_type for test in tests} == {"operator_fault", "layer_fault", "channel_fault"}


def test_faults_are_what_the_simulator_reads(made: Any) -> None:
    """Every text parses, and says where and what the notes' parameters say."""
    tests = {test.test_id: test for test in generate(diagnosis(made))}
    fault, where = parse_fault(tests["OP_SOFTMAX"].parameters.faults[0])
    assert (fault.family, fault.rate, where.place, where.operator) == ("bit_flip", 0.01, "*", "softmax")
    layers = [parse_fault(text) for text in tests["LAYER_L9-11"].parameters.faults]
    assert [where.place for _, where in layers] == [9, 10, 11]
    assert all((fault.channels, fault.start, fault.duration) == (None, 1, 1) for fault, _ in layers)
    found = {name: parse_fault(test.parameters.faults[0]) for name, test in tests.items() if name.startswith("CHANNEL")}
    fault, where = found["CHANNEL_model_layers_1_mlp_down_proj"]
    assert fault.channels == (3, 5) and (where.place, where.module) == (1, "model.layers.1.mlp.down_proj")
    assert found["CHANNEL_model_layers_2_residual"][1].module == "model.layers.2"
    assert found["CHANNEL_model_layers_3_mlp_experts_1"][1].occurrence == 1


def test_criteria_are_those_of_the_notes(made: Any) -> None:
    """5, 10 and 15 %, a NaN rate of 0.1 %, fewer than five steps, and detection; in the notes' columns."""
    found = {test.test_type: test.to_dict()["acceptance_criteria"] for test in generate(diagnosis(made))}
    assert found == {
        "operator_fault": {"max_degradation": 0.05, "max_nan_rate": 0.001},
        "layer_fault": {"max_degradation": 0.10, "recovery_time": "< 5 steps"},
        "channel_fault": {"max_degradation": 0.15, "detection_required": True},
    }


def test_a_report_without_warnings_tests_what_is_nearest_to_one(made: Any) -> None:
    """The operator whose noise moves the output furthest, and a borderline avalanche point; without one, the window."""
    windows = [made.window(i, i + 2, i + 1.0, None) for i in range(4)]
    doubtful = made.layers(windows=windows, points=[made.point(0, 2, (0, 2), state="borderline")])
    quiet = {"executive_summary": made.summary(), "channel_analysis": None, "layer_analysis": doubtful}
    assert [test.test_id for test in generate(diagnosis(made, **quiet))] == ["OP_GEMM", "LAYER_L0-2"]
    none = {**quiet, "layer_analysis": made.layers(windows=windows)}
    assert [test.test_id for test in generate(diagnosis(made, **none))] == ["OP_GEMM", "LAYER_L3-5"]
    with pytest.raises(InvalidInput, match="all levels"):
        generate(diagnosis(made, **{**quiet, "operator_analysis": None, "layer_analysis": None}))


def test_csv_cells_are_json(made: Any) -> None:
    """The table reads back to tests that are written the same."""
    tests = generate(diagnosis(made))
    rows = list(csv.DictReader(io.StringIO(to_csv(tests), newline="")))
    assert tuple(rows[0]) == COLUMNS
    back = [
        from_columns({**row, **{name: json.loads(row[name]) for name in ("parameters", "acceptance_criteria")}})
        for row in rows
    ]
    assert [test.to_dict() for test in back] == [test.to_dict() for test in tests]
    assert [test.acceptance_criteria for test in back] == [test.acceptance_criteria for test in tests]
    channel = json.loads(rows[-1]["parameters"])
    assert set(channel) == {"layer", "channel_indices", "fault_type", "reason", "faults"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parameters": {}}, r"T: parameters\['faults'\] must list the faults to inject"),
        ({"parameters": {"faults": []}}, "must list the faults to inject"),
        ({"acceptance_criteria": {}}, "no acceptance criteria, so it can't fail"),
        ({"acceptance_criteria": {"max_degradatoin": 0.1}}, "unknown criterion.*Did you mean 'max_degradation'"),
        ({"acceptance_criteria": {"max_degradation": "5 %"}}, "a share from 0 to 1"),
        ({"acceptance_criteria": {"max_nan_rate": 5}}, "a share from 0 to 1"),
        ({"acceptance_criteria": {"recovery_time": "< 3 steps"}}, "must be '< 5 steps'"),
        ({"acceptance_criteria": {"detection_required": False}}, "must be True"),
        ({"acceptance_criteria": '{"max_degradation": 0.1}'}, "JSON in a CSV file"),
        ({"priority": 1}, "a test case needs the columns test_id, .*; got .*priority"),
    ],
)
def test_cases_of_ones_own_are_refused_with_the_reason(change: Any, reason: str) -> None:
    """What would break nothing, could never fail, or asks for what is not judged."""
    case = {"test_id": "T", "component": "c", "test_type": "t", "parameters": {"faults": ["gain:1@0"], "lab": "B"},
            "acceptance_criteria": {"max_degradation": 0.1}}  # fmt: skip
    assert from_columns(case).to_dict() == case
    with pytest.raises(InvalidInput, match=reason):
        from_columns({**case, **change})


def test_a_case_without_a_column_is_refused(made: Any) -> None:
    """Whichever it is, and whatever came in place of a dictionary; also a test made in Python that breaks nothing."""
    case = generate(diagnosis(made))[0].to_dict()
    for broken in ({name: case[name] for name in COLUMNS[:-1]}, "OP_GEMM"):
        with pytest.raises(InvalidInput, match="a test case needs the columns"):
            from_columns(broken)
    with pytest.raises(InvalidInput, match="must list the faults to inject"):
        FaultTest("T", "c", "t", FaultParameters(()), Criteria(max_nan_rate=0.1))
    with pytest.raises(InvalidInput, match="can't fail"):
        FaultTest("T", "c", "t", FaultParameters(("gain:1@0",)), Criteria())


TEST = FaultTest(
    "T", "c", "t", FaultParameters(("gain:1@0",)), Criteria(0.1, 0.001, "< 5 steps", detection_required=True)
)
GOOD = FaultMeasurement(
    hits=Hits(calls=24, acted=12, changed=1536),
    metric="next_token_accuracy",
    degradation=Estimate(0.02, 0.0, 0.08, 50),
    nan_rate=0.0,
    recovery_steps=(0, 4),
    detected=True,
    located="says faulty",
)


@pytest.mark.parametrize(
    ("worse", "verdict", "failed"),
    [
        ({}, "pass", []),
        ({"degradation": Estimate(0.2, 0.15, 0.3, 50)}, "fail", ["max_degradation"]),
        ({"nan_rate": 0.002}, "fail", ["max_nan_rate"]),
        ({"recovery_steps": (5, 0)}, "fail", ["recovery_time"]),
        ({"recovery_steps": (0, None)}, "fail", ["recovery_time"]),
        ({"detected": False}, "fail", ["detection_required"]),
        ({"degradation": Estimate(None, None, None, 50)}, "pass", []),
        ({"hits": Hits(24, 24, 0), "nan_rate": 0.002}, "undecided", []),
    ],
)
def test_each_criterion_can_fail_a_test(worse: Any, verdict: str, failed: list[str]) -> None:
    """All four are looked at; a fault that changed nothing decides nothing."""
    result = judge(TEST, replace(GOOD, **worse))
    assert result.verdict == verdict and len(result.criteria) == 4
    assert [one.criterion for one in result.criteria if one.verdict == "fail"] == failed
    assert from_json(FaultTestResult, to_json(result)) == result


def test_hits_are_reported() -> None:
    """Calls and elements, in the line that JUnit and the terminal show, and in JSON."""
    result = judge(TEST, GOOD, seconds=1.5)
    assert result.message.startswith("the fault acted in 12 of 24 calls and changed 1,536 elements; max_degradation: ")
    assert to_json(result)["measured"]["hits"] == {"calls": 24, "acted": 12, "changed": 1536}
    nothing = judge(TEST, replace(GOOD, hits=Hits(24, 24, 0)))
    assert "changed 0 elements" in nothing.message and "max_degradation: the fault changed nothing" in nothing.message


def test_the_interval_decides() -> None:
    """One that includes the limit decides nothing; a test is undecided only where no criterion decides."""
    doubtful = replace(GOOD, degradation=Estimate(0.08, 0.02, 0.2, 20))
    result = judge(TEST, doubtful)
    assert result.criteria[0].verdict == "undecided" and result.verdict == "pass"
    assert "8.0 % [2.0, 20.0] of the next-token accuracy lost, 10 % allowed" in result.message
    assert result.message.endswith("(1 of 4 criteria undecided)")
    alone = replace(TEST, acceptance_criteria=Criteria(max_degradation=0.1))
    assert judge(alone, doubtful).verdict == "undecided"
    failed = could_not_run(TEST, "no softmax", seconds=2.0)
    assert failed.verdict == "undecided" and failed.measured is None and failed.seconds == 2.0
    assert from_json(FaultTestResult, to_json(failed)) == failed
