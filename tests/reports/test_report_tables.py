"""Reports as tables, in notebooks, and as one flat dictionary for experiment trackers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from noisescope.comparison.roundoff import Digits, Roundoff, RoundoffBand, RoundoffFound
from noisescope.diagnosis.report import Robustness
from noisescope.estimate import Estimate
from noisescope.reports.saved_report import DiagnosisReport, Report


@pytest.fixture(scope="module")
def report(made: DiagnosisReport) -> Report:
    return Report(made)


class FakeTracker:
    """Takes what W&B, MLflow and TensorBoard have in common: a name of plain characters, and a finite float."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            assert isinstance(name, str) and name.replace("/", "").replace("_", "").replace(".", "").isalnum(), name
            assert type(value) is float and math.isfinite(value), name
            self.logged[name] = value
        folders = {name.rpartition("/")[0] for name in self.logged}
        assert not folders & set(self.logged)  # MLflow keeps a file per name


def test_a_tracker_takes_the_metrics(report: Report) -> None:
    """One flat dictionary of floats, with the numbers of the report."""
    tracker = FakeTracker()
    tracker.log(report.metrics())
    found, diagnosis = tracker.logged, report.diagnosis
    row = (diagnosis.operator_analysis or {})["softmax"]
    assert row.degradation is not None and diagnosis.precision_plan is not None
    assert found["operator/softmax/degradation"] == row.degradation.value
    assert found["operator/softmax/degradation_low"] == row.degradation.low
    assert found["risk_score"] == diagnosis.executive_summary.report_risk.score
    assert found["plan/average_bits"] == diagnosis.precision_plan.average_bits
    assert {f"layer/{n}/kl" for n in range(diagnosis.run.model.blocks)} <= set(found)


def test_what_was_not_measured_is_left_out(report: Report) -> None:
    """Never 0 and never NaN."""
    without = Report(replace(report.diagnosis, operator_analysis=None, layer_analysis=None, precision_plan=None))
    assert not any(name.startswith(("operator/", "layer/", "plan/")) for name in without.metrics())


def test_rows_of_a_diagnosis(report: Report) -> None:
    """All levels in one table that says where each row is; other tables by name."""
    pytest.importorskip("pandas")
    frame, diagnosis = report.to_frame(), report.diagnosis
    section = diagnosis.layer_analysis
    assert section is not None
    counts = frame["level"].value_counts()
    assert counts["window"] == len(section.windows) and counts["cell"] == len(section.map)
    softmax = frame[(frame["level"] == "operator") & (frame["operator"] == "softmax")].iloc[0]
    row = (diagnosis.operator_analysis or {})["softmax"]
    assert row.degradation is not None
    assert (softmax["degradation"], softmax["degradation_n"]) == (row.degradation.value, row.degradation.n)
    assert report.to_frame("findings")["component"].tolist() == [one.component for one in diagnosis.findings]
    assert {"channels", "costly_channels", "formats", "recommendations"} <= set(report.sheet().tables)


def test_a_notebook_shows_the_risk_and_the_findings(report: Report) -> None:
    shown, summary = report._repr_html_(), report.diagnosis.executive_summary
    assert f"Risk: {summary.overall_risk_level}" in shown and summary.top_findings[0].component in shown


def test_other_reports(made_curve: Robustness) -> None:
    """Accuracy by noise level."""
    curve, level = Report(made_curve), made_curve.robustness.levels[-1]
    assert level.accuracy is not None
    assert curve.metrics()[f"noise/{level.noise_level:g}/accuracy"] == level.accuracy.value
    assert "noise levels" in curve._repr_html_() and curve.to_csv().startswith("evidence,")


def test_round_off(made_curve: Robustness) -> None:
    """Digits by layer, and the band."""
    band = RoundoffBand("bfloat16", Estimate(0.04, 0.03, 0.05, 8), 0.01, 0.1, 0.01, 0.5, 8, 80, ())
    found = RoundoffFound(band, (Digits("0", 2.5, 2.0), Digits("1", None, None)), Digits("logits", 2.0, 1.5), None)
    report = Report(Roundoff(run=made_curve.run, roundoff=found, could_not_see=()))
    metrics = report.metrics()
    assert metrics["band"] == 0.04 and metrics["band_limit"] == 0.1 and metrics["digits/0"] == 2.5
    assert "digits/1" not in metrics and "Round-off in bfloat16" in report._repr_html_()
