"""The first screen and the one-page summary: what a reader must know, and commands that can be pasted."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.cli.command_builder import COMMANDS
from noisescope.diagnosis.format_question import Question
from noisescope.diagnosis.rows import LayerAnalysis
from noisescope.options.fields import options_of
from noisescope.reports.cell_text import band_of
from noisescope.reports.document import Chart, Columns, Command, Curve, Document, HeatMap, Panel, every_block
from noisescope.reports.markdown import to_markdown
from noisescope.reports.next_steps import next_steps, run_command
from noisescope.reports.saved_report import DiagnosisReport, Report


def document(report: DiagnosisReport) -> Document:
    return Report(report).document()


def panels(report: DiagnosisReport) -> dict[str, Panel]:
    blocks = document(report).sections[0].blocks
    return {panel.title: panel for block in blocks if isinstance(block, Columns) for panel in block.panels}


def pictures(report: DiagnosisReport) -> dict[str, Chart | Curve | HeatMap]:
    return {block.key: block for block in document(report).blocks() if isinstance(block, (Chart, Curve, HeatMap))}


def with_run(report: DiagnosisReport, **changes: Any) -> DiagnosisReport:
    return replace(report, run=replace(report.run, **changes))


def screen(report: DiagnosisReport) -> DiagnosisReport:
    return with_run(report, settings=replace(report.run.settings, effort="screen"))


# -- what it answers


def test_the_first_section_answers_five_questions(made: DiagnosisReport) -> None:
    """How fragile (the verdict), where, what to do, how certain, what was not covered; the picture is among them."""
    found = panels(made)
    assert list(found) == ["Where it is fragile", "", "What to do", "How certain this is", "What was not covered"]
    assert isinstance(found[""].blocks[0], HeatMap)
    text = to_markdown(document(made).summary())
    assert "64 samples with 1200 scored tokens, 2 noise seeds" in text
    assert "Noise was injected into 1 of 2 cells of the map; the others are predicted." in text
    assert "A loss below 4.0 % could have been missed." in text


def test_date_version_and_command_stand_at_the_top(made: DiagnosisReport) -> None:
    """Of the run, not of the drawing."""
    found = document(made)
    assert dict(found.facts)["Run"] == "2026-01-02 03:04, noisescope 0.2, cpu, float32"
    assert found.command == (
        "noisescope diagnose demo --effort standard --samples 64 --seeds 2 --window 2 --data test.jsonl --device cpu "
        "--dtype float32"
    )


def test_many_limits_are_counted(made: DiagnosisReport) -> None:
    """The last four on the first screen, all in their section."""
    many = replace(made, could_not_see=tuple(f"limit {i}" for i in range(9)))
    text = to_markdown(document(many).summary())
    assert "Limit 8." in text and "Limit 4." not in text and "5 more limits in the whole report." in text
    assert "limit 0" in to_markdown(document(many))


def test_the_check_counts_as_evidence(made: DiagnosisReport) -> None:
    """Where a fault was simulated, its cost stands beside the findings."""
    assert made.check is not None
    warned = made.check.windows[0]
    least = replace(warned, role="least", start_layer=2, end_layer=3)
    checked = replace(made, check=replace(made.check, windows=(warned, least)))
    assert "the same fault costs 33.0 % [27.0 %, 39.0 %] where the report warns" in to_markdown(document(checked))
    bars = pictures(checked)["check-chart"]
    assert isinstance(bars, Chart)
    marks = [(bar.label, bar.mark) for bar in bars.bars]
    assert marks == [("0 to 1", "the report warns here"), ("2 to 3", "least, according to the report")]


# -- next steps


def commands(report: DiagnosisReport) -> list[list[str]]:
    return [shlex.split(step.text) for step in next_steps(report)]


def test_every_next_step_is_a_command_with_options_that_exist(made: DiagnosisReport) -> None:
    """The command is one of ours, and each flag one of its options: a renamed option fails here."""
    bare = replace(made, precision_plan=None)
    for words in [*commands(made), *commands(screen(bare)), shlex.split(run_command(made.run))]:
        assert words[0] == "noisescope"
        name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
        flags = {flag for option in options_of(COMMANDS[name][0], "command").values() for flag in _flags(option)}
        assert {word for word in words if word.startswith("-")} <= flags, words


def _flags(option: Any) -> list[str]:
    return [flag for flag in (option.flag, getattr(option, "short", "")) if flag]


def test_what_comes_next_depends_on_what_was_done(made: DiagnosisReport) -> None:
    """A screen is confirmed, a run with too few samples repeated with more, a plan exported, else made."""
    first = next(next_steps(screen(made)))
    assert "--effort standard" in first.text and "--samples 100" in first.text
    unsure = replace(made.executive_summary, overall_risk_level="not measurable")
    assert "--samples 256" in next(next_steps(replace(made, executive_summary=unsure))).text
    few = with_run(made, data=replace(made.run.data, available=70))
    assert "--samples 70" in next(next_steps(screen(few))).text
    assert "diagnose" not in next(next_steps(with_run(screen(made), command=None))).text
    assert any("--export llm-compressor" in step.text for step in next_steps(made))
    assert any("--verify" in step.text for step in next_steps(replace(made, precision_plan=None)))
    assert not [step for step in next_steps(replace(made, layer_analysis=None)) if "migration" in step.text]


def test_steps_say_how_long_they_take(made: DiagnosisReport) -> None:
    """A diagnosis by whoever can estimate it, a verification by the speed of the run."""
    asked: list[Any] = []

    def seconds_of(changes: Any) -> float:
        asked.append(dict(changes))
        return 600.0

    assert next(next_steps(screen(made))).words == "Confirm the predictions by injection:"
    first = next(next_steps(screen(made), None, seconds_of))
    assert first.words == "Confirm the predictions by injection (about 10 min):"
    assert asked == [{"effort": "standard", "samples": 100}]
    slow = with_run(replace(made, precision_plan=None), cost=replace(made.run.cost, seconds=640.0, forwards=10.0))
    (verified,) = (step for step in next_steps(slow) if "--verify" in step.text)
    assert slow.format_scores is not None
    forwards = 64 * (35 + len(slow.format_scores.uniform))  # at a second each
    assert verified.words.endswith(f"measure the result (about {forwards / 60:.0f} min):")


def test_what_has_no_severity_is_explained(made: DiagnosisReport) -> None:
    """A tag that says how it is ranked, and a sentence that says what this means."""
    ranked = replace(made.executive_summary, top_findings=made.findings[:2])
    text = to_markdown(document(replace(made, executive_summary=ranked)).summary())
    assert "not rated" not in text and text.count("ranked by KL") == 1
    assert '"Ranked by KL": noise here moves the output (KL in nats per token), and no loss of ' in text
    rated = replace(made.executive_summary, top_findings=made.findings[:1])
    assert "Ranked by KL" not in to_markdown(document(replace(made, executive_summary=rated)).summary())


def test_names_from_elsewhere_are_quoted(made: DiagnosisReport) -> None:
    """A folder or a model of any name is one word of the command."""
    evil = "a b; rm -rf $HOME `x`"
    model = replace(made.run.model, source=evil)
    assert made.run.command is not None
    command = replace(made.run.command, options={**made.run.command.options, "model": evil})
    for words in commands(with_run(screen(made), store=evil, model=model, command=command)):
        assert evil in words and "rm" not in words


def test_data_and_lengths_are_the_same_in_every_step(made: DiagnosisReport) -> None:
    """A gate or a plan that measures, measures what the report did; typed paths replace those that were cut."""
    assert made.run.command is not None
    options = {**made.run.command.options, "max_tokens": 96, "prompt_field": "q", "operators": ["softmax", "norm"]}
    asked = with_run(made, command=replace(made.run.command, options=options, cut=("test.jsonl",)))
    steps = {step.text.split()[1]: step.text for step in next_steps(replace(screen(asked), precision_plan=None))}
    for name in ("diagnose", "plan", "gate"):
        assert "--max-tokens 96" in steps[name] and "--prompt-field q" in steps[name], name
    assert "--operators softmax,norm" in steps["diagnose"] and "--data test.jsonl" in steps["gate"]
    typed = {"model": "/m/a b", "data": "/d/test.jsonl", "output": "/runs/out"}
    for step in next_steps(screen(asked), typed):
        assert "/runs/out" in step.text
        assert "'/m/a b'" in step.text or "migration" in step.text or "--export" in step.text
    assert "write out test.jsonl" in to_markdown(document(asked))
    assert "write out" not in to_markdown(document(made))


# -- pictures


def test_the_map_has_every_layer_above_it(made: DiagnosisReport) -> None:
    """Bars in the order of the rows, on the scale of injected ones, then the places outside the blocks."""
    section = made.layer_analysis
    assert section is not None
    whole = replace(section, map=tuple(replace(section.map[1], layer=layer) for layer in range(4)))
    heat = pictures(replace(made, layer_analysis=whole))["map"]
    assert isinstance(heat, HeatMap) and [bar.label for bar in heat.strip] == [*heat.rows, "lm_head"]
    second = heat.strip[1]
    assert second.cell.value == section.layers[1].nats and second.low == pytest.approx(second.cell.value / 2)
    assert heat.strip[0].cell.tone == "high" and second.cell.tone == ""


def test_without_layers_the_operators_are_the_picture(made: DiagnosisReport) -> None:
    """And are not drawn twice; with no level at all there is no picture."""
    bare = replace(made, layer_analysis=None)
    assert [block.key for block in document(bare).blocks() if isinstance(block, Chart)].count("operators-chart") == 1
    first = every_block(document(bare).sections[0].blocks)
    assert "operators-chart" in {block.key for block in first if isinstance(block, Chart)}
    nothing = replace(bare, operator_analysis=None, format_scores=None, check=None)
    assert pictures(nothing) == {} and "pictures" not in {section.key for section in document(nothing).sections}


def test_operators_without_a_loss_show_their_divergence(made: DiagnosisReport) -> None:
    """A screen injects nothing: what it predicts is drawn, and called so; absent and failed ones are left out."""
    assert made.operator_analysis is not None
    rows = {
        name: replace(row, evidence="predicted", degradation=None, kl=None) if row.injected else row
        for name, row in made.operator_analysis.items()
    }
    chart = pictures(replace(made, operator_analysis=rows))["operators-chart"]
    assert isinstance(chart, Chart) and chart.title == "Predicted divergence by operator"
    assert [bar.label for bar in chart.bars] == ["gemm", "softmax"]


def test_bits_against_kl(made: DiagnosisReport) -> None:
    """The predicted frontier as a line, the plan and its rivals as points; without a plan, uniform formats, hollow."""
    curve = pictures(made)["pareto"]
    assert isinstance(curve, Curve) and [x for x, _ in curve.points] == [4.0]
    assert [bar.label for _, bar in curve.marked] == ["this plan", "uniform int4", "bit rule"]
    before = pictures(replace(made, precision_plan=None))["pareto"]
    assert isinstance(before, Curve) and [(x, bar.label, bar.undecided) for x, bar in before.marked] == [
        (8, "int8", True),
        (4, "int4", True),
    ]
    assert [x for x, _ in before.points] == [4.0, 8.0]
    assert "pareto" not in pictures(replace(made, format_scores=None))


def test_an_analysis_without_a_map_draws_none(made: DiagnosisReport) -> None:
    """Nothing empty: neither picture nor table."""
    section = made.layer_analysis
    assert isinstance(section, LayerAnalysis)
    assert "map" not in pictures(replace(made, layer_analysis=replace(section, map=())))


# -- the summary


@pytest.fixture(scope="module")
def saved(made: DiagnosisReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Report(made).save(tmp_path_factory.mktemp("run"), formats=["json"])[0]


def test_the_summary_is_one_page(saved: Path, tmp_path: Path) -> None:
    """The first section of the report, in the forms that are asked for; JSON is none of them."""
    found = CliRunner().invoke(app, ["report", str(saved), "--summary", "--format", "md,html", "-o", str(tmp_path)])
    assert found.exit_code == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["summary.html", "summary.md"]
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "**Risk: HIGH**" in text and "### What to do" in text and "## Method" not in text
    refused = CliRunner().invoke(app, ["report", str(saved), "--summary", "--format", "json"])
    assert refused.exit_code == 2 and "choose --format from md, html, pdf" in refused.output


def test_a_github_job_gets_the_summary_appended(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what is there already; elsewhere the error says what to use."""
    page = tmp_path / "step.md"
    page.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert CliRunner().invoke(app, ["report", str(saved), "--step-summary"]).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n# noisescope report: summary\n") and "**Risk: HIGH**" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step.md"]
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    refused = CliRunner().invoke(app, ["report", str(saved), "--step-summary"])
    assert refused.exit_code == 2 and "use --summary" in refused.output


def test_the_text_map_shows_the_worst_place(made: DiagnosisReport) -> None:
    """In Markdown a column for each layer, a row for each operator, the tallest sign where most diverges."""
    text = to_markdown(document(made).summary())
    assert "layer   0\n        01\nmatmul  █·\nsoftmax ·▁\n" in text


def test_a_command_of_a_report_is_in_every_form(made: DiagnosisReport) -> None:
    """As a block that can be copied."""
    steps = [block for block in document(made).blocks() if isinstance(block, Command)]
    assert 0 < len(steps) <= 3 and all(f"```\n{step.text}\n```" in to_markdown(document(made)) for step in steps)


def test_a_number_format_has_no_noise(made: DiagnosisReport) -> None:
    """It draws nothing: no seeds are counted, and nothing is called noise that was rounded."""
    question = Question("int4", "weights", "group", 64, False)
    rounded = with_run(made, settings=replace(made.run.settings, question=question))
    text = to_markdown(document(rounded).summary())
    assert "scored tokens; intervals are 95 %" in text and "noise seed" not in text
    assert "The format was applied to 1 of 2 cells of the map" in text


def test_noise_is_told_in_words(made: DiagnosisReport) -> None:
    """Not as the repr of a value; a perturbation of the caller's own is shown as it prints itself."""
    shown = "Gaussian(scale=0.05, relative_to='element')"
    told = with_run(made, settings=replace(made.run.settings, perturbation=shown))
    assert dict(document(told).facts)["Noise"] == "Gaussian, 5 % of each number, 2 seeds"
    own = with_run(made, settings=replace(made.run.settings, perturbation="Mine()"))
    assert dict(document(own).facts)["Noise"] == "Mine(), 2 seeds"


def test_a_loss_that_may_be_nothing_has_no_low_colour(made: DiagnosisReport) -> None:
    """From LOW to CRITICAL nothing is certain; from MODERATE on that much is."""
    row = next(iter((made.operator_analysis or {}).values()))
    for band, tone in (("LOW", "unsure"), ("MODERATE", "moderate")):
        cell = band_of(replace(row, band=band, band_upper="CRITICAL"))
        assert (cell.text, cell.tone) == (f"{band} to CRITICAL (borderline)", tone)
