"""The HTML page without a browser: nothing lost, nothing injected, nothing fetched; colours and pixels."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from noisescope.reports import html, palette
from noisescope.reports.document import (
    TONES,
    Bar,
    Bullets,
    Cell,
    Chart,
    Columns,
    Command,
    Curve,
    Details,
    Document,
    HeatMap,
    HeatTable,
    Panel,
    Paragraph,
    Section,
    Table,
    Verdict,
)
from noisescope.reports.html import to_html
from noisescope.text_escaping import visible

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`--></style></title>{{7*7}}{% raw %}${1}&lt;\\u003c"


def document_of(word: Callable[[str], str] = str) -> Document:
    """Every kind of block; `word` makes each text."""
    number = itertools.count(1)

    def text(kind: str = "text") -> str:
        return word(f"{kind} {next(number)}")

    def cell(value: float | None = None, tone: str = "") -> Cell:
        return Cell(text("cell"), value, tone)

    table = Table(
        "t", (text(), text(), text()), tuple((cell(), cell(i / 7), cell(None, TONES[i % 6])) for i in range(9)), text()
    )
    bars = tuple(
        Bar(text("bar"), cell(i / 3 - 1, "high"), i / 3 - 1.5, i / 3, text("mark") if i % 2 else "") for i in range(6)
    )
    points = tuple((i / 10, bar) for i, bar in enumerate(bars))
    cells = ((cell(1e-5), None), (cell(), cell(0.3)))
    notes = ((text("note"), text("note")), (text("note"), text("note")))
    heat = HeatMap("h", text(), text(), (text(), text()), (text(), text()), cells, notes, text())
    blocks = (
        Verdict(cell(None, "critical"), text(), (text(), text())),
        Bullets((Paragraph(text(), text()), Paragraph(text())), numbered=True),
        Paragraph(text(), text()),
        table,
        Chart("c", text(), text(), bars),
        Curve("k", text(), text(), text(), points),
        heat,
        HeatTable(heat),
        Command(text(), text()),
        Details(text(), (Paragraph(text()),)),
        Columns((Panel(text(), (Paragraph(text(), text(), text(), cell(None, "low")),)),)),
    )
    sections = (
        Section("first", text(), blocks),
        Section("second", text(), (Table("small", (text(),), ((cell(2.0),),)),)),
    )
    return Document(text(), ((text(), text()),), sections)


class Page(HTMLParser):
    """What a page is made of: tags with their attributes, its text, its script and style."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = self.script = self.style = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.script += data
        elif self._inside == "style":
            self.style += data
        else:
            self.text += data

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        """Outside of drawings, which are laid out by the width of their texts."""
        drawn = ("g", "rect", "polyline", "circle", "text", "title")
        return [(tag, tuple(attributes)) for tag, attributes in self.tags if tag not in drawn]

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def texts_in(value: Any) -> Iterator[str]:
    """Every text a reader should find; keys and tones are for the page itself."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from texts_in(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("key", "tone"):
                yield from texts_in(getattr(value, field.name))


def cells_in(value: Any) -> Iterator[Cell]:
    if isinstance(value, Cell):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from cells_in(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from cells_in(getattr(value, field.name))


def rooms(page: Page) -> str:
    """All text of a page, in elements and in attributes."""
    return page.text + "\0" + "\0".join(value for _, attributes in page.tags for value in attributes.values())


def test_every_text_of_the_document_is_in_the_page() -> None:
    """Nothing a document says is lost: cells, notes, marks, legends, captions, facts."""
    document = document_of()
    found = rooms(Page(to_html(document)))
    heat = next(block for block in document.blocks() if isinstance(block, HeatMap))
    heat_notes_of_nothing = {heat.notes[0][1]}
    missing = [text for text in texts_in(document) if text not in found and text not in heat_notes_of_nothing]
    assert not missing


def test_every_number_is_in_the_page_exactly() -> None:
    """data-value is repr(float), as JSON writes it, for each cell that has a number and for no other."""
    document = document_of()
    tables = [block for block in document.blocks() if not isinstance(block, HeatMap)]  # its numbers are in its table
    wanted = sorted(repr(cell.value) for cell in cells_in(tuple(tables)) if cell.value is not None)
    assert sorted(Page(to_html(document)).values("data-value")) == wanted


def test_an_interval_is_drawn_apart_and_reads_the_same() -> None:
    """The text of an estimate is unbroken although its interval is lighter."""
    table = Table("t", ("a", "b"), ((Cell("x"), Cell("1.2 %", 0.012, interval="[0.1 %, 3 %]", rest=" (n = 4)")),))
    page = Page(to_html(Document("d", (), (Section("s", "s", (table,)),))))
    assert "1.2 % [0.1 %, 3 %] (n = 4)" in page.text
    assert "interval" in page.values("class")


def test_hostile_text_changes_no_tag_and_no_attribute() -> None:
    """A page of hostile texts has the same elements and attributes as one of harmless texts as long."""
    hostile = Page(to_html(document_of(lambda text: HOSTILE + text)))
    harmless = Page(to_html(document_of(lambda text: re.sub(r"\S", "x", HOSTILE) + text)))
    assert hostile.skeleton == harmless.skeleton
    assert hostile.script == harmless.script and hostile.style == harmless.style
    assert {(tag, *sorted(attributes)) for tag, attributes in hostile.tags} <= {
        *((tag, *sorted(attributes)) for tag, attributes in harmless.tags),
        ("text", "fill", "text-anchor", "transform", "x", "y"),
        ("text", "fill", "text-anchor", "x", "y"),
    }
    assert not [tag for tag, attributes in hostile.tags if any(name.startswith("on") for name in attributes)]
    assert "{{7*7}}" in hostile.text and "49" not in hostile.text.replace("text 49", "").replace("cell 49", "")


@given(st.text(st.characters(codec="utf-8", exclude_characters="[\r\0"), max_size=12))
def test_any_text_stays_text(word: str) -> None:
    """Whatever the letters, the page keeps its elements and says the text."""
    fixed = re.sub("[^ ]", "x", word) if word.strip() else word
    page = Page(to_html(document_of(lambda text: f"_{word}_")))
    assert page.skeleton == Page(to_html(document_of(lambda text: f"_{fixed}_"))).skeleton
    assert f"_{visible(word, keep=chr(10))}_" in page.text


def test_a_text_that_utf8_can_not_hold_can_be_written() -> None:
    """A lone surrogate, which JSON may carry, doesn't stop the file from being written."""
    assert rb"a\ud800b" in to_html(Document("a\ud800b", (), ())).encode("utf-8")


def test_the_page_asks_for_nothing() -> None:
    """No address, no font, no import: links lead into the page, the icon is empty."""
    page = Page(to_html(document_of()))
    assert set(page.values("href")) == {"#content", "#first", "#second", "data:,"}
    assert not page.values("src") and not page.values("srcset") and not page.values("action")
    assert not re.search(r"url\(|@import|@font-face|https?:|//\w", page.style + "".join(page.values("style")))
    assert not re.search(r"https?:|fetch|XMLHttpRequest|WebSocket|import\(|innerHTML|insertAdjacent|eval", page.script)


def test_only_the_page_s_own_script_may_run() -> None:
    """The policy forbids all but styles, data images and the one script of that hash; no end tag hides in it."""
    page = Page(to_html(document_of(lambda text: HOSTILE + text)))
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    (policy,) = (a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert f"script-src 'sha256-{digest}';" in policy and "img-src data:" in policy
    assert "</" not in page.script and "<!--" not in page.script and "</" not in page.style


def test_the_same_document_gives_the_same_page() -> None:
    """No time, no random id: pages can be compared byte by byte."""
    assert to_html(document_of()) == to_html(document_of())


def test_contents_name_every_section_in_order() -> None:
    """Each link leads to the section of its place; a key with odd letters is escaped in the link."""
    sections = tuple(Section(key, key, ()) for key in ("b", "a", "50 % & more"))
    page = Page(to_html(Document("d", (), sections)))
    assert [a["id"] for t, a in page.tags if t == "section"] == ["b", "a", "50 % & more"]
    assert [a["href"] for t, a in page.tags if t == "a"][1:] == ["#b", "#a", "#50%20%25%20%26%20more"]


def test_only_long_tables_have_a_filter_and_no_control_shows_without_the_script() -> None:
    """Eight rows can be read at a glance; every control waits, hidden, for the script that makes it work."""

    def fields(rows: int) -> list[dict[str, str]]:
        table = Table("t", ("a",), tuple((Cell(str(i)),) for i in range(rows)))
        return [a for t, a in Page(to_html(Document("d", (), (Section("s", "s", (table,)),)))).tags if t == "input"]

    assert [len(fields(rows)) for rows in (0, 8, 9)] == [0, 0, 1]
    page = Page(to_html(document_of()))
    controls = [a for t, a in page.tags if a.get("class", "").split()[:1] in (["controls"], ["theme"])]
    assert len(controls) == 3 and all("hidden" in attributes for attributes in controls)


def test_nothing_empty_is_drawn() -> None:
    """Neither a chart, a table or a map without content, nor a document without sections, makes any fuss."""
    blocks = (Bullets(()), Table("t", ("a",), ()), Chart("c", "C", "u", ()), Curve("k", "K", "x", "y", ()),
              HeatMap("h", "H", "u", (), (), (), ()), Verdict(Cell(""), "", ()), Paragraph(""))  # fmt: skip
    page = Page(to_html(Document("d", (), (Section("s", "s", blocks),))))
    assert not [tag for tag, _ in page.tags if tag in ("svg", "table", "figure", "ol")]
    assert "<main" in to_html(Document("", (), ()))


# -- heat map


def test_a_missing_site_says_so_and_a_star_marks_what_was_injected() -> None:
    """None is "no such site"; only a starred cell with a number counts as injected."""
    cells = ((Cell("1", 1.0, starred=True), Cell("2", 2.0), Cell("*"), None),)
    heat = HeatMap("h", "t", "nats", ("r",), ("a", "b", "c", "d"), cells, (("n1", "n2", "n3", ""),))
    page = Page(to_html(Document("d", (), (Section("s", "s", (HeatTable(heat),)),))))
    titles = [(a["title"], "data-starred" in a) for t, a in page.tags if "title" in a]
    assert titles == [("r, a\n1* nats\nn1", True), ("r, b\n2 nats\nn2", False), ("r, c\n*\nn3", False),
                      ("r, d\nno such site", False)]  # fmt: skip


# -- charts


def test_sixty_bars_have_a_name_each() -> None:
    """Labels may be left out for want of room; the tooltip and the name for screen readers never are."""
    bars = tuple(
        Bar(f"L{i}-{i + 2}", Cell(f"{i} %", i / 100), None, None, "avalanche point" * (i == 59)) for i in range(60)
    )
    page = Page(to_html(Document("d", (), (Section("s", "s", (Chart("c", "t", "u", bars),)),))))
    labels = [a["aria-label"] for t, a in page.tags if t == "g"]
    assert labels[0] == "L0-2; 0 %" and labels[59] == "L59-61; 59 %; avalanche point"


def test_colours_come_from_the_one_palette() -> None:
    """The page names roles; each has a light and a dark colour."""
    page = Page(to_html(document_of()))
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", "".join(page.values("fill") + page.values("stroke"))))
    assert used <= set(palette.COLOURS) and {"high", "muted", "heat-8"} <= used
    assert "--critical: light-dark(#a0142f, #ff7b8f);" in page.style


def test_a_command_can_be_copied_as_it_stands() -> None:
    """Its words in order, one space between, and a button that waits for the script."""
    blocks = (Command("noisescope plan migration 'a b'", "Do:"),)
    page = to_html(Document("d", (), (Section("s", "s", blocks),), command="noisescope demo -o x"))
    found = [re.sub("<[^>]+>", "", code) for code in re.findall("<code>(.*?)</code>", page)]
    assert found == ["noisescope demo -o x", "noisescope plan migration &#39;a b&#39;"]
    assert page.count('class="copy" type="button" hidden') == 2


def test_what_is_folded_stands_in_the_page() -> None:
    """A reader without JavaScript opens it; panels show their blocks."""
    blocks = (Details("12 rows", (Paragraph("inside"),)), Columns((Panel("What to do", (Paragraph("this"),)),)))
    page = Page(to_html(Document("d", (), (Section("s", "s", blocks),))))
    assert [t for t, _ in page.tags if t in ("details", "summary")] == ["details", "summary"]
    assert all(word in page.text for word in ("12 rows", "inside", "What to do", "this"))


def test_tables_of_sentences_are_stacked_on_a_phone() -> None:
    """One sentence in most rows is enough; long names of modules are not sentences."""
    sentence, name = Cell("noise in it moves the output by 0.01 nats per token"), Cell("model.layers." * 5)
    assert html.is_wordy(Table("t", ("a", "b"), ((Cell("1"), sentence), (Cell("2"), sentence))))
    assert not html.is_wordy(Table("t", ("a", "b"), ((name, Cell("1")), (name, Cell("2")), (name, sentence))))
