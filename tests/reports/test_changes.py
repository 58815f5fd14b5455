"""Two compared runs as a document: what is said first, in which units, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from noisescope.reports.changes import Comparison, change_line, changes_document, largest, verdict_line
from noisescope.reports.document import Chart, Table
from noisescope.reports.markdown import to_markdown


def side(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"source": f"models/{name}", "architecture": "Llama", "blocks": 4, "fingerprint": f"{name}123" * 16},
        "data": {"source": "x.jsonl", "samples": 50, "fingerprint": "d" * 64},
        "settings": {"perturbation": "Gaussian(0.05)", "seeds": [0, 1]},
        "conditions": {"dtype": "float32"},
        "device": "cpu",
        "trials": 9,
        "failed": 0,
    }


def number(value: float | None, spread: float = 0.1) -> dict[str, Any]:
    if value is None:
        return {"value": None, "low": None, "high": None, "n": 0, "level": 0.95, "note": "not measurable"}
    return {"value": value, "low": value - spread, "high": value + spread, "n": 50, "level": 0.95}


def row(aim: str, change: float | None, verdict: str, *, metric: str = "accuracy", order: int = 0) -> dict[str, Any]:
    noise, p = "" if aim == "no noise" else "at 0.05", 0.01 if verdict in ("worse", "better") else 0.2
    return {
        "label": f"{aim} {noise}".strip(), "aim": aim, "noise": noise, "order": order, "metric": metric, "paired": True,
        "seeds": {"a": 2, "b": 2, "common": 2} if noise else None, "left_out": 0, "a": number(0.8),
        "b": number(None if change is None else 0.8 + change), "difference": number(change), "verdict": verdict,
        **({} if change is None else {"p": p, "p_corrected": 4 * p, "smallest_detectable": 0.123}),
    }  # fmt: skip


def comparison(rows: list[dict[str, Any]], **changes: Any) -> Comparison:
    metrics = {
        metric: {
            "worse": sum(r["metric"] == metric and r["verdict"] == "worse" for r in rows),
            "better": sum(r["metric"] == metric and r["verdict"] == "better" for r in rows),
            "looks": sum(r["metric"] == metric for r in rows),
        }
        for metric in dict.fromkeys(r["metric"] for r in rows)
    }
    found = {
        "a": side("a"),
        "b": side("b"),
        "differs": [{"what": "settings.operators", "a": ["gemm", "softmax"], "b": ["gemm|x"]}],
        "metric": "accuracy",
        "verdict": {"word": "worse", "worse": 1, "better": 0, "looks": len(rows), "metrics": metrics},
        "rows": rows,
        "failed": [],
        "only_in_a": [],
        "only_in_b": [],
        "notes": [],
        **changes,
    }
    return Comparison({"schema_version": 1, "comparison": found})


ROWS = [
    row("gemm, layer 1", -0.25, "worse", order=2),
    row("no noise", 0.0, "no difference seen"),
    row("gemm, layer 0", 0.02, "no difference seen", order=1),
    row("gemm, layer 2", -0.01, "no difference seen", order=3),
    row("gemm, layer 0", 0.4, "worse", metric="kl", order=1),
]


def test_the_page_in_words() -> None:
    """Verdict first, both runs, what differs, and a table for each metric with intervals, n and verdicts."""
    text = to_markdown(comparison(ROWS).document())
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## Verdict", "## The runs", "## Changes: accuracy",
        "## Changes: divergence from the clean model (KL, nats a token)", "## Method",
    ]  # fmt: skip
    assert "**Verdict:** B is worse than A. accuracy: 1 worse, none better of 4;" in text
    assert "| weights (fingerprint) | a123a123a123 | b123b123b123 |" in text
    assert "models/a" in text and "models/b" in text and "| settings.operators | gemm, softmax | gemm\\|x |" in text
    line = "| gemm, layer 1 at 0.05 | 80.0 % [70.0 %, 90.0 %] | 55.0 % [45.0 %, 65.0 %] | -25 points [-35, -15] |"
    assert f"{line} worse | 50 | 2 | yes | 0.04 |" in text
    assert (
        "| no noise | 80.0 % [70.0 %, 90.0 %] |" in text
        and "no difference seen (smallest detectable 12.3 points)" in text
    )
    assert "| +0.4 [+0.3, +0.5] |" in text  # nats are no points


def test_shares_differ_by_points_and_other_numbers_do_not() -> None:
    """Points for shares; a metric of one's own has no unit; what can't be said is not measurable."""
    assert change_line(ROWS[0]) == (
        "accuracy, gemm, layer 1 at 0.05: 80.0 % -> 55.0 %, -25 points [-35, -15], n = 50, paired; worse"
    )
    own = change_line({**ROWS[1], "metric": "custom", "paired": False})
    assert own.startswith("your metric, no noise: 0.8 -> 0.8, +0 [-0.1, +0.1], n = 50, unpaired; no difference seen")
    assert "%" not in own and "points" not in own
    lost = change_line(row("gemm", None, "not measurable", metric="kl"))
    assert lost.endswith("-> not measurable, not measurable, n = 0, paired; not measurable")
    blind = change_line({**ROWS[1], "smallest_detectable": None})
    assert blind.endswith("no difference seen (nor could one have been)")
    unsure = change_line({**ROWS[2], "p": 0.02, "p_corrected": 0.08})  # its own interval leaves 0 out
    assert unsure.endswith("not sure among so many (p = 0.02 alone; smallest detectable 12.3 points)")
    single = change_line({**ROWS[0], "difference": {**number(-0.25), "low": None, "high": None}})
    assert "-25 points, n" in single


def test_the_first_lines_name_sure_changes_of_every_metric() -> None:
    """The clean model first, then sure changes, not all of one metric; without any, what was looked at."""
    many = [row(f"gemm, layer {i}", -0.5, "worse", order=i) for i in range(9)]
    named = largest({"rows": [*many, ROWS[4], *ROWS[1:4]]})
    assert named[0]["label"] == "no noise" and [r["metric"] for r in named[1:]] == ["accuracy"] * 3 + ["kl"]
    assert [r["label"] for r in largest({"rows": ROWS[1:3]})] == ["no noise", "gemm, layer 0 at 0.05"]
    assert largest({"rows": [row("gemm", None, "not measurable")]}) == []
    unseen = comparison(
        ROWS[1:4], verdict={**comparison(ROWS[1:4])["comparison"]["verdict"], "word": "no difference seen"}
    )
    assert verdict_line(unseen["comparison"]).startswith("no difference seen. accuracy: none worse, none better of 3")


def test_charts_run_along_the_model() -> None:
    """Bars in the model's order with their intervals; clean and other scales are none; three are needed."""
    other = {**row("gemm", -0.1, "worse"), "noise": "at 0.2"}
    sections = {s.key: s for s in changes_document(comparison([*ROWS, other]).data).sections}
    chart, table = sections["changes-accuracy"].blocks
    assert isinstance(chart, Chart) and isinstance(table, Table) and len(table.rows) == 5
    assert [bar.label for bar in chart.bars] == ["gemm, layer 0", "gemm, layer 1", "gemm, layer 2"]
    assert chart.bars[1].cell.tone == "critical" and chart.bars[1].low == pytest.approx(-0.35)
    assert [type(block) for block in sections["changes-kl"].blocks] == [Table]
    assert len({s.key for s in sections.values()}) == len(sections)


def test_what_was_not_compared_is_said() -> None:
    """Lonely injections, failures of either side, notes; and equal questions are called equal."""
    found = comparison(
        ROWS, only_in_a=["norm at 0.05"], failed=[{"label": "lm_head at 0.05", "a": "", "b": "NaN <b>"}], notes=["so."],
        differs=[],
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
    assert repr(found) == "<Comparison: worse>" and Comparison.load(paths[0]).to_markdown() == found.to_markdown()


def test_html_and_pdf_draw_it() -> None:
    """The page and the print hold the verdict; both need nothing that Markdown has not."""
    pytest.importorskip("noisescope.reports.html")
    pytest.importorskip("noisescope.reports.pdf")
    found = comparison(ROWS)
    assert "B is worse than A" in found.to_html() and found.to_pdf().startswith(b"%PDF")
