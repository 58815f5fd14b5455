"""The integrated diagnosis: the notes' quick start, its keys, its files."""

from __future__ import annotations

import copy
import json

import pytest

from noisescope.diagnostic import IntegratedDiagnostic, validate_metric_correlations
from noisescope.errors import InvalidInput

SUMMARY = {
    "critical_operators",
    "num_critical_operators",
    "avalanche_points",
    "num_avalanche_points",
    "total_outlier_channels",
    "overall_risk_level",
}
ROW = {"degradation", "sensitivity_score", "baseline_acc", "noisy_acc"}
OUTLIERS = {
    "outlier_indices",
    "num_outliers",
    "total_channels",
    "outlier_percentage",
    "outlier_ratios",
    "max_ratio",
    "median_max",
    "global_max",
}


def test_the_quick_start_of_the_notes(subject, random_batches, tmp_path, monkeypatch):
    """The notes' calls run with only the import path changed; random tokens are not measurable, never "robust"."""
    monkeypatch.chdir(tmp_path)
    diagnostic = IntegratedDiagnostic(subject, random_batches, random_batches)
    diagnostic.run_full_diagnosis(noise_scale=0.05, window_size=3, outlier_threshold=10.0)
    report = diagnostic.generate_report()
    for rec in report["recommendations"][:5]:
        print(f"[{rec['priority']}] {rec['component']}: {rec['action']}")
    diagnostic.save_report("diagnostic_report_2026-01-05")

    sections = ["executive_summary", "operator_analysis", "layer_analysis", "channel_analysis", "recommendations"]
    assert type(report) is dict and list(report) == [*sections, "full"]
    assert set(report["executive_summary"]) >= SUMMARY
    assert list(report["operator_analysis"]) == ["matmul", "softmax", "silu", "layernorm"]
    assert all(set(row) >= ROW for row in report["operator_analysis"].values())
    ((label, window),) = report["layer_analysis"].items()
    assert label == "L0-1" and (window["start_layer"], window["end_layer"]) == (0, 1)
    assert set(window) >= ROW and window["total_injections"] > 0
    assert set(report["channel_analysis"]["summary"]) >= {"layers_with_outliers", "total_outlier_channels"}
    assert window["degradation"] is None and "LOW" not in report["executive_summary"]["overall_risk_level"]
    assert json.loads((tmp_path / "diagnostic_report_2026-01-05.json").read_text()) == json.loads(json.dumps(report))
    assert (tmp_path / "diagnostic_report_2026-01-05.md").read_text().startswith("# ")


@pytest.fixture(scope="module")
def measured(outlier, answered_by) -> IntegratedDiagnostic:
    """One run on a bare model with a massive channel, on its own answers; the loader is a generator."""
    diagnostic = IntegratedDiagnostic(outlier, (batch for batch in [answered_by(outlier)]))
    diagnostic.run_full_diagnosis(0.3, 1, 10.0, seeds=1)
    return diagnostic


def test_numbers_agree_with_our_own_report(measured):
    """`degradation` is a float, and it is the value of our own interval; "matmul" is gemm, not attention's products."""
    report = measured.generate_report()
    ours = report["full"]["operator_analysis"]
    for name, other in (("matmul", "gemm"), ("layernorm", "norm"), ("softmax", "softmax")):
        row = report["operator_analysis"][name]
        assert isinstance(row["degradation"], float) and row["operator"] == other
        assert row["degradation"] == ours[other]["degradation"]["value"] == row["degradation_interval"]["value"]
        assert row["sensitivity_score"] == pytest.approx(row["degradation"] / 0.3)
        assert row["baseline_acc"] == 1.0 and row["noisy_acc"] == pytest.approx(1 - row["degradation"])
    parts = report["operator_analysis"]["matmul"]["parts"]
    assert set(parts) == {"linear", "matmul"}
    assert parts["matmul"]["total_injections"] == ours["matmul"]["total_injections"]
    assert list(report["layer_analysis"]) == ["L0-0", "L1-1"]
    for window in report["full"]["layer_analysis"]["windows"]:
        assert report["layer_analysis"][window["layer_range"]]["degradation"] == window["degradation"]["value"]


def test_only_modules_with_outliers_are_listed(measured):
    """The massive channel is under `per_layer`, ordinary modules are not, and there is advice about it."""
    report = measured.generate_report()
    rows = report["channel_analysis"]["per_layer"]
    row = rows["model.layers.1.mlp.down_proj"]
    assert set(row) >= OUTLIERS and row["outlier_indices"] == [5] and row["max_ratio"] > 50
    assert "model.layers.0.mlp.down_proj" not in rows
    assert report["executive_summary"]["total_outlier_channels"] == sum(r["num_outliers"] for r in rows.values())
    assert any("model.layers.1.mlp.down_proj" in rec["component"] for rec in report["recommendations"])
    assert measured.channel_results == report["channel_analysis"]


def test_critical_operators_are_those_of_the_table(measured, monkeypatch):
    """A critical operator is named as its row is, so that the summary leads to the row."""
    rows = copy.deepcopy(measured.operator_results)
    for row in (*rows.values(), *rows["matmul"]["parts"].values()):
        row["sensitivity_score"] = 3.0
    rows["silu"]["sensitivity_score"] = None
    monkeypatch.setattr(measured, "operator_results", rows)
    assert measured.generate_report()["executive_summary"]["critical_operators"] == []
    rows["softmax"]["sensitivity_score"] = 3.1
    rows["matmul"]["parts"]["linear"]["sensitivity_score"] = 9.0  # a critical part makes the group critical
    summary = measured.generate_report()["executive_summary"]
    assert summary["critical_operators"] == ["matmul", "softmax"] and summary["num_critical_operators"] == 2


@pytest.mark.parametrize("name", ["run v1.2", "deep/er/run v1.2", "run v1.2.json", "run v1.2.md"])
def test_a_dot_in_the_name_is_no_suffix(measured, tmp_path, name):
    """save_report("run v1.2") writes "run v1.2.json" and "run v1.2.md", in folders that it makes."""
    paths = measured.save_report(tmp_path / name)
    assert [path.name for path in paths] == ["run v1.2.json", "run v1.2.md"]
    assert all(path.read_text(encoding="utf-8") for path in paths)
    assert sorted(path.name for path in paths[0].parent.iterdir() if path.is_file()) == [p.name for p in paths]


def test_correlations_of_a_report(measured):
    """A report's own correlations come in the notes' keys; two layers are too few to say anything."""
    found = validate_metric_correlations(measured.generate_report())
    assert set(found) == {"hessian_sensitivity", "outliers_sensitivity", "sparsity_degradation"}
    assert all(row["r"] is None and row["held"] is None and row["n"] == 2 for row in found.values())


def test_levels_and_operators_pass_through(subject, answered):
    """Keywords of `diagnose` work, names of operators in the notes' words; levels not asked for are empty."""
    diagnostic = IntegratedDiagnostic(subject, answered)
    diagnostic.run_full_diagnosis(levels=("operator",), operators=["matmul", "layernorm"], effort="screen")
    report = diagnostic.generate_report()
    assert list(report["operator_analysis"]) == ["matmul", "layernorm"]
    assert report["operator_analysis"]["matmul"]["operator"] == "gemm"
    assert report["operator_analysis"]["matmul"]["degradation"] is None  # only predicted
    assert report["layer_analysis"] == {} and report["channel_analysis"] == {"per_layer": {}}


def test_no_report_before_the_run(subject, answered):
    """A report without a run says what to call."""
    diagnostic = IntegratedDiagnostic(subject, answered)
    for call in (diagnostic.generate_report, lambda: diagnostic.save_report("x")):
        with pytest.raises(InvalidInput, match="run_full_diagnosis"):
            call()
