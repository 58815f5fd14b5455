"""The HTML page without a browser: nothing lost, nothing injected, nothing fetched; colours and pixels."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.plain_text import visible
from noisescope.reports import html
from noisescope.reports.document import (
    TONES,
    Bar,
    Bullets,
    Cell,
    Chart,
    Curve,
    Document,
    HeatMap,
    Paragraph,
    Section,
    Table,
    Verdict,
)
from noisescope.reports.html import to_html

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
        return [(tag, tuple(attributes)) for tag, attributes in self.tags]

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
    heat_notes_of_nothing = {document.sections[0].blocks[-1].notes[0][1]}  # type: ignore[union-attr]
    missing = [text for text in texts_in(document) if text not in found and text not in heat_notes_of_nothing]
    assert not missing


def test_every_number_is_in_the_page_exactly() -> None:
    """data-value is repr(float), as JSON writes it, for each cell that has a number and for no other."""
    document = document_of()
    wanted = sorted(repr(cell.value) for cell in cells_in(document) if cell.value is not None)
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
    harmless = Page(to_html(document_of(lambda text: "x" * len(HOSTILE) + text)))
    assert hostile.skeleton == harmless.skeleton
    assert hostile.script == harmless.script and hostile.style == harmless.style
    assert not [tag for tag, attributes in hostile.tags if any(name.startswith("on") for name in attributes)]
    assert "{{7*7}}" in hostile.text and "49" not in hostile.text.replace("text 49", "").replace("cell 49", "")


@given(st.text(st.characters(codec="utf-8", exclude_characters="[\r\0"), max_size=12))
def test_any_text_stays_text(word: str) -> None:
    """Whatever the letters, the page keeps its elements and says the text."""
    fixed = "x" * len(word) if word.strip() else word
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


def test_empty_blocks_say_so() -> None:
    """A chart, a curve or a map without content, and a document without sections, are drawn without fuss."""
    blocks = (Bullets(()), Table("t", ("a",), ()), Chart("c", "C", "u", ()), Curve("k", "K", "x", "y", ()),
              HeatMap("h", "H", "u", (), (), (), ()), Verdict(Cell(""), "", ()), Paragraph(""))  # fmt: skip
    assert Page(to_html(Document("d", (), (Section("s", "s", blocks),)))).text.count("Nothing to show.") == 3
    assert "<main" in to_html(Document("", (), ()))


# -- heat map


def heat_of(*values: float | None) -> HeatMap:
    cells = tuple(None if value is None else Cell(f"{value:.3g}", value) for value in values)
    return HeatMap("h", "t", "u", ("r",), tuple(map(str, range(len(values)))), (cells,), (("",) * len(values),))


def rgb(colour: str) -> tuple[int, int, int]:
    digits = colour.removeprefix("#")
    red, green, blue = bytes.fromhex(digits if len(digits) == 6 else "".join(2 * d for d in digits))
    return red, green, blue


def test_every_colour_of_the_ramp_can_be_read() -> None:
    """Ink and paper differ by at least 4.5 : 1 all along the ramp, which grows lighter with the value."""
    (cells,) = html.shade(heat_of(*(10 ** (k / 50) for k in range(-300, 1)))).cells
    lights = []
    for paper, ink in (cell for cell in cells if cell):
        pair = sorted((html.luminance(rgb(paper)), html.luminance(rgb(ink))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
        lights.append(html.luminance(rgb(paper)))
    rounding = 1e-3  # colours are whole numbers
    assert all(b > a - rounding for a, b in itertools.pairwise(lights)) and lights[-1] - lights[0] > 0.6


def test_luminance_is_wcag_s() -> None:
    """Against known values: white, black, and the grey that is 4.54 : 1 on white."""
    assert html.luminance((255, 255, 255)) == pytest.approx(1)
    assert html.luminance((0, 0, 0)) == 0
    assert 1.05 / (html.luminance((118, 118, 118)) + 0.05) == pytest.approx(4.54, abs=0.005)


def test_colour_follows_the_logarithm() -> None:
    """Equal ratios are equal steps; the legend has a tick at each decade and the ends' own texts."""
    shades = html.shade(heat_of(1e-4, 1e-2, 1.0, 0.0, -1.0, None))
    assert [cell and cell[0] for cell in shades.cells[0]] == [
        "#440154",
        "#22908c",
        "#fde725",
        "#440154",
        "#440154",
        None,
    ]
    assert [(round(place), decade) for place, decade in shades.decades] == [
        (0, -4),
        (25, -3),
        (50, -2),
        (75, -1),
        (100, 0),
    ]
    assert (shades.least, shades.most) == ("0.0001", "1")


def test_a_missing_site_says_so_and_a_star_marks_what_was_injected() -> None:
    """None is "no such site"; only a starred cell with a number counts as injected."""
    cells = ((Cell("1", 1.0, starred=True), Cell("2", 2.0), Cell("*"), None),)
    heat = HeatMap("h", "t", "nats", ("r",), ("a", "b", "c", "d"), cells, (("n1", "n2", "n3", ""),))
    page = Page(to_html(Document("d", (), (Section("s", "s", (heat,)),))))
    titles = [(a["title"], "data-starred" in a) for t, a in page.tags if "title" in a]
    assert titles == [("r, a\n1* nats\nn1", True), ("r, b\n2 nats\nn2", False), ("r, c\n*\nn3", False),
                      ("r, d\nno such site", False)]  # fmt: skip


# -- charts


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e280, max_value=1e280), min_size=1))
def test_ticks_hold_all_values(values: list[float]) -> None:
    """Rising round numbers, few of them, from below the least value to above the largest."""
    steps = html._steps(values)
    assert 2 <= len(steps) <= 8 and all(a < b for a, b in itertools.pairwise(steps))
    slack = 1e-9 * max(map(abs, [*values, 1e-280]))
    assert steps[0] <= min(values) + slack and steps[-1] >= max(values) - slack


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=40))
def test_bars_and_whiskers_are_to_scale(rows: list[tuple[float, float, float]]) -> None:
    """Pixels are a straight line of values, inside the plot, and zero lies on the zero line."""
    bars = tuple(Bar(f"b{i}", Cell("", v), v - down, v + up) for i, (v, down, up) in enumerate(rows))
    plot = html.plot_bars(Chart("c", "t", "u", bars))
    (first, first_label), (last, last_label) = plot.ticks[0], plot.ticks[-1]
    slope = (last - first) / (float(last_label) - float(first_label))
    for shape in plot.shapes:
        for pixel, value in ((shape.y, shape.bar.cell.value), (shape.low, shape.bar.low), (shape.high, shape.bar.high)):
            assert pixel is not None and value is not None
            assert pixel == pytest.approx(plot.zero + slope * value, abs=0.1)
            assert plot.top - 0.1 <= pixel <= plot.bottom + 0.1


def test_an_open_interval_runs_to_the_edge() -> None:
    """An end that is not known is drawn beyond the plot, not left out; no value means no bar."""
    bars = (Bar("a", Cell("1", 1.0), None, 2.0), Bar("b", Cell("1", 1.0), 0.5, None), Bar("c", Cell("not measurable")),
            Bar("d", Cell("1", 1.0)), Bar("e", Cell("nan", math.nan), 1.0, math.inf))  # fmt: skip
    plot = html.plot_bars(Chart("c", "t", "u", bars))
    assert plot.shapes[0].low == plot.bottom and plot.shapes[1].high == plot.top
    assert [shape.y is None for shape in plot.shapes] == [False, False, True, False, True]
    assert plot.shapes[3].low is None and plot.shapes[3].high is None


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 250))
def test_no_line_of_a_mark_crosses_the_text_of_another(places: set[int], width: int) -> None:
    """Marks of neighbours go into lanes: texts never overlap, and no line runs through a text below its own."""
    flags = [(15.0 * place, 15.0 * place + width) for place in sorted(places)]
    lanes = html._lanes(flags)
    for (one, lane), (other, above) in itertools.permutations(zip(flags, lanes, strict=True), 2):
        if lane == above and one < other:
            assert one[1] < other[0]
        if above > lane:  # the other's line passes this one's lane
            assert not one[0] < other[0] <= one[1]


def test_sixty_bars_keep_their_labels_apart() -> None:
    """Turned labels of a long chart stand at least 11 pixels apart, and each is in the page with its tooltip."""
    bars = tuple(
        Bar(f"L{i}-{i + 2}", Cell(f"{i} %", i / 100), None, None, "avalanche point" * (i == 59)) for i in range(60)
    )
    chart = Chart("c", "t", "u", bars)
    plot = html.plot_bars(chart)
    assert plot.rotated and plot.pitch * math.sin(html.ROTATION) > 11
    assert plot.width > plot.shapes[-1].x + html.LETTER * len("avalanche point")
    page = Page(to_html(Document("d", (), (Section("s", "s", (chart,)),))))
    labels = [a["aria-label"] for t, a in page.tags if t == "g"]
    assert labels[0] == "L0-2; 0 %" and labels[59] == "L59-61; 59 %; avalanche point"


def test_a_curve_keeps_distances() -> None:
    """Noise levels are placed by their number, not by their rank."""
    points = tuple((x, Bar(str(x), Cell("", 1 - x), None, None)) for x in (0.0, 0.05, 0.2))
    one, two, three = (shape.x for shape in html.plot_curve(Curve("k", "t", "x", "y", points)).shapes)
    assert (three - one) / (two - one) == pytest.approx(4)


def test_a_limit_is_drawn_where_its_value_lies() -> None:
    """A limit above all points still has its place on the axis; a curve without one has no such line."""
    points = tuple((x, Bar(str(x), Cell("", x), None, None)) for x in (0.1, 0.2))
    curve = Curve("k", "t", "x", "y", points, limit=0.5)
    plot = html.plot_curve(curve)
    (low, _), (high, _) = ((shape.y, shape) for shape in plot.shapes)
    assert low is not None and high is not None and plot.limit is not None
    assert (low - plot.limit) / (low - high) == pytest.approx(4) and plot.limit >= plot.top
    drawn = to_html(Document("d", (), (Section("s", "s", (curve,)),)))
    plain = to_html(Document("d", (), (Section("s", "s", (dataclasses.replace(curve, limit=None),)),)))
    assert '<line class="limit"' in drawn and '<line class="limit"' not in plain


def test_tables_of_sentences_are_stacked_on_a_phone() -> None:
    """One sentence in most rows is enough; long names of modules are not sentences."""
    sentence, name = Cell("noise in it moves the output by 0.01 nats per token"), Cell("model.layers." * 5)
    assert html.is_wordy(Table("t", ("a", "b"), ((Cell("1"), sentence), (Cell("2"), sentence))))
    assert not html.is_wordy(Table("t", ("a", "b"), ((name, Cell("1")), (name, Cell("2")), (name, sentence))))
