"""A verdict for people: lines on a terminal, Markdown and HTML say the same; the picture shows what was judged."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest

from noisescope.localization.coverage import Cell, Coverage, NotJudged, Phase, Share
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.reports.locate_report import as_text, grid, verdict_document, verdict_lines
from noisescope.reports.pdf import to_pdf
from noisescope.reports.saved_report import LocateSection
from noisescope.sites import Site

LIMITS = {
    "linear": {"sites": 113, "element_ulp": 63.59, "mean_ulp": 2.577, "gain": 2.2e-07},
    "softmax": {"sites": 1, "element_ulp": 28.0, "mean_ulp": None, "gain": 9.4e-08},
    "norm, by relations": {"noise": {"size": 0.0}, "gain": {"size": None}, "bias": {"size": 0.0123}},
    "instability": {"relative_std": 4.5e-07},
}
COVERAGE = Coverage(
    phases=(
        Phase("prefill", 2, 32),
        Phase("prefill", 8, 15, padding="left"),
        Phase("decode", 8, 15, 2, "left"),
        Phase("prefill", 1, 1),
        Phase("decode", 1, 1, 1),
    ),
    not_run=("prefill 1 x 257 tokens: the budget of 5 s was spent",),
    modules=Share(81, 100),
    parameters=Share(1, 1),
    multiply_adds=Share(1, 1),
    not_judged=(NotJudged("LoraLinear", ("a.<b>", "c"), "noisescope has no formula"),),
    cells=(
        Cell("lm_head", "linear", 1, 1),
        Cell("embed", "embedding", 1, 1),
        *(Cell(block, "linear", 7, 7) for block in range(3)),
        Cell(0, "norm", 0, 2),
        Cell(1, "norm", 1, 2),
        Cell(0, "scan", 1, 1),
    ),
    repeated=3,
)
SUSPECTS = (
    Suspect(
        Site("linear", 1, "model.layers.1.mlp.down_proj"), "tile", 0.99, "16 of 64 elements are off", 2.0,
        channels=tuple(range(16, 32)), class_confidence=0.8, rows=((0, 3), (1, 4)),
        also=(Site("linear", 2, "model.layers.2.mlp.down_proj"),),
    ),
    Suspect(
        Site("softmax", 1, "model.layers.1.self_attn", tensor="input"), "gain", 0.9, "the mean is off", 1.0,
        period=32, row_words="tokens 3 to 7 of sequence 1",
    ),
)  # fmt: skip
UNDECIDED = Verdict("undecided", "auto: audit", (), LIMITS, 7.0, 1, ("a note",), coverage=COVERAGE)
FAULTY = Verdict("faulty", "auto: audit", SUSPECTS, LIMITS, 7.0, 512, coverage=COVERAGE)


def test_the_terminal_says_what_ran_and_what_did_not() -> None:
    lines = list(verdict_lines(UNDECIDED))
    assert lines[0] == UNDECIDED.headline and lines[1] == "method: auto: audit, 1 check, 7 forwards"
    said = "\n".join(lines)
    assert "  prefill 8 x 15 tokens, left padding, then 2 decode steps\n" in said
    assert "  prefill 1 x 1 tokens, then 1 decode step\n" in said
    assert "hits more than 31.3 % of the forwards is excluded with 95 % confidence" in said  # 8 forwards
    assert "not run:\n  prefill 1 x 257 tokens: the budget of 5 s was spent\n" in said
    assert "not judged:\n  LoraLinear (a.<b> and 1 more): noisescope has no formula\n" in said
    assert said.endswith("notes:\n  a note")


def test_detection_limits_of_scans_are_readable() -> None:
    """Counts in full, and nothing of what is empty; a fraction of a forward to one place."""
    seen = {"bookkeeping": {"element_ulp": 1.0, "elements": 4423680, "blind": []}, "sums": {"blind": ["a", "b"]}}
    lines = list(verdict_lines(replace(UNDECIDED, smallest_visible=seen, forwards=12.0873)))
    assert "  bookkeeping: element ulp 1, elements 4,423,680" in lines and "  sums: blind a, b" in lines
    assert lines[1].endswith("12.1 forwards")


def test_detection_limits_are_always_there_with_their_units() -> None:
    for verdict in (UNDECIDED, FAULTY):
        said = "\n".join(verdict_lines(verdict))
        assert "  linear: element 63.59 ulp, mean 2.577 ulp, gain 2.2e-07 (113 sites)\n" in said
        assert "  softmax: element 28 ulp, mean not visible, gain 9.4e-08 (1 site)\n" in said
        assert "  norm, by relations: noise any, gain not visible, bias 0.012\n" in said
        assert "ulp: unit in the last place" in said and "relative to the rms" in said
    plain = "\n".join(verdict_lines(Verdict("healthy", "scans", (), {"instability": {"relative_std": 1.0}})))
    assert "instability: relative std 1" in plain and "ulp" not in plain


def test_suspects_have_rows_and_channels() -> None:
    lines = list(verdict_lines(FAULTY))
    assert lines[1:6] == [
        "1. linear at block 1 (model.layers.1.mlp.down_proj): tile, confidence 0.99 (of the class 0.80)",
        "   16 of 64 elements are off",
        "   the same at linear at block 2 (model.layers.2.mlp.down_proj)",
        "   rows (sequence, token): (0, 3), (1, 4)",
        "   channels 16, 17, 18, 19, 20, 21, 22, 23 and 8 more",
    ]
    assert lines[6:10] == [
        "2. input of softmax at block 1 (model.layers.1.self_attn): gain, confidence 0.90",
        "   the mean is off",
        "   tokens 3 to 7 of sequence 1",
        "   every 32 channels",
    ]
    said = "\n".join(lines)
    assert "is excluded" not in said and "judged:\n  81 % of modules" in said
    many = Verdict("faulty", "audit", SUSPECTS * 4)
    assert "   and 3 more (the JSON form lists all)" in list(verdict_lines(many))


def test_the_picture() -> None:
    """In the order of the model; suspects also where nothing was counted; what is not there stays empty."""
    made = grid(FAULTY)
    assert made.rows == ("embed", "block 0", "block 1", "block 2", "lm_head")
    assert made.columns == ("linear", "softmax", "norm", "embedding", "scan")
    tones = [[cell.tone if cell else None for cell in row] for row in made.cells]
    assert tones == [
        [None, None, None, "low", None],
        ["low", None, "unsure", None, "low"],
        ["critical", "critical", "moderate", None, None],
        ["critical", None, None, None, None],
        ["low", None, None, None, None],
    ]
    assert made.notes[2][0] == "linear at block 1 (model.layers.1.mlp.down_proj): tile"
    assert [words for *_, words in made.legend] == ["judged, no fault", "suspect", "judged in part", "not judged"]
    assert [words for *_, words in grid(Verdict("healthy", "audit")).legend] == []


def test_the_backward_has_a_picture_of_its_own() -> None:
    """Beside the forward's columns it would be out of sight."""
    wrong = Suspect(Site("linear", 1, "layers.1.up", phase="backward"), "gain", 0.99, "words", 1.0)
    cells = (Cell(0, "linear", 7, 7), Cell(0, "linear, backward", 14, 14))
    verdict = Verdict("faulty", "audit", (wrong,), coverage=Coverage(cells=cells))
    forward, backward = grid(verdict), grid(verdict, "backward")
    assert (forward.rows, forward.columns) == (("block 0",), ("linear",))
    assert (backward.rows, backward.columns) == (("block 0", "block 1"), ("linear",))
    assert [cell.tone if cell else None for (cell,) in backward.cells] == ["low", "critical"]
    assert "What was judged, backward" in as_text(verdict, ".html")


@pytest.mark.parametrize("verdict", [UNDECIDED, FAULTY, Verdict("healthy", "relations", checked=3)])
def test_all_forms_say_the_same(verdict: Verdict) -> None:
    page, text = as_text(verdict, ".html", [("Model", "demo")]), as_text(verdict, ".md", [("Model", "demo")])
    shown = html.unescape(re.sub(r"<[^>]+>", "", page.partition("<body>")[2].partition("<script>")[0]))
    plain = text.replace("&lt;", "<").replace("**", "")
    for line in verdict_lines(verdict):
        if line.endswith(":"):  # a title
            continue
        words = re.sub(r"^(healthy|faulty|undecided|method): |^\d\. |^ +", "", line)
        assert words in shown and words in plain, words
    assert "https://" not in page and "a.<b>" not in page


def test_markdown_has_the_picture_in_signs() -> None:
    text = as_text(FAULTY, ".md")
    assert "| block 1 | 🟥 tile | 🟥 gain | 🟨 1 of 2 |  |  |" in text
    assert "🟦 judged, no fault, 🟥 suspect, 🟨 judged in part, ⬜ not judged" in text
    assert "**Verdict: faulty**" in text


def test_html_has_the_picture_in_colours() -> None:
    page = as_text(FAULTY, ".html")
    assert re.search(r'<td class="tone-critical" title="block 1, linear\n[^"]*tile">tile</td>', page)
    assert '<td class="tone-unsure" title="block 0, norm\n0 of 2 judged">0 of 2</td>' in page


def test_the_document_can_be_printed() -> None:
    assert to_pdf(verdict_document(FAULTY)).startswith(b"%PDF")


def test_a_report_takes_a_whole_verdict() -> None:
    """What `diagnose` keeps of a located fault, through JSON and back."""
    kept = LocateSection.of(json.loads(json.dumps(FAULTY.to_dict())), simulated="gain@1", elements_changed=3)
    assert kept.headline == FAULTY.headline and kept.coverage["modules"] == 0.81
    assert kept.suspects[0].rows == ((0, 3), (1, 4)) and kept.suspects[0].also == (str(SUSPECTS[0].also[0]),)
