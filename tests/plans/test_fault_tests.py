"""Fault tests from a report: what is broken, in which words, and how results are judged."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from noisescope.errors import InvalidInput
from noisescope.faults import parse_fault
from noisescope.plans.fault_tests import (
    COLUMNS,
    FaultTest,
    check_runnable,
    could_not_run,
    from_columns,
    generate,
    judge,
    to_csv,
)


def module(layer: Any, ratio: float, indices: list[int], operator: str = "linear") -> dict[str, Any]:
    return {"layer": layer, "operator": operator, "max_ratio": ratio, "num_outliers": len(indices),
            "outlier_indices": indices}  # fmt: skip


def report(**changed: Any) -> dict[str, Any]:
    return {
        "executive_summary": {
            "critical_operators": ["softmax", "gemm"],
            "avalanche_points": [{"start": 9, "end": 11, "degradation": 0.18}],
        },
        "operator_analysis": {
            "gemm": {"kl": {"value": 0.5}},
            "softmax": {"kl": {"value": 0.1}},
            "norm": {"kl": {"value": 0.01}},
            "gelu": {"evidence": "absent"},
        },
        "layer_analysis": {
            "windows": [{"start_layer": i, "end_layer": i + 2, "kl": {"value": i + 1.0}} for i in range(4)]
        },
        "channel_analysis": {
            "per_layer": {
                "model.layers.1.mlp.down_proj": module(1, 60.0, [5, 3]),
                "model.layers.2.mlp.down_proj": module(2, 90.0, [7]),
                "model.layers.2 (residual)": module(2, 40.0, [7], "residual"),
                "model.layers.3.mlp.experts #1": module(3, 30.0, [1]),
                "model.layers.4.mlp.down_proj": module(4, 2.0, []),
                **{f"model.layers.{i}.self_attn.o_proj": module(i, 20.0 + i, [1]) for i in range(5, 9)},
            }
        },
        **changed,
    }


def test_what_the_report_warns_of_is_tested():
    """Operators by cost, avalanche windows, and the five modules with the largest outliers; ids are unique."""
    tests = generate(report())
    ids = [test.test_id for test in tests]
    assert ids[:3] == ["OP_GEMM", "OP_SOFTMAX", "LAYER_L9-11"] and len(set(ids)) == len(ids) == 8
    assert [test.parameters["layer"] for test in tests[3:6]] == [
        "model.layers.2.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2 (residual)",
    ]
    assert {test.test_type for test in tests} == {"operator_fault", "layer_fault", "channel_fault"}


def test_faults_are_what_the_simulator_reads():
    """Every text parses, and says where and what the notes' parameters say."""
    tests = {test.test_id: test for test in generate(report())}
    fault, where = parse_fault(tests["OP_SOFTMAX"].parameters["faults"][0])
    assert (fault.family, fault.rate, where.place, where.operator) == ("bit_flip", 0.01, "*", "softmax")
    layers = [parse_fault(text) for text in tests["LAYER_L9-11"].parameters["faults"]]
    assert [where.place for _, where in layers] == [9, 10, 11]
    assert all((fault.channels, fault.start, fault.duration) == (None, 1, 1) for fault, _ in layers)
    found = {
        name: parse_fault(test.parameters["faults"][0]) for name, test in tests.items() if name.startswith("CHANNEL")
    }
    fault, where = found["CHANNEL_model_layers_1_mlp_down_proj"]
    assert fault.channels == (3, 5) and (where.place, where.module) == (1, "model.layers.1.mlp.down_proj")
    assert found["CHANNEL_model_layers_2_residual"][1].module == "model.layers.2"
    assert found["CHANNEL_model_layers_3_mlp_experts_1"][1].occurrence == 1


def test_criteria_are_those_of_the_notes():
    """5, 10 and 15 %, a NaN rate of 0.1 %, fewer than five steps, and detection."""
    found = {test.test_type: dict(test.acceptance_criteria) for test in generate(report())}
    assert found == {
        "operator_fault": {"max_degradation": 0.05, "max_nan_rate": 0.001},
        "layer_fault": {"max_degradation": 0.10, "recovery_time": "< 5 steps"},
        "channel_fault": {"max_degradation": 0.15, "detection_required": True},
    }


def test_a_report_without_warnings_tests_what_is_nearest_to_one():
    """The operator and the window that noise moves furthest; a report without levels is refused."""
    quiet = report(executive_summary={"critical_operators": [], "avalanche_points": []}, channel_analysis=None)
    assert [test.test_id for test in generate(quiet)] == ["OP_GEMM", "LAYER_L3-5"]
    with pytest.raises(InvalidInput, match="all levels"):
        generate({**quiet, "operator_analysis": None, "layer_analysis": None})
    with pytest.raises(InvalidInput, match="noisescope diagnose"):
        generate({"robustness": {}})


def test_csv_cells_are_json():
    """The table reads back to the same tests."""
    tests = generate(report())
    rows = list(csv.DictReader(io.StringIO(to_csv(tests), newline="")))
    assert tuple(rows[0]) == COLUMNS
    for row in rows:
        row |= {name: json.loads(row[name]) for name in ("parameters", "acceptance_criteria")}
    assert [FaultTest(**row) for row in rows] == tests


def test_what_is_generated_can_be_run():
    """Also after a way through its columns."""
    for test in generate(report()):
        check_runnable(from_columns(test.to_dict()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parameters": {}}, r"T: parameters\['faults'\] lists what to break"),
        ({"parameters": {"faults": []}}, "lists what to break"),
        ({"acceptance_criteria": {}}, "no acceptance criteria, so it can't fail"),
        ({"acceptance_criteria": {"max_degradatoin": 0.1}}, "unknown criterion.*Did you mean 'max_degradation'"),
        ({"acceptance_criteria": {"max_degradation": "5 %"}}, "a share from 0 to 1"),
        ({"acceptance_criteria": {"max_nan_rate": 5}}, "a share from 0 to 1"),
        ({"acceptance_criteria": {"recovery_time": "< 3 steps"}}, "can only be '< 5 steps'"),
        ({"acceptance_criteria": {"detection_required": False}}, "can only be True"),
        ({"acceptance_criteria": '{"max_degradation": 0.1}'}, "a CSV has it as JSON"),
        ({"priority": 1}, "a test case has the columns test_id, .*; got .*priority"),
    ],
)
def test_cases_of_ones_own_are_refused_with_the_reason(change, reason):
    """What would break nothing, could never fail, or asks for what is not judged."""
    case = {"test_id": "T", "component": "c", "test_type": "t", "parameters": {"faults": ["gain:1@0"]},
            "acceptance_criteria": {"max_degradation": 0.1}}  # fmt: skip
    check_runnable(from_columns(case))
    with pytest.raises(InvalidInput, match=reason):
        check_runnable(from_columns({**case, **change}))


def test_a_case_without_a_column_is_refused():
    """Whichever it is, and whatever came in place of a dictionary."""
    case = generate(report())[0].to_dict()
    for broken in ({name: case[name] for name in COLUMNS[:-1]}, "OP_GEMM"):
        with pytest.raises(InvalidInput, match="a test case has the columns"):
            from_columns(broken)


TEST = FaultTest("T", "c", "t", {}, {"max_degradation": 0.1, "max_nan_rate": 0.001, "recovery_time": "< 5 steps",
                                     "detection_required": True})  # fmt: skip
GOOD: dict[str, Any] = {
    "degradation": {"value": 0.02, "low": 0.0, "high": 0.08, "n": 50},
    "nan_rate": 0.0,
    "recovery_steps": [0, 4],
    "detected": True,
    "located": "says faulty",
    "changed": 7,
}


@pytest.mark.parametrize(
    ("worse", "verdict", "failed"),
    [
        ({}, "pass", []),
        ({"degradation": {"value": 0.2, "low": 0.15, "high": 0.3, "n": 50}}, "fail", ["max_degradation"]),
        ({"nan_rate": 0.002}, "fail", ["max_nan_rate"]),
        ({"recovery_steps": [5, 0]}, "fail", ["recovery_time"]),
        ({"recovery_steps": [0, None]}, "fail", ["recovery_time"]),
        ({"detected": False}, "fail", ["detection_required"]),
        ({"degradation": {"value": None, "low": None, "high": None, "n": 50}}, "undecided", []),
        ({"changed": 0}, "undecided", []),
    ],
)
def test_each_criterion_can_fail_a_test(worse, verdict, failed):
    """All four are looked at; a fault that changed nothing, or an accuracy at chance, decides nothing."""
    row = judge(TEST, {**GOOD, **worse})
    assert row["verdict"] == verdict and len(row["criteria"]) == 4
    assert [one["criterion"] for one in row["criteria"] if one["verdict"] == "fail"] == failed


def test_doubt_is_told():
    """An interval that holds the limit decides by its value and says that it is not sure."""
    row = judge(TEST, {**GOOD, "degradation": {"value": 0.08, "low": 0.02, "high": 0.2, "n": 20}})
    assert row["verdict"] == "pass" and "not sure" in row["message"]
    assert could_not_run(TEST, "no softmax")["verdict"] == "undecided"
