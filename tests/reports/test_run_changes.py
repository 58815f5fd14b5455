"""Two compared runs as a document: what is said first, in which units, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noisescope.diagnosis.change_rows import (
    UNCHANGED,
    AskedDifferently,
    ChangeCounts,
    ChangeRow,
    ChangeVerdict,
    ComparedRuns,
    FailedInjection,
    RunChanges,
    RunFacts,
    SeedCounts,
)
from noisescope.diagnosis.report import DataFacts, ModelFacts, SettingsFacts
from noisescope.errors import InvalidInput
from noisescope.reports.document import Chart, Table
from noisescope.reports.markdown import to_markdown
from noisescope.reports.run_changes import Comparison, change_line, largest_changes, verdict_line
from noisescope.stats import Estimate
from noisescope.trials import Conditions


def side(name: str) -> RunFacts:
    return RunFacts(
        model=ModelFacts(f"models/{name}", "Llama", f"{name}123" * 16, 4, ()),
        data=DataFacts("x.jsonl", "task", 50, 500, "d" * 64, "", "score"),
        settings=SettingsFacts(
            "Gaussian(0.05)", 0.05, (), ("gemm",), ("gemm",), 3, 1, 10, (0, 1), "full", 2, 0.1, 0.2, 8
        ),
        metric="accuracy",
        conditions=Conditions("m", "float32", "cpu", "sdpa", 2),
        device="cpu",
        kl_floor=0.0,
        name=name,
        trials=9,
        failed=0,
    )


def number(value: float | None, spread: float = 0.1) -> Estimate:
    if value is None:
        return Estimate(None, None, None, 0, note="not measurable")
    return Estimate(value, value - spread, value + spread, 50)


def row(target: str, change: float | None, verdict: Any, *, metric: str = "accuracy", order: int = 0) -> ChangeRow:
    noise, p = "" if target == "no noise" else "at 0.05", 0.01 if verdict in ("worse", "better") else 0.2
    return ChangeRow(
        label=f"{target} {noise}".strip(), target=target, noise=noise, operators=None, layers=(), places=(),
        order=order, metric=metric, statistic="median" if metric == "kl" else "mean", paired=True, left_out=0,
        seeds=SeedCounts(2, 2, 2) if noise else None, a=number(0.8), b=number(None if change is None else 0.8 + change),
        difference=number(change), identical=False, p=None if change is None else p,
        p_corrected=None if change is None else 4 * p, smallest_detectable=None if change is None else 0.123,
        verdict=verdict,
    )  # fmt: skip


def counts(rows: Sequence[ChangeRow]) -> ChangeCounts:
    found = [row.verdict for row in rows]
    return ChangeCounts(found.count("worse"), found.count("better"), found.count("not measurable"), len(found))


def comparison(rows: Sequence[ChangeRow], word: Any = "worse", **changes: Any) -> Comparison:
    metrics = {
        metric: counts([r for r in rows if r.metric == metric]) for metric in dict.fromkeys(r.metric for r in rows)
    }
    found = RunChanges(
        a=side("a"),
        b=side("b"),
        differs=(AskedDifferently("settings.operators", ["gemm", "softmax"], ["gemm|x"]),),
        metric="accuracy",
        verdict=ChangeVerdict(word, **vars(counts(rows)), metrics=metrics),
        rows=tuple(rows),
        failed=(),
        only_in_a=(),
        only_in_b=(),
        notes=(),
    )
    return Comparison(ComparedRuns(comparison=replace(found, **changes)))


ROWS = [
    row("gemm, layer 1", -0.25, "worse", order=2),
    row("no noise", 0.0, UNCHANGED),
    row("gemm, layer 0", 0.02, UNCHANGED, order=1),
    row("gemm, layer 2", -0.01, UNCHANGED, order=3),
    row("gemm, layer 0", 0.4, "worse", metric="kl", order=1),
]


def test_the_page_in_words() -> None:
    """Verdict first, both runs, what differs, and a table for each metric with intervals, n and verdicts."""
    text = to_markdown(comparison(ROWS).document())
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## Verdict", "## The runs", "## Changes: accuracy",
        "## Changes: divergence from the clean model (KL, nats per token)", "## Method",
    ]  # fmt: skip
    assert "**Verdict:** B is worse than A. accuracy: 1 significantly worse, none better of 4;" in text
    assert "| weights (fingerprint) | a123a123a123 | b123b123b123 |" in text
    assert "models/a" in text and "models/b" in text and "| settings.operators | gemm, softmax | gemm\\|x |" in text
    line = "| gemm, layer 1 at 0.05 | 80.0 % [70.0 %, 90.0 %] | 55.0 % [45.0 %, 65.0 %] | -25 points [-35, -15] |"
    assert f"{line} worse | 50 | 2 | yes | 0.04 |" in text
    assert (
        "| no noise | 80.0 % [70.0 %, 90.0 %] |" in text
        and "no significant difference (smallest detectable 12.3 points)" in text
    )
    assert "| +0.4 [+0.3, +0.5] |" in text  # nats are no points
    assert "Medians over samples" in text.partition("## Changes: divergence")[2]


def test_shares_differ_by_points_and_other_numbers_do_not() -> None:
    """Points for shares; a metric of one's own has no unit; what can't be said is not measurable."""
    assert change_line(ROWS[0]) == (
        "accuracy, gemm, layer 1 at 0.05: 80.0 % -> 55.0 %, -25 points [-35, -15], n = 50, paired; worse"
    )
    own = change_line(replace(ROWS[1], metric="custom", paired=False))
    assert own.startswith("score, no noise: 0.8 -> 0.8, +0 [-0.1, +0.1], n = 50, unpaired; no significant")
    assert "%" not in own and "points" not in own
    lost = change_line(row("gemm", None, "not measurable", metric="kl"))
    assert lost.endswith("-> not measurable, not measurable, n = 0, paired; not measurable")
    blind = change_line(replace(ROWS[1], smallest_detectable=None))
    assert blind.endswith("no significant difference (none could have been detected)")
    assert change_line(replace(ROWS[1], identical=True)).endswith("identical on every sample")
    unsure = change_line(replace(ROWS[2], p=0.02, p_corrected=0.08))  # its own interval leaves 0 out
    assert unsure.endswith("not significant after correction (p = 0.02 alone; smallest detectable 12.3 points)")
    certain = change_line(replace(ROWS[2], p=0.0, p_corrected=0.08))
    assert "p = 0 alone" in certain
    single = change_line(replace(ROWS[0], difference=Estimate(-0.25, None, None, 50)))
    assert "-25 points, n" in single


def test_the_first_lines_name_significant_changes_of_every_metric() -> None:
    """The clean model first, then significant changes, not all of one metric; without any, what was compared."""
    many = [row(f"gemm, layer {i}", -0.5, "worse", order=i) for i in range(9)]
    named = largest_changes([*many, ROWS[4], *ROWS[1:4]])
    assert named[0].label == "no noise" and [r.metric for r in named[1:]] == ["accuracy"] * 3 + ["kl"]
    assert [r.label for r in largest_changes(ROWS[1:3])] == ["no noise", "gemm, layer 0 at 0.05"]
    assert largest_changes([row("gemm", None, "not measurable")]) == []


def test_a_null_result_has_its_power() -> None:
    """The verdict says what could have been found, and counts what could not be measured."""
    wider = replace(ROWS[3], smallest_detectable=0.2)
    unseen = comparison([*ROWS[1:3], wider, row("norm", None, "not measurable")], UNCHANGED)
    assert verdict_line(unseen.changes) == (
        "no significant difference. accuracy: none significantly worse, none better, 1 undecided of 4. "
        "Smallest detectable difference: accuracy 12.3 points to 20 points."
    )
    nothing = comparison([row("norm", None, "not measurable")], "undecided")
    assert verdict_line(nothing.changes).startswith("undecided. accuracy: none significantly worse, none better, 1 und")


def test_charts_run_along_the_model() -> None:
    """Bars in the model's order with their intervals; clean and other scales are none; three are needed."""
    other = replace(row("gemm", -0.1, "worse"), noise="at 0.2")
    sections = {s.key: s for s in comparison([*ROWS, other]).document().sections}
    chart, table = sections["changes-accuracy"].blocks
    assert isinstance(chart, Chart) and isinstance(table, Table) and len(table.rows) == 5
    assert [bar.label for bar in chart.bars] == ["gemm, layer 0", "gemm, layer 1", "gemm, layer 2"]
    assert chart.bars[1].cell.tone == "critical" and chart.bars[1].low == pytest.approx(-0.35)
    assert [type(block) for block in sections["changes-kl"].blocks] == [Table]
    assert len({s.key for s in sections.values()}) == len(sections)


def test_what_was_not_compared_is_said() -> None:
    """Lonely injections, failures of either side, notes; and equal questions are called equal."""
    found = comparison(
        ROWS, only_in_a=("norm at 0.05",), failed=(FailedInjection("lm_head at 0.05", "", "NaN <b>"),), notes=("so.",),
        differs=(),
    )  # fmt: skip
    text = found.to_markdown()
    assert "**Only A ran:** norm at 0.05." in text and "Only B ran" not in text
    assert "**Failed, lm_head at 0.05:** B: NaN &lt;b>" in text and "**Note:** so." in text
    assert "Both runs asked the same of the same model." in text


def test_a_comparison_is_saved_as_a_report_is(tmp_path: Path) -> None:
    """The same value in every form."""
    found = comparison(ROWS)
    paths = found.save(tmp_path, name="comparison", formats=["json", "md"])
    assert [path.name for path in paths] == ["comparison.json", "comparison.md"]
    assert json.loads(paths[0].read_text()) == found.data and paths[1].read_text() == found.to_markdown()
    again = Comparison.load(paths[0])
    assert repr(found) == "<Comparison: worse>" and again.value == found.value
    assert again.to_markdown() == found.to_markdown()


def test_a_comparison_of_another_version_is_refused(tmp_path: Path) -> None:
    """By its version, or by the part that does not fit: never half understood."""
    data = comparison(ROWS).data
    with pytest.raises(InvalidInput, match=r"written by noisescope 0\.1 .* Run `noisescope runs compare` again"):
        Comparison.from_data({**data, "schema_version": 1}, "old.json")
    changed = {**data, "comparison": {**data["comparison"], "notes": None}}
    with pytest.raises(InvalidInput, match=r"x\.json is not a whole report: report\.comparison\.notes: a list was"):
        Comparison.from_data(changed, "x.json")


def test_html_and_pdf_draw_it() -> None:
    """The page and the print hold the verdict; both need nothing that Markdown has not."""
    pytest.importorskip("noisescope.reports.html")
    pytest.importorskip("noisescope.reports.pdf")
    found = comparison(ROWS)
    assert "B is worse than A" in found.to_html() and found.to_pdf().startswith(b"%PDF")


def test_a_notebook_shows_the_changes() -> None:
    """The verdict, the largest changes; all rows as a table."""
    found = comparison([row("no noise", -0.1, "worse"), row("softmax", 0.0, "no significant difference", order=1)])
    assert "B is worse than A" in found._repr_html_() and "no noise" in found._repr_html_()
    assert len(found.to_csv().splitlines()) == 3
