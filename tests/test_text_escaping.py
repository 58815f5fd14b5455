"""Text is text: in Markdown, HTML, a terminal, JUnit and CSV."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.plans.fault_tests import from_columns, to_csv
from noisescope.reports.document import (
    Bullets,
    Cell,
    Document,
    HeatMap,
    Paragraph,
    Section,
    Table,
    Verdict,
)
from noisescope.reports.html import to_html
from noisescope.reports.junit import Case, to_junit
from noisescope.reports.markdown import to_markdown
from noisescope.text_escaping import csv_cell, cut, last_part, markdown, one_line, shown, visible

CLI = Path(__file__).parents[1] / "src" / "noisescope" / "cli"
EVIL = "\x1b[31m\u202e\u2066\u200b\x00\x9b **b** _i_ `c` [x](javascript:y) ![i](http://e) <img src=x> | # h\n- l\n\n# T"
HIDDEN = ("\x1b", "\u202e", "\u2066", "\u200b", "\x00", "\x9b")


def everywhere(text: str) -> Document:
    """A document that has the text in every place that can hold one."""
    cell = Cell(text, interval=text, rest=text)
    blocks = (
        Verdict(cell, text, (text,), name=text),
        Paragraph(text),
        Paragraph(text, text),
        Bullets((Paragraph(text),)),
        Table("t", (text, text), ((cell, cell),), text),
        HeatMap("h", text, text, (text,), (text,), ((cell,),), ((text,),), text),
    )
    return Document(text, ((text, text),), (Section("s", text, blocks),))


def test_markdown_keeps_its_shape_whatever_the_text() -> None:
    """The same lines as of a harmless word: no heading, list, cell, link or tag more; nothing hidden."""
    mild, evil = (to_markdown(everywhere(text)) for text in ("word", EVIL))
    assert [re.match(r"#+ |- |\| |\|--|\*\*|", line)[0] for line in evil.splitlines()] == [  # type: ignore[index]
        re.match(r"#+ |- |\| |\|--|\*\*|", line)[0]
        for line in mild.splitlines()  # type: ignore[index]
    ]
    assert not any(sign in evil for sign in HIDDEN) and r"\\x1b" in evil and r"\\u202e" in evil
    assert "<img" not in evil and "](" not in evil.replace("\\](", "") and "http:" not in evil.replace("http\\:", "")
    for line, other in zip(evil.splitlines(), mild.splitlines(), strict=True):
        assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", other))
        assert len(re.findall(r"(?<!\\)\*", line)) == len(re.findall(r"(?<!\\)\*", other))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("0.1 % [0.05 %, 0.2 %] (n = 4)", "0.1 % [0.05 %, 0.2 %] (n = 4)"),
        ("run `noisescope plan precision out` now", "run `noisescope plan precision out` now"),
        ("`[x](y)`", r"\`[x\](y)\`"),
        ("a `` ` b", r"a \`\` \` b"),
        ("&lt;b&gt; R&D", "&amp;lt;b&amp;gt; R&D"),
        ("[^1] [a][b]", r"\[^1] [a\][b]"),
        ("c:\\dir", "c:\\\\dir"),
    ],
)
def test_markdown_escapes_what_is_markup_and_no_more(text: str, expected: str) -> None:
    """Names, intervals and commands stay as they are."""
    assert markdown(text) == expected


@pytest.mark.parametrize("text", ["# h", "> q", "- l", "+ l", "---", "===", "1. n", "12) n", "-"])
def test_a_line_can_not_start_a_block(text: str) -> None:
    """Headings, quotes, lists, rules."""
    found = markdown(text, starts_line=True)
    assert re.match(r"\d*\\", found) and found.replace("\\", "") == text
    assert markdown("5.00 bits", starts_line=True) == "5.00 bits" and markdown("-0.5", starts_line=True) == "-0.5"


def test_html_shows_hidden_characters() -> None:
    """Escaped as before, and visible now."""
    page = to_html(everywhere(EVIL))
    assert not any(sign in page for sign in HIDDEN) and "<img" not in page
    assert r"\x1b[31m\u202e" in html.unescape(page)


def test_junit_shows_hidden_characters() -> None:
    """Suite, name, message and summary; the file stays XML."""
    text = to_junit(EVIL, [Case(EVIL, "fail", EVIL)], EVIL)
    assert not any(sign in text for sign in HIDDEN)
    found = ET.fromstring(text).find("testsuite")
    assert found is not None and r"\x1b" in found.attrib["name"]


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_spreadsheet_computes_nothing(text: str) -> None:
    """A cell that starts as a formula is text."""
    assert csv_cell(text)[0] not in "=+-@\t\r"
    assert csv_cell("-0.5e3") == "-0.5e3" and csv_cell("plain") == "plain"


def test_fault_tests_as_csv_hold_no_formula() -> None:
    """Component and description come from a report."""
    columns = {
        "test_id": "=cmd|x",
        "component": "@SUM(A1)",
        "test_type": "-1+1",
        "parameters": {"faults": ["gain:0.05@1/linear"], "seed": 0},
        "acceptance_criteria": {"max_degradation": 0.1},
    }
    made = from_columns(columns)
    cells = [cell for row in csv.reader(io.StringIO(to_csv([made]))) for cell in row]
    assert "'=cmd|x" in cells and not any(cell.startswith(("=", "@", "-")) for cell in cells)


def test_every_text_of_a_command_goes_through_say() -> None:
    """One place that prints."""
    printing = {
        path.name for path in CLI.glob("*.py") if re.search(r"\btyper\.(echo|secho)\(|\bprint\(", path.read_text())
    }
    assert printing == {"output.py"}


def test_a_terminal_obeys_nothing(tmp_path: Path) -> None:
    """An error about a file with colours in its name, on one line."""
    name = tmp_path / "a\x1b[31m\u202e.json"
    name.write_text("{}")
    found = CliRunner().invoke(app, ["report", str(name)])
    assert found.exit_code == 2 and "\x1b" not in found.output and "\u202e" not in found.output
    assert r"\x1b[31m\u202e.json" in found.output and found.output.count("\n") == 1


@given(st.text())
def test_visible_text_is_printable_and_stays(text: str) -> None:
    """Nothing hidden is left, and what is visible does not change again."""
    once = visible(text)
    assert visible(once) == once
    assert all(sign.isprintable() or sign.isspace() for sign in once)
    assert "\n" not in one_line(text) and len(cut(text)) <= 60


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_value_is_shown_in_60_characters(value: object) -> None:
    """As JSON writes it where it is short."""
    assert len(shown(value)) <= 60
    if isinstance(value, str) and value.isprintable() and len(value) < 20:
        assert shown(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/home/me/x", "x"), ("a/b", "a/b"), ("./a", "./a"), ("~/m", "m"), ("C:\\m\\x", "x"), ("demo", "demo"), ("/", "/"),
     ("org/model", "org/model"), ("/a/b/", "b")],
)  # fmt: skip
def test_an_absolute_path_is_cut_to_its_last_part(path: str, expected: str) -> None:
    """As a report may show it; what the user typed relative stays."""
    assert last_part(path) == expected
