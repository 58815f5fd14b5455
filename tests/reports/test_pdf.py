"""The PDF says every word of the document, inside the page, the same bytes each time, whatever the words are."""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import io
import itertools
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pypdf
import pytest
from fontTools.ttLib import TTFont
from hypothesis import given
from hypothesis import strategies as st

from noisescope.diagnosis.report import Robustness
from noisescope.errors import MissingExtra
from noisescope.reports import pdf, text_layout
from noisescope.reports.document import (
    Bar,
    Block,
    Bullets,
    Cell,
    Chart,
    Curve,
    Document,
    HeatMap,
    HeatTable,
    Paragraph,
    Section,
    Table,
    Verdict,
)
from noisescope.reports.palette import on_paper
from noisescope.reports.pdf import to_pdf
from noisescope.reports.saved_report import Report
from noisescope.reports.text_layout import FONTS, Ruler, Run

OPERATORS = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual")
BANDS = (("ROBUST", "low"), ("MODERATE", "moderate"), ("HIGH", "high"), ("AVALANCHE", "critical"))
POINTS = 72 / 25.4  # points a mm
MODULE = "base_model.model.model.language_model.layers.{}.self_attn.experts.gate_up_proj.default_adapter"


def document_of(*blocks: Block, title: str = "noisescope report") -> Document:
    return Document(title, (("Model", "demo (LlamaForCausalLM, 16 blocks)"),), (Section("s", "Section", blocks),))


def window(number: int, draw: random.Random) -> tuple[Cell, ...]:
    name, tone = draw.choice(BANDS)
    kl = 10 ** draw.uniform(-6, 0)
    return (
        Cell(f"L{number}-{number + 2}"),
        Cell(f"{100 * draw.random():.1f} %", draw.random(), interval=f"[-10.1 %, {100 * draw.random():.1f} %]"),
        Cell(name, tone=tone),
        Cell(f"{kl:.3g}", kl, interval=f"[{kl / 3:.3g}, {kl * 5:.3g}]", rest=f", mean {kl * 2:.3g}"),
        Cell(f"{kl:.3g}", kl, interval=f"[{kl / 3:.3g}, ...]", rest=f", mean at least {kl * 2:.3g}"),
        Cell(draw.choice(("injected", "predicted", "injected (nonlinear)"))),
        Cell(str(draw.randrange(10**6)), 1.0),
    )


@functools.cache
def large() -> Document:
    """60 windows, 28 layers x 9 operators, long module names."""
    draw = random.Random(0)
    rows = tuple(window(number, draw) for number in range(60))
    head = ("window", "accuracy lost", "band", "KL injected", "KL predicted", "evidence", "injections")
    bars = tuple(Bar(row[0].text, row[1], -0.1, 0.9, "avalanche point" if row is rows[9] else "") for row in rows)
    values = [[10 ** draw.uniform(-6, 0) for _ in OPERATORS] for _ in range(28)]
    cells = tuple(
        tuple(
            None if name == "bmm" else Cell(f"{value:.3g}", value, starred=value > 0.1)
            for name, value in zip(OPERATORS, line, strict=True)
        )
        for line in values
    )
    names = tuple(f"layer {number}" for number in range(28))
    notes = (("",) * 9,) * 28
    heat = HeatMap(
        "map", "Divergence", "nats per token", names, OPERATORS, cells, notes, "injected; else predicted",
    )  # fmt: skip
    modules = tuple((Cell(MODULE.format(n)), Cell("4 of 4096", 4.0), Cell("1, 2, 3, ...")) for n in range(9))
    points = tuple((x, Bar(f"{x:g}", Cell(f"{y:.1%}", y), y - 0.1, None)) for x, y in ((0.0, 0.9), (0.1, 0.5)))
    return Document(
        "noisescope report",
        (("Model", "Qwen2 (28 blocks)"), ("Data", "gsm8k.jsonl, 200 samples")),
        (
            Section(
                "summary",
                "Summary",
                (
                    Verdict(Cell("CRITICAL", tone="critical"), "protect L9-11", ("report score: 80", "dashboard: 65")),
                    Bullets((Paragraph("costs 23.4 % [18.1 %, 29.0 %], n = 20", "[CRITICAL] L9-11:"),), numbered=True),
                    Paragraph("Keep L9-11 in BF16.", "Next step:"),
                ),
            ),
            Section(
                "layers",
                "Layers",
                (
                    Chart("windows-chart", "Accuracy lost by window", "share of the accuracy", bars),
                    Table("windows", head, rows, "Sliding windows"),
                ),
            ),
            Section("map", "Layer x operator", (heat, HeatTable(heat))),
            Section("channels", "Channels", (Table("outliers", ("module", "outliers", "channels"), modules, "Worst"),)),
            Section("robustness", "Robustness", (Curve("curve", "Accuracy under noise", "noise", "accuracy", points),)),
            Section("method", "Method", (Paragraph("58 trials; seeds 0. 2026-11-15T13:56:36+00:00."),)),
            Section("limits", "What this run could not see", (Bullets((Paragraph("no gelu"), Paragraph("no bmm"))),)),
        ),
    )  # fmt: skip


@functools.cache
def drawn(document: Document) -> bytes:
    return to_pdf(document)


def reader(document: Document) -> pypdf.PdfReader:
    return pypdf.PdfReader(io.BytesIO(drawn(document)))


def squeezed(text: str) -> str:
    return "".join(text.split())


def pages(document: Document) -> list[str]:
    """The text of each page without white space, and without what stands at the top and the foot of every page."""
    running = squeezed(document.title + "".join(text for _, text in document.facts[:1]))
    found = []
    texts = [squeezed(page.extract_text()) for page in reader(document).pages]
    for number, text in enumerate(texts, 1):
        foot = f"Page{number}of{len(texts)}"
        assert text.endswith(foot)
        found.append(text.removesuffix(foot).removeprefix(running if number > 1 else ""))
    return found


def words(block: Block) -> Iterable[str]:
    """Every text of a block that must be readable, in order."""
    if isinstance(block, Paragraph):
        yield from (block.lead, block.text)
    elif isinstance(block, Bullets):
        yield from (text for item in block.items for text in (item.lead, item.text))
    elif isinstance(block, Verdict):
        yield from (block.level.text, block.meaning, *block.reasons)
    elif isinstance(block, Table):
        yield from (block.caption, *block.head, *(cell.text for row in block.rows for cell in row))
    elif isinstance(block, HeatTable):
        block = block.heat
        yield from (block.title, block.unit, block.legend, *block.columns)
        for name, row in zip(block.rows, block.cells, strict=True):
            yield from (name, *(cell.text for cell in row if cell))
    else:
        yield block.title


def texts_of(document: Document) -> Iterable[str]:
    yield document.title
    yield from itertools.chain(*document.facts)
    for section in document.sections:
        yield section.title
        yield from (text for block in section.blocks for text in words(block))


@functools.cache
def advances(name: str) -> dict[str, float]:
    """The width of every character at 1 point, straight from the font's own tables."""
    with TTFont(FONTS / name) as font:
        metrics, units = font["hmtx"].metrics, font["head"].unitsPerEm
        return {chr(code): metrics[glyph][0] / units for code, glyph in font.getBestCmap().items()}


def placed(page: Any) -> list[tuple[float, float, float, str]]:
    """(baseline, left, right, text) in points of every piece of text on a page."""
    found: list[tuple[float, float, float, str]] = []

    def visit(text: str, turned: list[float], matrix: list[float], font: Any, size: float) -> None:
        if text.strip() and not turned[1]:  # a turned label shares its line with nothing
            widths = advances("DejaVuSans-Bold.ttf" if "Bold" in font["/BaseFont"] else "DejaVuSans.ttf")
            width = size * sum(widths.get(char, 0.0) for char in text.strip())
            found.append((round(matrix[5], 1), matrix[4], matrix[4] + width, text.strip()))

    page.extract_text(visitor_text=visit)
    return found


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_every_text_of_the_document_is_in_the_pdf_in_order() -> None:
    """Titles, findings, every cell of every table and every number of the heat map can be searched and copied."""
    text = "".join(pages(large()))
    at = 0
    for wanted in map(squeezed, texts_of(large())):
        found = text.find(wanted, at)
        assert found >= 0, f"{wanted!r} is missing after {text[max(0, at - 80) : at]!r}"
        at = found + len(wanted)


def test_every_row_stands_whole_on_one_page() -> None:
    """All cells of a row follow each other on one page, so a page's end never cuts a row."""
    found = pages(large())
    tables = [block for section in large().sections for block in section.blocks if isinstance(block, Table)]
    for row in (row for table in tables for row in table.rows):
        assert sum("".join(squeezed(cell.text) for cell in row) in page for page in found) == 1


def test_the_head_of_a_table_is_on_every_page_it_reaches() -> None:
    """A reader in the middle of a long table knows what the columns are, and no head stands without rows."""
    table = next(
        b for section in large().sections for b in section.blocks if isinstance(b, Table) and b.key == "windows"
    )
    head = squeezed("".join(table.head))
    rows = ["".join(squeezed(cell.text) for cell in row) for row in table.rows]
    found = pages(large())
    reached = [any(row in page for row in rows) for page in found]
    assert sum(reached) >= 2
    assert [page.count(head) for page in found] == [int(reach) for reach in reached]


def test_a_row_longer_than_a_page_goes_on() -> None:
    """One endless cell is not lost and the program ends."""
    endless = " ".join(f"word{number}" for number in range(3000))
    document = document_of(Table("t", ("a", "b"), ((Cell("first"), Cell(endless)), (Cell("last"), Cell("x")))))
    found = pages(document)
    assert len(found) > 2
    text = "".join(page.replace("ab", "", 1) if number else page for number, page in enumerate(found))
    assert squeezed(endless) in text
    assert text.endswith("lastx")


def test_the_outline_leads_to_every_section_table_and_figure() -> None:
    """Bookmarks: sections, and below them the captions, each on the page where it stands."""
    book = reader(large())
    outline = book.outline
    names = [entry["/Title"] for entry in outline if not isinstance(entry, list)]
    assert names == [section.title for section in large().sections]
    below = list(itertools.chain(*(entry for entry in outline if isinstance(entry, list))))
    assert [entry["/Title"] for entry in below][:2] == ["Accuracy lost by window", "Sliding windows"]
    for entry in (*below, *(entry for entry in outline if not isinstance(entry, list))):
        page = book.pages[book.get_destination_page_number(entry)]
        assert squeezed(entry["/Title"]) in squeezed(page.extract_text())


def test_figures_are_drawn_and_described() -> None:
    """In lines and letters, not in pixels; and a screen reader hears what the bars say."""
    assert sum(len(page.images) for page in reader(large()).pages) == 0
    assert "L57-59" in "".join(pages(large())) and "avalanchepoint" in "".join(pages(large()))
    objects = [reader(large()).get_object(number) for number in range(1, len(reader(large()).xref[0]) + 1)]
    said = [str(thing["/Alt"]) for thing in objects if isinstance(thing, dict) and "/Alt" in thing]
    assert len(said) == 3
    bars = next(text for text in said if text.startswith("Accuracy lost by window (share of the accuracy)"))
    assert "avalanche point" in bars and "L59-61" in bars


def test_each_verdict_has_its_word_and_its_colour() -> None:
    """A box is in its tone's colour; an unknown tone is drawn, too."""
    tones = ["critical", "high", "moderate", "low", "unsure", "", "unheard of"]
    document = document_of(*(Verdict(Cell(f"WORD {tone}", tone=tone), "what it means", ("why",)) for tone in tones))
    page = reader(document).pages[0]
    assert all(f"Risk: WORD {tone}".strip() in page.extract_text() for tone in tones)
    filled = [
        [float(part) for part in parts] for parts, name in page.get_contents().operations if name in (b"rg", b"g")
    ]
    for tone in tones[:-1]:
        wanted = [int(on_paper(tone or "none")[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        times = sum((parts * 3)[:3] == pytest.approx(wanted, abs=1e-3) for parts in filled)  # a grey has one part
        assert times >= (10 if tone == "" else 5)  # each of the box's five lines; the unknown tone is drawn as ""


# ---- where it stands ------------------------------------------------------------------------------------------------


def test_no_text_leaves_the_page_or_runs_into_another() -> None:
    """Measured with the font's own tables: all text between the margins, no two texts of a line over each other."""
    for page in reader(large()).pages:
        lines = collections.defaultdict(list)
        for baseline, left, right, text in placed(page):
            assert left >= pdf.LEFT * POINTS - 0.1, text
            assert right <= (pdf.LEFT + pdf.WIDTH) * POINTS + 0.1, text
            assert 20 < baseline < 297 * POINTS - 20, text
            lines[baseline].append((left, right, text))
        for line in lines.values():
            for (_, right, text), (left, _, following) in itertools.pairwise(sorted(line)):
                assert right <= left + 0.1, (text, following)


def test_a_table_wider_than_the_page_wraps() -> None:
    """Twenty columns of intervals still stand inside the margins and lose nothing."""
    head = tuple(f"column {number}" for number in range(20))
    row = tuple(Cell(f"0.{number}", 1.0, interval=f"[0.01, {number}.5]") for number in range(20))
    document = document_of(Table("wide", head, (row, row)))
    text = "".join(pages(document))
    assert all(squeezed(name) in text for name in (*head, *(cell.text for cell in row)))
    assert max(right for _, _, right, _ in placed(reader(document).pages[0])) <= (pdf.LEFT + pdf.WIDTH) * POINTS + 0.1


def test_pages_are_a4_and_no_heading_stands_alone_at_the_foot() -> None:
    """210 x 297 mm; each section's title has something of the section under it on the same page."""
    document = Document("t", (), tuple(Section(str(n), f"Title{n}", (Paragraph("body " * 40),)) for n in range(40)))
    for page in reader(document).pages:
        assert [float(side) for side in page.mediabox[2:]] == pytest.approx([595.28, 841.89], abs=0.1)
        assert squeezed(page.extract_text()).rsplit("Page", 1)[0].endswith("body")


def test_an_interval_stays_on_one_line() -> None:
    """A wrapped estimate has its value above and its interval below, never a broken bracket."""
    rows = tuple(
        tuple(Cell(f"0.{row}{column}", 1.0, interval="[0.1234, 0.5678]") for column in range(8)) for row in range(5)
    )
    document = document_of(Table("t", tuple("abcdefgh"), rows))
    texts = [text for _, _, _, text in placed(reader(document).pages[0])]
    assert texts.count("[0.1234, 0.5678]") == 40


# ---- the same bytes -------------------------------------------------------------------------------------------------


def test_the_same_document_gives_the_same_bytes_without_torch() -> None:
    """Drawn here and in another process that has no torch: the date is the run's, not today's."""
    chart = Chart("c", "Chart", "unit", (Bar("L0", Cell("1", 1.0, "low"), 0.5, 2.0),))
    ended = replace(document_of(chart), finished="2026-11-15T13:56:36+00:00")
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from noisescope.reports.document import *\n"
        "from noisescope.reports.pdf import to_pdf\n"
        f"sys.stdout.buffer.write(to_pdf({ended!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(pdf.__file__).parents[2]), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-W", "error", "-c", script]
    there = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    assert there.stdout == drawn(ended)
    assert reader(ended).metadata["/CreationDate"] == "D:20261115135636Z"  # type: ignore[index]
    for stamp in ("", "2026-99-99T99:99:99+00:00", "yesterday"):
        undated = replace(document_of(), finished=stamp)
        assert reader(undated).metadata["/CreationDate"] == "D:20000101000000Z"  # type: ignore[index]


# ---- odd documents --------------------------------------------------------------------------------------------------

ODD = [
    "<b>bold</b> & <script>alert(1)</script>",
    "**markdown** __x__ [link](http://x) {nb}",
    "中文漢字 and after",
    "🤖🚀 emoji",
    "Ünïcödé naïve ≤ → ±",
    "a" * 400,
    "model.layers.15." + "very_long_name" * 30,
    "C:\\path\\to\\file (with) [brackets] [[nested]]",
    "percent % and = signs = everywhere",
]


@functools.cache
def odd() -> Document:
    """Each odd text in every place that a document has."""
    sections = [
        Section(
            "s",
            text,
            (
                Verdict(Cell(text, tone="high"), text, (text,)),
                Paragraph(text, text),
                Bullets((Paragraph(text, text),)),
                Table("t", (text, "n"), ((Cell(text, 1.0), Cell(text, tone="low")),), text),
            ),
        )
        for text in ODD
    ]
    chart = Chart("c", ODD[2], ODD[3], tuple(Bar(text, Cell(text, 1.0, "odd tone"), 0.5, None, text) for text in ODD))
    heat = HeatMap("m", ODD[0], ODD[1], tuple(ODD), (ODD[6],), tuple((Cell(text, 1.0),) for text in ODD), (("",),) * 9)
    return Document("中" + "x" * 300, (), (*sections, Section("f", "f", (chart, heat, HeatTable(heat)))))


@pytest.fixture(scope="module")
def odd_text() -> str:
    return squeezed("".join(page.extract_text() for page in reader(odd()).pages))


@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:12])
def test_odd_text_is_printed_as_it_is(text: str, odd_text: str) -> None:
    """Markup, markdown, the page alias, Chinese, emoji and endless names neither vanish nor do anything."""
    assert odd_text.count(squeezed(text)) >= 9


def test_lines_after_a_chinese_one_keep_their_font(odd_text: str) -> None:
    """A title that begins with a character of the other font goes on readably in its next lines."""
    assert "x" * 20 in odd_text.split("<b>bold")[0]
    assert odd_text.split("<b>bold")[0].count("x") == 300


def test_hidden_characters_become_their_escapes() -> None:
    """Controls and lone surrogates don't crash the file, and are not dropped in silence."""
    document = document_of(Paragraph("a\x00b\x1bc\ud800d\uffffe"), Table("t", ("h\x07",), ((Cell("x\x08y"),),)))
    text = "".join(pages(document))
    assert r"a\x00b\x1bc\ud800d\uffffe" in text
    assert r"h\x07x\x08y" in text


def test_an_older_matplotlib_without_the_last_resort_font(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a character that DejaVu lacks is a replacement sign, too."""
    monkeypatch.setattr(text_layout, "LAST_RESORT", Path("nowhere.ttf"))
    book = pypdf.PdfReader(io.BytesIO(to_pdf(document_of(Paragraph("before 中 after"), title="中"))))
    assert "before \ufffd after" in book.pages[0].extract_text()


@pytest.mark.parametrize(
    "document",
    [
        Document("", (), ()),
        Document("only a title", (), ()),
        Document("t", (), (Section("s", "no blocks", ()),)),
        document_of(Table("t", (), ()), Table("t", ("a", "b"), ()), Bullets(()), Paragraph("")),
        document_of(Table("t", ("",), ((Cell(""),),)), Verdict(Cell(""), "", ())),
        document_of(Chart("c", "chart", "u", ()), Curve("k", "curve", "x", "y", ())),
        document_of(HeatMap("m", "map", "", (), (), (), ())),
        document_of(HeatMap("m", "map", "u", ("r",), ("c",), ((None,),), (("",),))),
    ],
    ids=["nothing", "title", "section", "blocks", "cells", "figures", "map", "site"],
)
def test_empty_documents(document: Document) -> None:
    """What has nothing to show is still a page that says what it is."""
    assert squeezed(document.title) in pages(document)[0]


# ---- the lines themselves -------------------------------------------------------------------------------------------

RULER = Ruler(collections.defaultdict(lambda: 1.0))  # every character 1 mm wide at 1 point
TEXTS = st.text(st.sampled_from("ab.._-/[]%=, 0123456789中"), max_size=60)


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=4), st.integers(1, 40))
def test_lines_lose_nothing_and_are_never_too_wide(parts: list[tuple[str, bool]], width: int) -> None:
    """Whatever the text and however narrow the column: all characters in order, no line beyond the width."""
    lines = RULER.wrap([Run(text, bold) for text, bold in parts], width, 1.0)
    assert squeezed("".join(run.text for line in lines for run in line)) == squeezed("".join(text for text, _ in parts))
    assert all(RULER.measure(line) <= width for line in lines)
    assert all(not line or not line[0].text.startswith(" ") for line in lines)


@given(st.lists(st.lists(TEXTS, min_size=3, max_size=3), min_size=1, max_size=5), st.integers(40, 900))
def test_columns_fit_the_page(rows: list[list[str]], room: int) -> None:
    """The widths of a table's columns never add up to more than there is."""
    cells = [[[Run(text)] for text in row] for row in rows]
    size, widths = RULER.fit(cells, room, (8.0, 7.0, 6.0))
    assert size in (8.0, 7.0, 6.0)
    assert sum(widths) <= room + 1e-6
    if size * sum(max(len(" ".join(row[at].split())) for row in rows) for at in range(3)) <= room:
        lines = [RULER.column([row[at] for row in cells], width, size) for at, width in enumerate(widths)]
        assert all(len(cell) == 1 for column in lines for cell in column)


def test_words_break_at_dots_before_underscores() -> None:
    """A module's name is broken where a reader would break it."""
    lines = RULER.wrap([Run("model.layers.0.self_attn.q_proj")], 16, 1.0)
    assert ["".join(run.text for run in line) for line in lines] == ["model.layers.0.", "self_attn.q_proj"]
    lines = RULER.wrap([Run("self_attn.q_proj")], 12, 1.0)
    assert ["".join(run.text for run in line) for line in lines] == ["self_attn.", "q_proj"]
    lines = RULER.wrap([Run("self_attn.q_proj")], 6, 1.0)
    assert ["".join(run.text for run in line) for line in lines] == ["self_", "attn.", "q_proj"]


# ---- packages and files ---------------------------------------------------------------------------------------------


def test_a_missing_fpdf2_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error says what to install."""
    monkeypatch.setitem(sys.modules, "fpdf", None)
    monkeypatch.delitem(sys.modules, "noisescope.reports.pdf")
    with pytest.raises(MissingExtra, match="pip install 'fpdf2"):
        importlib.import_module("noisescope.reports.pdf")


def test_without_fpdf2_the_other_forms_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made_curve: Robustness
) -> None:
    """A machine that can't draw a PDF still saves its report, unless a PDF was asked for."""
    monkeypatch.setitem(sys.modules, "fpdf", None)
    monkeypatch.delitem(sys.modules, "noisescope.reports.pdf")
    report = Report(made_curve)
    with pytest.warns(UserWarning, match="no report.pdf was written.*fpdf2"):
        assert [path.name for path in report.save(tmp_path)] == ["report.json", "report.md", "report.html"]
    with pytest.raises(MissingExtra, match="fpdf2"):
        report.save(tmp_path, formats=["pdf"])


def test_no_font_file_is_left_open() -> None:
    """A program that draws a thousand reports doesn't run out of file handles."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_pdf(document_of(Paragraph("text")))
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []
