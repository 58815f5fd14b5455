"""The original method notes' names for migration, fault tests and the monitor."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import re
from functools import partial

import pytest
import torch

from noisescope.compat.diagnostic import checkpoint_monitor
from noisescope.compat.diagnostic.metrics_dashboard import hardware_metrics
from noisescope.diagnostic import (
    FaultInjectionTestGenerator,
    IntegratedDiagnostic,
    MetricsDashboard,
    RobustnessMonitor,
    compute_mae,
    compute_mape,
    operator_level_diagnosis,
    plan_hardware_migration,
)
from noisescope.errors import InvalidInput
from noisescope.faults import parse_fault


@pytest.fixture(scope="module")
def report(subject, answered):
    diagnostic = IntegratedDiagnostic(subject, answered)
    diagnostic.run_full_diagnosis(noise_scale=0.2, window_size=1, seeds=1, effort="standard")
    return diagnostic.generate_report()


def test_migration_ranks_the_hot_layer_first(hot_layer):
    """The layer that alone says anything is priority 1, by evidence and not by number."""
    model, batches = hot_layer
    plan = plan_hardware_migration(model, batches, batches, noise_scale=0.2, window_size=1, seeds=1)
    assert plan["priority_1_layers"][0] == 2
    planned = [layer for number in (1, 2, 3) for layer in plan[f"priority_{number}_layers"]]
    assert sorted(planned) == list(range(6)) and set(plan["recommendations"]) == {"precision", "validation", "fallback"}
    assert "5 %" in plan["recommendations"]["validation"] and plan["full"]["commands"]


def test_the_generator_makes_runs_and_exports_cases(report, subject, answered, tmp_path):
    """The notes' columns, cells of JSON, and verdicts from the simulator."""
    generator = FaultInjectionTestGenerator(report)
    cases = generator.generate_test_cases()
    generator.export_to_csv(cases, tmp_path / "cases.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "cases.csv").read_text(), newline="")))
    assert [row["test_id"] for row in rows] == [case["test_id"] for case in cases]
    assert json.loads(rows[0]["parameters"]) == cases[0]["parameters"]
    results = generator.run_test_cases(subject, answered, cases[:1], samples=8)
    assert results[0]["verdict"] in ("pass", "fail", "undecided") and results[0]["criteria"]


NOTES_REPORT = {  # what the notes' own report holds, and no more
    "executive_summary": {
        "critical_operators": ["softmax", "matmul"],
        "avalanche_points": [{"layer_range": "L0-1", "degradation": 0.3, "severity": "CRITICAL"}],
    },
    "channel_analysis": {
        "per_layer": {
            "model.layers.1.mlp.down_proj": {"outlier_indices": [5], "num_outliers": 1, "max_ratio": 40.0},
        }
    },
}


def test_the_generator_takes_the_notes_report(subject, tmp_path):
    """With its keys alone, from a dictionary or a file: every case can be carried out."""
    (tmp_path / "report.json").write_text(json.dumps(NOTES_REPORT))
    cases = FaultInjectionTestGenerator(NOTES_REPORT).generate_test_cases()
    assert FaultInjectionTestGenerator(tmp_path / "report.json").generate_test_cases() == cases
    assert [case["test_id"] for case in cases] == [
        "OP_SOFTMAX",
        "OP_GEMM",
        "LAYER_L0-1",
        "CHANNEL_model_layers_1_mlp_down_proj",
    ]
    places = [[parse_fault(text)[1].place for text in case["parameters"]["faults"]] for case in cases]
    assert places == [["*"], ["*"], [0, 1], [1]]
    FaultInjectionTestGenerator(NOTES_REPORT).export_to_csv(cases, tmp_path / "new" / "cases.csv")
    assert (tmp_path / "new" / "cases.csv").read_text().count("_fault,") == 4


def test_reports_that_are_none_are_refused():
    """A list, a report of something else, layers and modules that can't be read."""
    with pytest.raises(InvalidInput, match="a report must be a dictionary"):
        RobustnessMonitor([1])
    for report, reason in (
        ({}, "no executive_summary"),
        ({"executive_summary": {"avalanche_points": [{"layer_range": "early"}]}}, "'early', which is not a range"),
        ({**NOTES_REPORT, "channel_analysis": {"per_layer": {"head": {}}}}, "'head', which is not a module"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            FaultInjectionTestGenerator(report)


def test_the_monitor_keeps_history_and_alerts(report, subject, answered):
    """An unchanged checkpoint passes, a more sensitive one fails with the operator named, and both are in the trend."""
    monitor = RobustnessMonitor(report, max_degradation=0.9)
    with pytest.raises(InvalidInput, match="check_checkpoint"):
        monitor.plot_robustness_trend()
    same = monitor.check_checkpoint(subject, answered, checkpoint_step=100, samples=20)
    assert same["pass"] and same["warnings"] == [] and monitor.alerts == []
    sharper = copy.deepcopy(subject.model)
    with torch.no_grad():
        sharper.model.norm.weight *= 2
    worse = monitor.check_checkpoint(sharper, answered, checkpoint_step=200, samples=20)
    assert not worse["pass"] and {"matmul", "layernorm"} & {row["operator"] for row in worse["warnings"]}
    assert all(row["current"] > row["baseline"] for row in worse["warnings"])
    assert [row["checkpoint_step"] for row in monitor.history] == [100, 200]
    assert {row["checkpoint_step"] for row in monitor.alerts} == {200}
    lines = monitor.plot_robustness_trend().axes[0].get_lines()
    assert any(line.get_label() == "limit" for line in lines)


def test_the_monitor_takes_the_notes_baseline(subject, answered):
    """A degradation per operator and no more: compared by the notes' rule, near 0 by the interval."""
    measured = operator_level_diagnosis(subject, answered, seeds=1)
    costs = {name: {"degradation": row["degradation"]} for name, row in measured.items()}
    same = RobustnessMonitor({"operator_analysis": costs}, max_degradation=0.9)
    result = same.check_checkpoint(subject, answered, checkpoint_step=1, seeds=1)
    assert result["pass"] and result["warnings"] == [] and result["timestamp"] and result["checkpoint_step"] == 1
    assert result["max_degradation"] == max(row["degradation"] for row in measured.values())

    robust = {name: {"degradation": 0.0} for name in ("matmul", "layernorm")}
    monitor = RobustnessMonitor({"operator_analysis": robust})
    worse = monitor.check_checkpoint(subject, answered, checkpoint_step=2, noise_scale=0.5, seeds=2)
    assert not worse["pass"] and worse["verdict"] == "fail" and worse["max_degradation"] > 0.15
    assert {row["operator"] for row in worse["warnings"]} <= {"matmul", "layernorm"}
    row = worse["warnings"][0]
    assert set(row) >= {"operator", "baseline", "current", "severity"} and row["current"] > row["baseline"] == 0
    assert any("above the limit of 15" in row["message"] for row in worse["warnings"])
    assert [row["checkpoint_step"] for row in monitor.alerts] == [2] * len(worse["warnings"])
    (line,) = [one for one in monitor.plot_robustness_trend().axes[0].get_lines() if one.get_label() == "limit"]
    assert set(line.get_ydata()) == {0.15}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({}, "a dictionary with operator_analysis .* got nothing"),
        ({"operator_analysis": {"softmax": {"sensitivity_score": 1.0}}}, "no degradation for softmax"),
    ],
)
def test_a_baseline_without_degradations(report, words):
    """Refused where it is given, not at the first checkpoint."""
    with pytest.raises(InvalidInput, match=words):
        RobustnessMonitor(report)


def test_a_cost_within_its_uncertainty_is_no_regression(subject, answered, monkeypatch):
    """20 % worse by the point, with an interval that holds the baseline: undecided, and no warning."""
    interval = {"value": 0.12, "low": 0.02, "high": 0.22, "n": 20}
    rows = {"softmax": {"operator": "softmax", "degradation": 0.12, "degradation_interval": interval}}
    monkeypatch.setattr(checkpoint_monitor, "operator_level_diagnosis", lambda *_, **__: rows)
    for baseline, low, high, verdict in (
        (0.09, 0.02, 0.22, "undecided"),  # 0.12 > 1.2 x 0.09, but 0.02 < 0.09
        (0.09, 0.10, 0.14, "fail"),
        (0.12, 0.10, 0.14, "pass"),
        (0.0, -0.01, 0.25, "undecided"),  # near 0 the interval decides
        (0.0, 0.01, 0.25, "fail"),
        (None, 0.10, 0.14, "pass"),  # only the limit can be decided
    ):
        interval.update(low=low, high=high)
        found = checkpoint_monitor.compared(subject, answered, {"softmax": baseline}, limit=0.15)
        assert (found["verdict"], len(found["warnings"])) == (verdict, int(verdict == "fail")), (baseline, low, high)


def test_two_devices_on_the_dashboard():
    """MAPE by the notes' formula and with a floor; the largest error is looked for in outlier channels."""
    gpu = torch.ones(4, 10, 8)
    gpu[..., 0] = 1e-6  # the notes' formula divides by these
    gpu[..., 5] = 400.0
    npu = gpu + 0.001
    npu[0, 0, 5] += 2
    found = hardware_metrics(gpu, npu)
    assert found["mape_floored"] < 0.01 < 10 < found["mape"] == pytest.approx(compute_mape(gpu, npu))
    assert found["max_error"] == pytest.approx(2.001, rel=1e-4) and found["max_error_in_outlier_channel"]
    assert found["bands"] == {"mae": "NOTICEABLE", "mape": "SIGNIFICANT", "correlation": "EXCELLENT"}
    with pytest.raises(InvalidInput, match="shape"):
        hardware_metrics(gpu, gpu[0])


@pytest.mark.parametrize(
    ("loss", "hardware", "expected"),
    [
        (0.0, {"mae": 5e-3, "mape": 0.005, "correlation": 0.999}, "MODERATE RISK - .*MAE 0.005 is NOTICEABLE"),
        (0.0, {"mae": 0.5, "mape": 0.005, "correlation": 0.999}, "HIGH RISK - .*MAE 0.5 is CRITICAL"),
        (0.0, {"mae": 5e-5, "mape": 0.005, "correlation": 0.4}, "HIGH RISK - .*correlation 0.4 is POOR"),
        (0.0, {"mae": 5e-5, "mape": 0.12, "correlation": 0.999}, "HIGH RISK - .*MAPE 0.12 is SIGNIFICANT"),
        (0.0, {"mae": 0.5, "mape": 0.12, "correlation": 0.4}, "MAE 0.5 is CRITICAL; MAPE 0.12 .*; correlation 0.4 is"),
        (0.25, {"mae": 5e-5, "mape": 0.005, "correlation": 0.999}, "MODERATE RISK - [^(]*$"),  # 50 points
        (0.25, {"mae": 5e-5, "mape": 0.12, "correlation": 0.999}, "HIGH RISK - [^(]*$"),  # 80 points by themselves
        (0.01, {"mae": 5e-5, "mape": 0.005, "correlation": 0.999}, "LOW RISK - [^(]*$"),
        (None, {"mae": 0.5, "mape": 0.005, "correlation": 0.999}, "HIGH RISK - .*MAE"),  # at least that
        (None, {"mae": 5e-5, "mape": 0.005, "correlation": 0.999}, "NOT MEASURABLE - degradation"),
        (0.12, {"mape": 0.2}, "HIGH RISK"),  # the notes' key alone
    ],
)
def test_the_risk_is_never_below_what_two_devices_show(loss, hardware, expected):
    """The higher of the score's level and the worst band, with the reason where the band decides."""
    dashboard = MetricsDashboard()
    dashboard.metrics = {"primary": {"relative_degradation": loss}, "hardware": hardware}
    assert re.search(expected, dashboard.get_risk_assessment())


def test_devices_that_disagree_are_no_low_risk(subject, answered):
    """A robust model, and a device whose results are unlike: the score stays beside the level."""
    gpu = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    dashboard = MetricsDashboard()
    metrics = dashboard.compute_all_metrics(subject, answered, gpu, gpu.flip(0), noise_scale=1e-3, seeds=1, samples=4)
    assert metrics["primary"]["relative_degradation"] == 0
    assert dashboard.get_risk_assessment().startswith("HIGH RISK - ")
    assert metrics["dashboard_risk"]["score"] == 30 and metrics["dashboard_risk"]["level"] == "LOW"


@pytest.mark.parametrize("bad", [torch.zeros(0, 4), torch.tensor(1.0), {"a": torch.ones(2)}, [1.0, 2.0]])
def test_activations_that_are_none_are_refused(subject, answered, bad):
    """Before anything is measured, with the argument's own name."""
    good = torch.ones(2, 4)
    for pair, name in (((good, bad), "npu_activations"), ((bad, good), "gpu_activations")):
        for ask in (hardware_metrics, compute_mae, partial(MetricsDashboard().compute_all_metrics, subject, None)):
            with pytest.raises(InvalidInput, match=f"^{name} must be a non-empty tensor"):
                ask(*pair)


def test_formulas_speak_of_devices():
    """Not of a clean and a noisy tensor."""
    gpu = torch.ones(2, 4)
    with pytest.raises(InvalidInput, match=r"npu_activations \(4, 2\)"):
        compute_mae(gpu, gpu.T)
    with pytest.raises(InvalidInput, match=r"^npu_activations contain NaN or infinity"):
        compute_mae(gpu, gpu * math.nan)


def test_nan_on_one_device_is_the_worst_risk():
    """However robust the model is; NaN on both leaves nothing to measure, which is not LOW either."""
    gpu = torch.ones(2, 3, 4)
    npu, empty = gpu.clone(), gpu * math.nan
    npu[0, 0, 0] = math.nan
    for pair, expected in (((gpu, npu), "HIGH RISK"), ((npu, gpu), "HIGH RISK"), ((empty, empty), "NOT MEASURABLE")):
        dashboard = MetricsDashboard()
        dashboard.metrics = {"primary": {"relative_degradation": 0.0}, "hardware": hardware_metrics(*pair)}
        assert dashboard.metrics["hardware"]["mape"] is None
        assert dashboard.get_risk_assessment().startswith(expected)
    assert "mape: not measurable" in dashboard.get_risk_assessment()
