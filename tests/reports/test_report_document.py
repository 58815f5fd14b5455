"""What a report says: one band and one score per row, labels by intervals, the metric by its name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from noisescope.diagnosis.report import Robustness
from noisescope.diagnosis.rows import Divergence, Effect, Interaction
from noisescope.reports.cell_text import band_between, band_of, divergence, estimate, finding_lines, metric_name
from noisescope.reports.document import Bullets, Chart, Document, HeatMap, Paragraph, Table, Verdict, every_block
from noisescope.reports.saved_report import DiagnosisReport, Report
from noisescope.stats import Estimate, select_largest


@pytest.fixture(scope="module")
def drawn(made: DiagnosisReport) -> Document:
    return Report(made).document()


def table(document: Document, key: str) -> Table:
    return next(block for block in document.blocks() if isinstance(block, Table) and block.key == key)


def row(document: Document, key: str, first: str) -> dict[str, str]:
    """The texts of the row that begins so, by the head of their columns."""
    found = table(document, key)
    cells = next(cells for cells in found.rows if cells[0].text == first)
    return dict(zip(found.head, (cell.text for cell in cells), strict=True))


def paragraphs(document: Document, section: str) -> str:
    blocks = list(every_block(next(found.blocks for found in document.sections if found.key == section)))
    lines = [block for block in blocks if isinstance(block, Paragraph)]
    lines += [item for block in blocks if isinstance(block, Bullets) for item in block.items]
    return "\n".join(" ".join(filter(None, (line.tag.text, line.lead, line.text, line.note))) for line in lines)


def test_one_band_and_one_score_per_row(drawn: Document) -> None:
    """The band that the interval decides, both where it reaches into another, and no second label in the row."""
    head = table(drawn, "operators").head
    assert [name for name in head if "band" in name] == ["band"] and [n for n in head if "score" in n] == [
        "sensitivity score"
    ]
    assert row(drawn, "operators", "gemm")["band"] == "CRITICAL"
    assert row(drawn, "operators", "softmax")["band"] == "MODERATE to HIGH (borderline)"
    for key in ("windows", "layers"):
        assert sum("band" in name for name in table(drawn, key).head) == 1


def test_a_borderline_row_has_the_colour_of_what_is_certain() -> None:
    """The upper band is possible, the lower one is known."""
    cell = band_of(Effect(band="MODERATE", band_upper="HIGH"))
    assert (cell.text, cell.tone) == ("MODERATE to HIGH (borderline)", "moderate")


def test_the_point_rules_stand_near_the_end_under_their_own_name(drawn: Document) -> None:
    """Labels of point values, which may differ from the bands: in one section, which says so."""
    titles = [section.title for section in drawn.sections]
    assert titles[-3:] == ["Point rules of the original method notes", "Method", "What this run could not see"]
    found = row(drawn, "point-rules", "softmax")
    assert found["band by point value"] == "HIGH" and found["score band by point value"] == "MODERATE"
    assert row(drawn, "point-rule-avalanches", "0 to 1")["severity"] == "CRITICAL"
    assert "the one that counts" in paragraphs(drawn, "point-rules")


def test_what_was_not_measured_has_no_point_label(made: DiagnosisReport) -> None:
    """A page of rows that all say "not measurable" tells nothing."""
    assert made.operator_analysis is not None
    unknown = Estimate(None, None, None, 4, note="not measurable")
    softmax = replace(made.operator_analysis["softmax"], degradation=unknown)
    found = Report(replace(made, operator_analysis={**made.operator_analysis, "softmax": softmax})).document()
    names = [cells[0].text for cells in table(found, "point-rules").rows]
    assert "gemm" in names and "softmax" not in names


def test_kl_is_typical_with_the_mean_beside_it(drawn: Document) -> None:
    """Where the tail allows no upper end of the mean, "at least" is all that is said; the method explains both."""
    found = row(drawn, "operators", "gemm")
    assert found["KL injected"] == "0.031 [0.0155, 0.062], mean 0.093"
    assert found["KL predicted"] == "0.0282 [0.0141, 0.0564], mean at least 0.0423"
    method = paragraphs(drawn, "method")
    assert "the geometric mean of the middle three fifths" in method and "'at least'" in method
    assert "nats per token" in method


def test_a_divergence_shows_the_typical_kl_and_the_mean() -> None:
    """The typical KL carries the interval; the mean is "at least" where its tail allows no upper end."""
    found = Divergence(Estimate(0.01, 0.005, 0.02, 9), Estimate(0.04, 0.03, None, 9))
    assert divergence(found).text == "0.01 [0.005, 0.02], mean at least 0.03" and divergence(found).value == 0.01
    nothing = Divergence(Estimate(None, None, None, 0, note="no finite value"), Estimate(None, None, None, 0))
    assert divergence(nothing).text == "no finite value" and divergence(None).text == ""


def test_avalanche_points_have_a_state_and_a_ratio_only_with_an_interval(drawn: Document) -> None:
    """Decided or borderline; a ratio that has no interval is not printed."""
    decided, borderline = row(drawn, "avalanche-points", "L0-1"), row(drawn, "avalanche-points", "L2-3")
    assert decided["state"] == "avalanche" and decided["over the costlier neighbour"] == "2.58 x [1.9, 3.6]"
    assert borderline["state"] == "borderline" and borderline["over the costlier neighbour"] == ""


def test_a_ratio_without_an_interval_is_not_printed(made: DiagnosisReport) -> None:
    """Also where a value is known."""
    assert made.layer_analysis is not None
    first, *others = made.layer_analysis.avalanche_points
    bare = replace(first, ratio=Estimate(2.58, None, None, 64))
    section = replace(made.layer_analysis, avalanche_points=(bare, *others))
    text = Report(replace(made, layer_analysis=section)).to_markdown()
    assert "2.58" not in text and "2.58" in Report(made).to_markdown()


def test_the_chart_marks_what_is_borderline(drawn: Document) -> None:
    """Hollow by a field, not by a word of its label."""
    charts = [block for block in drawn.blocks() if isinstance(block, Chart) and block.key == "windows-chart"]
    marks = {bar.label: (bar.mark, bar.undecided) for chart in charts for bar in chart.bars if bar.mark}
    assert marks == {"L0-1": ("avalanche point", False), "L2-3": ("avalanche point (borderline)", True)}


def test_findings_have_interval_n_and_notes(drawn: Document) -> None:
    """Severity, component, statement, interval, n, and what else is known of the same place."""
    lines = paragraphs(drawn, "summary").splitlines()
    first, second, third = (next(line for line in lines if name in line) for name in ("to 1:", "softmax:", ".mlp:"))
    assert first == (
        "CRITICAL layers 0 to 1: noise here costs 31.0 % of the next-token accuracy [25.0 %, 37.0 %], n = 64 "
        "layer 0 alone costs 20.0 %"
    )
    assert second.endswith("0.0007 nats per token [0.0003, 0.0014], n = 64")
    assert third == "MODERATE model.layers.0.mlp: 3 of 96 channels are outliers (n = 128)"


def test_the_risk_comes_first_and_its_raw_scores_last(drawn: Document) -> None:
    """One level with its meaning up front; both scores with their terms in details."""
    verdict = drawn.sections[0].blocks[0]
    assert isinstance(verdict, Verdict)
    assert (verdict.level.text, verdict.meaning) == ("HIGH", "validate much of it on the hardware")
    assert verdict.reasons == ("It is fragile.",) and verdict.level.tone == "high"
    assert row(drawn, "risk-scores", "report score (from the findings)")["points"] == "55"
    keys = [section.key for section in drawn.sections]
    assert keys.index("risk-scores") > keys.index("correlations")


def test_the_largest_row_is_given_corrected_for_selection(drawn: Document) -> None:
    """As its finding states it; the method says what that means, and no other row has it."""
    lost = "next-token accuracy lost"
    assert row(drawn, "operators", "gemm")[lost] == (
        "31.0 % [25.0 %, 37.0 %], corrected for selection 29.0 % [21.0 %, 37.0 %], upper end uncorrected"
    )
    assert row(drawn, "operators", "softmax")[lost] == "12.0 % [6.0 %, 18.0 %]"
    assert "only the lower end of its interval is corrected" in paragraphs(drawn, "method")


def test_a_finding_that_was_picked_says_which_end_is_corrected(made: DiagnosisReport) -> None:
    """Its interval allows for the choice at its lower end alone; other findings say nothing of it."""
    scores = np.random.default_rng(0).random((3, 40)) < [[0.9], [0.8], [0.5]]
    size = select_largest(np.ones(40), list(scores.astype(float))).estimate
    first = replace(made.findings[0], size=size)
    assert "(corrected for selection, upper end uncorrected), n = 40" in finding_lines(first)[0]
    assert "corrected" not in finding_lines(made.findings[0])[0]


def test_predictions_that_findings_scale_say_by_how_much(made: DiagnosisReport, drawn: Document) -> None:
    """A finding ranks predicted rows on the scale of injected ones: the factor stands beside the table."""
    assert "they multiply a predicted KL by 2, the median ratio of injected to predicted" in paragraphs(drawn, "layers")
    heat = next(block for block in drawn.blocks() if isinstance(block, HeatMap))
    assert [[cell and cell.text for cell in line] for line in heat.cells] == [["0.011*", None], [None, "0.0014"]]
    assert made.layer_analysis is not None
    alike = replace(made, layer_analysis=replace(made.layer_analysis, prediction_scale=1.0))
    assert "on the scale of injected medians" not in Report(alike).to_markdown()


def test_bands_of_metrics_follow_their_intervals(drawn: Document) -> None:
    """A metric whose interval reaches into another band says so, as rows do."""
    assert row(drawn, "metrics", "relative degradation")["band"] == "CRITICAL"
    assert row(drawn, "metrics", "critical threshold")["band"] == "HIGH to MODERATE (borderline)"
    assert band_between("degradation", Estimate(0.1, 0.028, 0.435, 64), "LOW").tone == "low"
    assert band_between("snr_db", None, "FAIR").text == "FAIR"


def test_an_interaction_index_has_an_interval_or_is_not_printed(made: DiagnosisReport) -> None:
    """Also one whose layers were only predicted."""
    assert made.layer_analysis is not None
    first, *others = made.layer_analysis.windows
    for index, shown in ((Estimate(25.5, None, None, 16), ""), (Estimate(1.7, 1.4, 2.1, 16), "1.7 [1.4, 2.1], layers")):
        window = replace(first, interaction_index=Interaction(index, "predicted"))
        section = replace(made.layer_analysis, windows=(window, *others))
        document = Report(replace(made, layer_analysis=section)).document()
        found = row(document, "windows", "L0-1").get("interaction index", "")
        assert found.startswith(shown) and bool(found) == bool(shown)


def test_a_correlation_says_whether_it_held_and_what_carries_it(drawn: Document) -> None:
    """yes, no or undecided; and where one layer carries it, that."""
    first = row(drawn, "correlations", "Hessian trace and sensitivity")
    second = row(drawn, "correlations", "outlier channels and sensitivity")
    assert first["held"] == "yes, carried by one layer" and second["held"] == "undecided"
    assert first["r without the most influential layer"] == "0.2"


@pytest.mark.parametrize("metric", ["accuracy", "next_token_accuracy", "agreement", "custom"])
def test_every_page_names_its_metric(made: DiagnosisReport, made_curve: Robustness, metric: str) -> None:
    """No table speaks of accuracy where another metric was measured."""
    measure = "custom" if metric == "custom" else "score"
    run = replace(
        made.run, metric="a" * 64 if metric == "custom" else metric, data=replace(made.run.data, measure=measure)
    )
    words = metric_name(metric)
    document = Report(replace(made, run=run)).document()
    for key in ("operators", "windows", "layers"):
        assert table(document, key).head[1] == f"{words} lost"
    curve = Report(replace(made_curve, run=run)).document()
    assert table(curve, "robustness").head[1:3] == (words, f"retention (share of the clean {words})")
    assert "_" not in words


def test_only_shares_are_written_in_percent(made_curve: Robustness) -> None:
    """A metric of one's own may be anything."""
    data = replace(made_curve.run.data, measure="custom")
    own = Report(replace(made_curve, run=replace(made_curve.run, data=data))).document()
    assert row(own, "robustness", "0.05")[metric_name("custom")] == "0.7 [0.65, 0.75]"
    assert row(Report(made_curve).document(), "robustness", "0.05")["next-token accuracy"] == "70.0 % [65.0 %, 75.0 %]"


def test_a_curve_explains_no_divergence(made_curve: Robustness) -> None:
    """It shows none."""
    text = Report(made_curve).to_markdown()
    assert "KL" not in text and "Intervals are 95 %" in text


def test_plans_speak_plain_english(drawn: Document) -> None:
    """The sentences of the design: units with "per", held-out samples by their name."""
    words = paragraphs(drawn, "precision")
    assert "5.00 bits per weight on average" in words and "nats per token" in words
    assert "Measured on 48 held-out samples that were not used to choose formats." in words
    assert row(drawn, "precision", "bit rule of the original method notes")["bits per weight"] == "5.00"


def test_a_band_without_an_interval_says_so(drawn: Document) -> None:
    """Gradient ratio and sparsity are single numbers; the SNR has an interval, which decides."""
    assert row(drawn, "metrics", "gradient ratio")["band"] == "MODERATE (by point value)"
    assert row(drawn, "metrics", "activation sparsity")["band"] == "DENSE (by point value)"
    assert row(drawn, "metrics", "SNR of the logits (dB)")["band"] == "FAIR to GOOD (borderline)"


def test_a_predicted_mean_stands_beside_the_measured_mean(made: DiagnosisReport, drawn: Document) -> None:
    """The typical KL has a column of its own; a mean without an upper end is a bound."""
    found = row(drawn, "precision", "this plan")
    columns = ("mean KL predicted", "mean KL measured", "typical KL measured")
    assert [found[name] for name in columns] == ["0.01", "0.03 [0.015, 0.09]", "0.01 [0.005, 0.02]"]
    plan = made.precision_plan
    assert plan is not None
    rows = tuple(replace(one, kl=Divergence(one.kl.typical, replace(one.kl.mean, high=None))) for one in plan.rows)
    bounded = Report(replace(made, precision_plan=replace(plan, rows=rows))).document()
    assert row(bounded, "precision", "this plan")["mean KL measured"] == "at least 0.015"


def test_no_quaint_word_is_left(made: DiagnosisReport, made_curve: Robustness) -> None:
    """What the sections themselves write."""
    text = (Report(made).to_markdown() + Report(made_curve).to_markdown()).lower()
    for word in ("surely", "parted", "a token", "a weight", " told", "not sure", "of the accuracy"):
        assert word not in text, word


def test_what_was_not_measured_says_so() -> None:
    """A note in place of a number, and never a number without its interval's open end."""
    assert estimate(Estimate(None, None, None, 0, note="not measurable")).tone == "unsure"
    assert estimate(Estimate(0.5, 0.25, None, 8), share=True).text == "50.0 % [25.0 %, ...]"
    assert estimate(Estimate(0.5, None, None, 1)).interval == ""


def test_notes_of_the_model_and_of_the_run_are_on_the_page(made: DiagnosisReport) -> None:
    model, run = replace(made.run.model, notes=("weights were dequantised",)), replace(made.run, notes=("1 at once",))
    found = Report(replace(made, run=replace(run, model=model))).document()
    assert all(f"Note: {note}." in paragraphs(found, "method") for note in (*model.notes, *run.notes))


def test_optional_sections_may_be_missing(made: DiagnosisReport) -> None:
    """A screen, one level, no plan: everything optional left out still draws."""
    bare = replace(
        made,
        operator_analysis=None, layer_analysis=None, channel_analysis=None, correlations={}, format_scores=None,
        gate=None, findings=(), recommendations=(), migration_plan=None, precision_plan=None, check=None, locate=None,
        executive_summary=replace(made.executive_summary, top_findings=()),
        metrics=replace(made.metrics, hessian_trace=None, baseline=None, fisher=None),
    )  # fmt: skip
    text = Report(bare).to_markdown()
    assert "Nothing stands out." in text and "## Operators" not in text
    assert Report.from_data(Report(bare).data, "x").value == bare
