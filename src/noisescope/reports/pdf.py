"""A document as PDF: A4 portrait, searchable text, an outline, tables whose rows stay whole and are never clipped.

fpdf2 writes the file; where lines and pages break is decided here, so that an interval such as [0.1, 0.2] stays on one
line and a module's name breaks at its dots. The same document gives the same bytes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from noisescope.errors import MissingExtra
from noisescope.reports import figures
from noisescope.reports.document import Block, Bullets, Cell, Chart, Document, HeatMap, Paragraph, Table, Verdict
from noisescope.reports.figures import COLOURS, FONTS, INK, QUIET, Drawable, printable

try:
    from fpdf import FPDF
except ImportError:
    raise MissingExtra("a report as PDF needs the package fpdf2: pip install 'fpdf2>=2.8'") from None

LEFT, TOP, BOTTOM, WIDTH = 16.0, 19.0, 280.0, 178.0  # mm: where text may stand on a page of 210 x 297
TITLE, HEADING, BODY, SMALL = 19.0, 13.0, 9.0, 8.0  # points
SIZES = (8.0, 7.5, 7.0, 6.5, 6.0)  # points: of a table's text
PAD, RISE = 1.5, 0.8  # mm beside and above the text of a table's cell
LONG = 32  # characters: a longer word may be broken in a table before its text shrinks
ACCENT, STRIPE, HEAD, RULE = "#0B4A75", "#F5F7F9", "#E4ECF2", "#B8C4CE"
# tone: the light ground and the dark ink of a band
TINTS = {
    "critical": ("#FBDDCB", "#7A2E00"), "high": ("#FDE8BF", "#664400"), "moderate": ("#FAF5B7", "#524D00"),
    "low": ("#D3EFE5", "#00462F"), "unsure": ("#E6E6E6", "#3D3D3D"), "": ("#DCEBF5", "#0B3A5C"),
}  # fmt: skip
# What stays on one line if it can: an interval in brackets, a number with its %, a count.
_ATOM = re.compile(r"[^\s\[]*\[[^\[\]]{0,40}\]\S*|[-+.\de]+ %\S*|\(n = \d+\)\S*|\S+")
_STAMP = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d")
_TOTAL = "\0"  # stands for the number of pages; `printable` keeps it out of every other text


@dataclass(frozen=True)
class Run:
    """Text in one style; a line is a few of them. `ground` is the colour behind it."""

    text: str
    bold: bool = False
    colour: str = INK
    ground: str = ""


Line = list[Run]


def to_pdf(document: Document) -> bytes:
    paper = _Paper(document)
    paper.add_page()
    paper.front(document)
    for section in document.sections:
        paper.heading(section.title, section.blocks[0] if section.blocks else None)
        for block in section.blocks:
            paper.block(block)
    return bytes(paper.output())


class _Paper(FPDF):  # type: ignore[misc]
    def __init__(self, document: Document) -> None:
        super().__init__("P", "mm", "A4")
        self.set_auto_page_break(False)
        self.c_margin = 0
        self.alias_nb_pages(_TOTAL)
        self.set_title(printable(document.title))
        self.set_creator("noisescope")
        self.set_lang("en-GB")
        spelled = printable(json.dumps(asdict(document), ensure_ascii=False) + " •\ufffdPage of 0123456789Risk:")
        stamps = _STAMP.findall(spelled)  # the method says when the run ended
        self.set_creation_date(datetime.fromisoformat(stamps[-1]) if stamps else datetime(2000, 1, 1, tzinfo=UTC))
        self.running = [document.title, *(text for _, text in document.facts[:1])]
        self.add_font("sans", "", FONTS / "DejaVuSans.ttf")
        self.add_font("sans", "B", FONTS / "DejaVuSans-Bold.ttf")
        strange = sorted(map(ord, figures.foreign(spelled)))
        last_resort = FONTS / "LastResortHE-Regular.ttf"  # a sign for every character; newer matplotlibs bring it
        self.lost = {} if last_resort.exists() else dict.fromkeys(strange, "\ufffd")
        if strange and not self.lost:
            self.add_font("last", "", last_resort, unicode_range=strange)
            self.set_fallback_fonts(["last"], exact_match=False)
        self.advances: dict[tuple[str, bool], float] = {}  # mm at 1 point; measured before there is a page to write on
        for bold in (False, True):
            self.set_font("sans", "B" if bold else "", 100)
            self.advances |= {(char, bold): self.get_string_width(char) / 100 for char in sorted(set(spelled))}

    # -- lines

    def measure(self, line: Iterable[Run], size: float = 1.0) -> float:
        return size * sum(self.advances[char, run.bold] for run in line for char in run.text)

    def clean(self, text: str) -> str:
        return printable(text).translate(self.lost)

    def wrap(self, runs: Iterable[Run], width: float, size: float) -> list[Line]:
        """Lines no wider than `width`. A word that is too wide breaks after a dot or the like, at worst anywhere."""
        lines: list[Line] = [[]]
        for run in runs:
            for piece in self._pieces(replace(run, text=self.clean(run.text)), width, size):
                if lines[-1] and self.measure([*lines[-1], piece], size) > width + 1e-6:
                    lines.append([])
                line = lines[-1]
                if not line:
                    piece = replace(piece, text=piece.text.lstrip())
                if line and replace(line[-1], text=piece.text) == piece:
                    line[-1] = replace(piece, text=line[-1].text + piece.text)
                else:
                    line.append(piece)
        return lines

    def _pieces(self, run: Run, width: float, size: float) -> Iterable[Run]:
        """What may stand alone on a line; a space before it falls away there."""
        for atom in _ATOM.findall(run.text):
            fits = self.measure([replace(run, text=atom)], size) <= width
            for word in [atom] if fits else atom.split(" "):
                space = " "
                for part in [word] if fits else re.split(r"(?<=[._/\\:,=-])", word):
                    whole = self.measure([replace(run, text=part)], size) <= width
                    for text in [part] if whole else part:
                        yield replace(run, text=space + text)
                        space = ""

    def draw(self, line: Line, x: float, y: float, size: float) -> None:
        height = _leading(size)
        for run in line:
            width = self.measure([run], size)
            if run.ground:
                self.set_fill_color(run.ground)
                self.rect(x - 0.9, y + 0.15, width + 1.8, height - 0.3, "F", round_corners=True, corner_radius=0.8)
            self.set_font("sans", "B" if run.bold else "", size)
            self.set_text_color(run.colour)
            self.set_xy(x, y)
            self.cell(width, height, run.text)
            x += width

    def flow(self, runs: Iterable[Run], size: float = BODY, *, indent: float = 0.0, mark: str = "") -> None:
        """Text that goes on over pages, with a mark before its first line."""
        for number, line in enumerate(self.wrap(runs, WIDTH - indent, size)):
            self.room(_leading(size))
            y = self.y
            if number == 0:
                self.draw([Run(mark, colour=QUIET)], LEFT, y, size)
            self.draw(line, LEFT + indent, y, size)
            self.set_y(y + _leading(size))

    def fill(self, y: float, height: float, colour: str, width: float = WIDTH) -> None:
        self.set_fill_color(colour)
        self.rect(LEFT, y, width, height, "F")

    def room(self, height: float) -> None:
        """Go on to the next page if less than this is left here."""
        if self.y > TOP and self.y + height > BOTTOM:
            self.add_page()

    def down(self, distance: float) -> None:
        self.set_y(self.y + distance)

    # -- the page

    def header(self) -> None:
        if self.page_no() > 1:
            for number, text in enumerate(self.running):
                line = self.wrap([Run(text, colour=QUIET)], WIDTH / 2, 7)[0]
                self.draw(line, LEFT + number * (WIDTH - self.measure(line, 7)), 10, 7)
            self.fill(14.4, 0.2, RULE)
        self.set_y(TOP)

    def footer(self) -> None:
        self.set_font("sans", "", 7)
        self.set_text_color(QUIET)
        self.set_xy(LEFT + WIDTH - self.measure([Run("Page 88 of 88")], 7), 285)
        self.cell(20, 4, f"Page {self.page_no()} of {_TOTAL}")

    def front(self, document: Document) -> None:
        self.set_y(15)
        self.flow([Run(document.title, True, ACCENT)], TITLE)
        self.down(2)
        for name, text in document.facts:
            self.flow([Run(text)], SMALL, indent=18, mark=self.clean(name))
        self.fill(self.y + 2, 0.6, ACCENT)
        self.down(2)

    def heading(self, title: str, following: Block | None) -> None:
        self.down(4)
        self.room(_leading(HEADING) + (8 + _height(following) if isinstance(following, Drawable) else 28))
        self.start_section(self.clean(title), 0)
        self.flow([Run(title, True, ACCENT)], HEADING)
        self.down(1.5)

    def caption(self, text: str, following: float) -> None:
        """A small heading that stays with what follows, and an entry in the outline."""
        self.room(_leading(BODY) + 1 + following)
        self.start_section(self.clean(text), 1)
        self.flow([Run(text, True)])
        self.down(1)

    def block(self, block: Block) -> None:
        if isinstance(block, Paragraph):
            self.flow(_paragraph(block))
        elif isinstance(block, Bullets):
            for number, item in enumerate(block.items, 1):
                self.flow(_paragraph(item), indent=5, mark=f"{number}." if block.numbered else "•")
                self.down(0.6)
        elif isinstance(block, Verdict):
            self.verdict(block)
        elif isinstance(block, Table):
            self.table(block)
        else:
            self.picture(block)
        self.down(2.4)

    def verdict(self, verdict: Verdict) -> None:
        """A box in the colour of the level, with its word."""
        tone = verdict.level.tone if verdict.level.tone in TINTS else ""
        ground, ink = TINTS[tone]
        parts = [(15.0, [Run("Risk:", colour=ink), Run(verdict.level.text, True, ink)]), (BODY, [Run(verdict.meaning)])]
        parts += [(SMALL, [Run(f"• {reason}")]) for reason in verdict.reasons]
        lines = [(size, line) for size, runs in parts for line in self.wrap(runs, WIDTH - 12, size)]
        lines = [(6.0, []), *lines, (6.0, [])]
        self.room(sum(_leading(size) for size, _ in lines))
        for size, line in lines:
            self.room(_leading(size))
            y = self.y
            for colour, width in ((ground, WIDTH), (COLOURS[tone], 2)):
                self.fill(y, _leading(size) + 0.1, colour, width)  # a hair higher, so that no seam shows
            self.draw(line, LEFT + 7, y, size)
            self.set_y(y + _leading(size))

    def picture(self, block: Drawable) -> None:
        height = _height(block)
        self.caption(block.title, height)
        y = self.y
        with io.BytesIO() as stream:
            figures.save(figures.figure_of(block, title=False), stream, "png")
            self.image(stream, LEFT, y, h=height, alt_text=self.clean(_spoken(block)))
        self.set_y(y + height + 1)
        if isinstance(block, HeatMap):
            rows = zip(block.rows, block.cells, strict=True)
            body = tuple((Cell(name), *(cell or Cell("") for cell in cells)) for name, cells in rows)
            words = "; ".join(word for word in (block.unit, block.legend) if word)
            self.table(Table(block.key, ("", *block.columns), body, f"The numbers ({words})"))

    # -- tables

    def table(self, table: Table) -> None:
        """Columns as wide as their content asks; the head again on every page; no row cut by the end of a page."""
        rows = [[[Run(name, True)] for name in table.head], *([_styled(cell) for cell in row] for row in table.rows)]
        size, widths = self.fit(rows)
        columns = [
            self.column(column, width - 2 * PAD, size) for column, width in zip(_turned(rows), widths, strict=True)
        ]
        flush = [_whole([row[number].text for row in table.rows]) for number in range(len(widths))]
        head, *body = _turned(columns)
        heights = [_row_height(row, size) for row in (head, *body)]
        start = sum(heights if sum(heights) < 70 else heights[:4])
        if table.caption:
            self.caption(table.caption, start)
        self.room(start)
        self.row(head, widths, flush, size, HEAD)
        most = int((BOTTOM - TOP - heights[0] - 2 * RISE) / _leading(size))  # lines of one row that a page can hold
        for number, row in enumerate(body):
            for first in range(0, max(map(len, row)), most):
                part = [lines[first : first + most] for lines in row]
                if self.y + _row_height(part, size) > BOTTOM:
                    self.add_page()
                    self.row(head, widths, flush, size, HEAD)
                self.row(part, widths, flush, size, STRIPE if number % 2 else "#FFFFFF")
        self.fill(self.y, 0.2, RULE, sum(widths))
        self.down(1)

    def fit(self, rows: Sequence[Sequence[Sequence[Run]]]) -> tuple[float, list[float]]:
        """The size of the text and the widths of the columns: on one line if 7 points allow it, else wrapped."""
        cleaned = [[[replace(run, text=" " + self.clean(run.text)) for run in cell] for cell in row] for row in rows]
        wants = [max(self.measure(cell) for cell in column) for column in _turned(cleaned)]
        needs = [max(self.need(run) for cell in column for run in cell) for column in _turned(cleaned)]
        room = WIDTH - 2 * PAD * len(wants)
        single = (size for size in SIZES if size >= 7 and size * sum(wants) <= room)
        size = next(single, None) or next((size for size in SIZES if size * sum(needs) <= room), SIZES[-1])
        spare, short = room - size * sum(needs), size * (sum(wants) - sum(needs))
        if spare < 0:
            widths = [need * room / sum(needs) for need in needs]
        elif spare < short:  # what is left goes to those that want more
            widths = [size * (need + (want - need) * spare / short) for need, want in zip(needs, wants, strict=True)]
        else:
            widths = [size * want + min((spare - short) / len(wants), 5) for want in wants]
        return size, [width + 2 * PAD for width in widths]

    def need(self, run: Run) -> float:
        """The width, at 1 point, of the widest thing that should not be broken."""
        atoms = _ATOM.findall(run.text)
        return max((self.measure([replace(run, text=atom)]) * min(1, LONG / len(atom)) for atom in atoms), default=0.0)

    def column(self, cells: Sequence[Sequence[Run]], width: float, size: float) -> list[list[Line]]:
        """The lines of each cell. If one interval must stand under its value, all of them do."""
        whole = [self.wrap(cell, width, size) for cell in cells]
        if all(len(lines) == 1 for lines, cell in zip(whole, cells, strict=True) if len(cell) > 1):
            return whole
        return [[line for run in cell for line in self.wrap([run], width, size)] for cell in cells]

    def row(self, cells: Sequence[list[Line]], widths: Sequence[float], flush: Sequence[bool], size: float,
            ground: str) -> None:  # fmt: skip
        x, y = LEFT, self.y
        self.fill(y, _row_height(cells, size), ground, sum(widths))
        for lines, width, right in zip(cells, widths, flush, strict=True):
            for number, line in enumerate(lines):
                shift = width - 2 * PAD - self.measure(line, size) if right else 0.0
                self.draw(line, x + PAD + shift, y + RISE + number * _leading(size), size)
            x += width
        self.set_y(y + _row_height(cells, size))


def _leading(size: float) -> float:
    """The height of a line in mm."""
    return size * 25.4 / 72 * 1.32


def _row_height(cells: Sequence[Sequence[Line]], size: float) -> float:
    return max(map(len, cells)) * _leading(size) + 2 * RISE


def _height(block: Drawable) -> float:
    return min(figures.height_of(block) / figures.WIDTH * WIDTH, BOTTOM - TOP - 20)


def _turned(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return list(zip(*rows, strict=True))


def _whole(texts: Sequence[str]) -> bool:
    """Whether a column holds whole numbers alone, which stand flush right."""
    return any(texts) and all(re.fullmatch(r"-?\d*", text) for text in texts)


def _styled(cell: Cell) -> list[Run]:
    if cell.tone:
        ground, ink = TINTS.get(cell.tone, TINTS[""])
        return [Run(cell.text, True, ink, ground)]
    value, bracket, interval = cell.text.partition(" [")
    if cell.value is not None and bracket:
        return [Run(value), Run(f"[{interval}", colour=QUIET)]
    return [Run(cell.text)]


def _paragraph(paragraph: Paragraph) -> list[Run]:
    return [Run(paragraph.lead, True), Run(paragraph.text)]


def _spoken(block: Drawable) -> str:
    """What a screen reader says in place of the figure."""
    if isinstance(block, HeatMap):
        return f"{block.title} ({block.unit}): the numbers are in the table below"
    bars = block.bars if isinstance(block, Chart) else [bar for _, bar in block.points]
    said = (f"{bar.label} {bar.cell.text} {bar.mark}".strip() for bar in bars)
    return f"{block.title} ({block.unit}): {'; '.join(said)}"
