"""The experiment of phases as a document, from a small hand-made result; and drawn again by the command line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.reports.document import Bullets, Chart, Table
from noisescope.reports.experiment import (
    ArmAccuracy,
    ArmRow,
    ArmTraining,
    InjectionCounts,
    JudgedCriterion,
    Needed,
    PhasesCost,
    PhasesReport,
    PhasesResult,
    PhasesRun,
    PhasesSettings,
    ProblemSource,
    TaskSource,
    Theory,
    Trained,
    TrainingSettings,
    verdict_line,
)
from noisescope.stats import Estimate


def estimate(value: float, *, margin: float = 0.02, note: str = "") -> Estimate:
    return Estimate(value, value - margin, value + margin, 200, note=note)


def arm(name: str, noisy: float) -> ArmRow:
    return ArmRow(
        name,
        (0, 1),
        {"0": ArmAccuracy(0.98, 0.96, 1.0, 200), "0.05": ArmAccuracy(noisy, noisy - 0.02, noisy + 0.02, 200)},
        {"0.05": estimate(noisy / 0.98)},
        ArmTraining(0, 2.0814962, 0.021, InjectionCounts(0 if name == "none" else 120000, 0)),
    )


def criterion(quantity: str, verdict: str, found: Estimate, needed: Needed | None = None) -> JudgedCriterion:
    name, statement = f"{quantity} criterion", f"a statement of {quantity}"
    return JudgedCriterion(
        name, statement, quantity, ("a", "b"), 0.05, (0.05, None), found, 2, verdict, needed
    )  # fmt: skip


@pytest.fixture
def report() -> PhasesResult:
    training = TrainingSettings("supervised", "bundled", 600, 512, 3e-4, None, None, {"width": 96})
    settings = PhasesSettings(("none", "forward@0.05"), 2, 0.05, (0.0, 0.05), 2, ("gemm",), {}, training)
    undecided = "not decidable with this n"
    return PhasesResult(
        run=PhasesRun(
            TaskSource("a task"), ProblemSource("sums", 200), settings, "cpu", PhasesCost(1.0, 60.0, 4), (),
            "2026-01-02T03:04:05+00:00", {"noisescope": "0.2"}, "here",
        ),
        arms=(arm("none", 0.78), arm("forward@0.05", 0.9)),
        seeds=(0, 1),
        n=200,
        levels=(0.0, 0.05),
        trained=Trained(4, 0, 4),
        hypotheses=(
            criterion("accuracy", "supported", estimate(0.12)),
            criterion("accuracy", undecided, estimate(0.01), Needed(8, 400, 0.8)),
            criterion("gradient_norm", undecided, estimate(math.log(1.5)), Needed(5, 1, 0.8)),
        ),
        theory=Theory(undecided, {"forward beats both": "supported"}),
        could_not_see=(),
    )  # fmt: skip


def table(report: PhasesResult, key: str) -> Table:
    blocks = [block for section in PhasesReport(report).document().sections for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and block.key == key)


def test_a_criterion_is_given_in_its_own_unit(report: PhasesResult) -> None:
    """Shares differ by points, norms by a factor; what would decide counts problems only where problems are asked."""
    rows = [[cell.text for cell in row] for row in table(report, "hypotheses").rows]
    assert rows[0][1:] == ["+12.00 points [+10.00, +14.00]", "supported", ""]
    assert rows[1][3] == "8 seeds, 400 problems"
    assert (rows[2][1], rows[2][3]) == ("factor 1.5 [1.47, 1.53]", "5 seeds")
    assert verdict_line(report.hypotheses[0]).startswith("supported: a statement of accuracy (+12.00 points")
    assert verdict_line(report.hypotheses[1]).endswith("; 8 seeds, 400 problems would probably decide)")


def test_what_no_number_decides(report: PhasesResult) -> None:
    """A criterion out of the task's reach says why; one that would need too many seeds says how many were tried."""
    row = criterion("accuracy", "not decidable with this n", estimate(0.0))
    assert verdict_line(row).endswith("; no number of seeds up to 1000 would decide)")
    beyond = criterion("accuracy", "not measurable with this task", estimate(0.0, note="97 % already"))
    assert verdict_line(beyond).endswith("[-2.00, +2.00]; 97 % already)")


def test_the_theory_says_by_which_criteria(report: PhasesResult) -> None:
    """Its verdict stands first, and under it those of the criteria it goes by."""
    blocks = PhasesReport(report).document().sections[0].blocks
    assert isinstance(blocks[1], Bullets)
    assert [(item.lead, item.text) for item in blocks[1].items] == [("forward beats both:", "supported")]


def test_arms_have_rounded_numbers_and_a_chart_for_each_noise(report: PhasesResult) -> None:
    """No raw digits reach a reader; a level without noise has no chart."""
    assert table(report, "arms").head[2:] == (
        "accuracy at 0 % noise",
        "accuracy at 5 % noise",
        "retention at 5 % noise",
    )
    assert [cell.text for cell in table(report, "training").rows[1]] == [
        "forward@0.05",
        "0",
        "2.08",
        "0.021",
        "120000",
        "0",
    ]
    blocks = PhasesReport(report).document().sections[1].blocks
    assert [block.title for block in blocks if isinstance(block, Chart)] == ["Accuracy at 5 % noise"]


def test_a_stored_experiment_is_drawn_again(report: PhasesResult, tmp_path: Path) -> None:
    """`noisescope report` sees from report.json what kind it is; plans, which need a diagnosis, refuse it in a line."""
    file = tmp_path / "report.json"
    file.write_text(PhasesReport(report).to_json(), encoding="utf-8")
    drawn = CliRunner().invoke(app, ["report", str(file), "--format", "md,html,pdf"])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# noisescope: noise in training, by phase")
    assert PhasesReport.load(file).value == report
    refused = CliRunner().invoke(app, ["plan", "migration", str(file)])
    assert refused.exit_code == InvalidInput.exit_code
    assert "needs the report of a diagnosis" in refused.output


def test_a_notebook_shows_the_hypotheses(report: PhasesResult) -> None:
    """The theory's verdict and a row per hypothesis; accuracy by arm and noise level is another table."""
    shown = PhasesReport(report)
    assert report.theory.verdict in shown._repr_html_() and report.hypotheses[0].name in shown._repr_html_()
    assert len(shown.table("arms").rows) == sum(len(arm.accuracy) for arm in report.arms)
