"""Checks as JUnit XML that other programs can read, and gates over time as curves."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import hypothesis.strategies as st
import pytest
from hypothesis import given

from noisescope.errors import InvalidInput
from noisescope.plans.gate_rows import (
    ConditionsRow,
    DivergenceRow,
    GateBaseline,
    GateResult,
    GateRow,
    SampleCounts,
    ScoreRow,
)
from noisescope.reports.document import Curve, Table
from noisescope.reports.figure_files import figure_of
from noisescope.reports.junit import Case, to_junit, write_junit
from noisescope.reports.run_changes import trend
from noisescope.stats import Estimate


def test_verdicts_are_what_ci_shows():
    """Failed is a failure, undecided is skipped, passed keeps its numbers in the output."""
    cases = [Case("a", "pass", "x 1.0"), Case("b", "fail", "x 1.5"), Case("c", "undecided", "n = 2", 1.5)]
    (suite,) = ET.fromstring(to_junit("gate", cases))
    assert [suite.get(name) for name in ("tests", "failures", "skipped", "time")] == ["3", "1", "1", "1.500"]
    found = {case.get("name"): case for case in suite}
    assert found["a"].find("failure") is None and found["a"].findtext("system-out") == "x 1.0"
    assert found["b"].find("failure").get("message") == "x 1.5"
    assert found["c"].find("skipped").get("message") == "n = 2"
    with pytest.raises(InvalidInput, match="verdict"):
        Case("a", "maybe", "")


def test_the_verdict_may_come_from_elsewhere():
    """A gate whose comparisons are all undecided is undecided, though its outputs are finite."""
    rows = [Case("finite outputs", "pass", ""), Case("divergence", "undecided", "")]
    (suite,) = ET.fromstring(to_junit("s", rows, "undecided; 1 of 1 checks undecided"))
    assert suite.find("system-out").text == "undecided; 1 of 1 checks undecided"


@given(st.text(), st.text())
def test_any_text_is_xml(name, message):
    """Control characters, markup and foreign letters: what is written can be read."""
    (suite,) = ET.fromstring(to_junit("s", [Case(name, "fail", message)]))
    assert suite[0].find("failure") is not None


def test_a_file_that_can_not_be_written(tmp_path):
    """Folders are made; where that fails, one line says so."""
    cases = [Case("a", "pass", "m")]
    assert ET.parse(write_junit(tmp_path / "new" / "x.xml", "s", cases)).getroot().tag == "testsuites"
    with pytest.raises(InvalidInput, match="--junit"):
        write_junit(tmp_path, "s", cases)


def verdict(ratio: float, loss: float | None, step: int | None = None) -> GateResult:
    row = DivergenceRow("predicted divergence: gemm", "pass", "", "predicted_kl", "gemm", 0, 0.1, 0.1,
                        Estimate(ratio, 0.9, 1.4, 50), 1.3)  # fmt: skip
    return GateResult(
        verdict="pass", headline="passed; 1 of 5 checks undecided", worst=row, divergence=(row,), limits=(),
        worse_than=1.2, max_degradation=loss, max_degradation_allowed=0.15, paired=True, n=SampleCounts(50, 50, 50),
        finite=GateRow("finite outputs", "pass", ""), clean_score=ScoreRow("score without noise", "pass", "", 0.15),
        accuracy=(), model="m", baseline=GateBaseline("b", "before"), step=step, finished="2026-01-01", seconds=1.0,
        conditions=ConditionsRow("conditions", "pass", "", ()),
    )  # fmt: skip


def test_the_trend_of_gates():
    """Points at the steps, or in order; the limit is a line; what was not measured is left out."""
    document = trend([verdict(1.0, 0.1, 500), verdict(1.3, None, 1000)])
    ratios, losses = (block for block in document.sections[0].blocks if isinstance(block, Curve))
    assert [(x, bar.cell.value) for x, bar in ratios.points] == [(500, 1.0), (1000, 1.3)] and ratios.limit == 1.2
    assert [bar.cell.value for _, bar in losses.points] == [0.1, None] and losses.limit == 0.15
    assert "limit" in {text.get_text() for text in figure_of(losses).axes[0].texts}
    mixed = trend([verdict(1.0, 0.1, 500), verdict(1.3, None)]).sections[0].blocks[0]
    assert isinstance(mixed, Curve) and [x for x, _ in mixed.points] == [1, 2] and mixed.across == "gate"
    table = document.sections[0].blocks[2]
    assert isinstance(table, Table) and table.rows[0][3].text == "passed; 1 of 5 checks undecided"
    numbered = trend([verdict(1.0, 0.1)] * 3).sections[0].blocks[0]
    assert isinstance(numbered, Curve) and [x for x, _ in numbered.points] == [1, 2, 3] and numbered.across == "gate"
