"""A document as PDF: A4 portrait, searchable text, an outline, tables whose rows stay whole and are never clipped.

fpdf2 writes the file; text_layout.py decides where lines break, this file where pages do. The same document gives the
same bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import string
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from noisescope.errors import MissingExtra
from noisescope.reports.charts import DRAWABLE, Drawable, draw, drawable, spoken
from noisescope.reports.document import (
    Block,
    Bullets,
    Cell,
    Columns,
    Command,
    Details,
    Document,
    HeatMap,
    HeatTable,
    Paragraph,
    StatusGrid,
    Table,
    Verdict,
    numeric_columns,
)
from noisescope.reports.drawing import Dot, Mark, Rect, Text
from noisescope.reports.drawing import Line as Stroke
from noisescope.reports.palette import mix, on_paper, tint
from noisescope.reports.text_layout import (
    FONTS,
    LAST_RESORT,
    PAD,
    QUIET,
    RISE,
    Grid,
    Line,
    Ruler,
    Run,
    foreign,
    leading,
    printable,
)

try:
    from fpdf import FPDF
except ImportError:
    raise MissingExtra("a report as PDF needs the package fpdf2: pip install 'fpdf2>=2.8.5'") from None

LEFT, TOP, BOTTOM, WIDTH = 16.0, 19.0, 280.0, 178.0  # mm: where text may stand on a page of 210 x 297
TITLE, HEADING, BODY, SMALL = 19.0, 13.0, 9.0, 8.0  # points
SIZES = (8.0, 7.5, 7.0, 6.5, 6.0)  # points: of a table's text
ACCENT, PAPER, HEAD, RULE = on_paper("accent"), on_paper("card"), on_paper("hover"), on_paper("line")
STRIPE = mix(HEAD, PAPER, 0.6)
PIXEL = 25.4 / 96  # mm: the largest that a drawing's pixel is drawn
_TOTAL = "\0\0\0"  # stands for the number of pages, as wide as 999; `printable` keeps it out of every other text


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
        spelled = printable(json.dumps(asdict(document), ensure_ascii=False) + string.printable + "•…\ufffd")
        self.set_creation_date(_ended(document.finished))
        self.running = [document.title, *(text for _, text in document.facts[:1])]
        self.add_font("sans", "", FONTS / "DejaVuSans.ttf")
        self.add_font("sans", "B", FONTS / "DejaVuSans-Bold.ttf")
        self.add_font("mono", "", FONTS / "DejaVuSansMono.ttf")
        self.strange = foreign(spelled)
        if self.strange:
            self.add_font("last", "", LAST_RESORT, unicode_range=sorted(map(ord, self.strange)))
        advances: dict[tuple[str, bool], float] = {}
        for char in sorted(set(spelled)):  # before there is a page, for a change of font is written on it
            for bold in (False, True):
                self.choose_font(char, bold, 100)
                advances[char, bold] = self.get_string_width(char) / 100
        self.ruler = Ruler(advances)

    # -- text on the page

    def draw(self, line: Line, x: float, y: float, size: float) -> None:
        height = leading(size)
        for run in line:
            width = self.ruler.measure([run], size)
            if run.ground:
                self.set_fill_color(run.ground)
                self.rect(x - 0.9, y + 0.15, width + 1.8, height - 0.3, "F", round_corners=True, corner_radius=0.8)
            self.set_text_color(run.colour)
            for _, chars in itertools.groupby(run.text, key=self.strange.__contains__):
                text = "".join(chars)
                self.choose_font(text, run.bold, size)
                self.set_xy(x, y)
                width = self.ruler.measure([replace(run, text=text)], size)
                self.cell(width, height, text)
                x += width

    def choose_font(self, text: str, bold: bool, size: float) -> None:
        """By hand: fpdf2's own fallback forgets the font of the next line (seen in 2.8.9)."""
        self.set_font(*(("last", "") if text[0] in self.strange else ("sans", "B" if bold else "")), size)

    def flow(self, runs: Iterable[Run], size: float = BODY, *, indent: float = 0.0, mark: str = "") -> None:
        """Text that goes on over pages, with a mark before its first line."""
        for number, line in enumerate(self.ruler.wrap(runs, WIDTH - indent, size)):
            self.room(leading(size))
            y = self.y
            if number == 0:
                self.draw([Run(mark, colour=QUIET)], LEFT, y, size)
            self.draw(line, LEFT + indent, y, size)
            self.set_y(y + leading(size))

    def fill(self, y: float, height: float, colour: str, width: float = WIDTH) -> None:
        self.set_fill_color(colour)
        self.rect(LEFT, y, width, height, "F")

    def room(self, height: float) -> None:
        """Go on to the next page if less than this is left here; what is longer than a page begins anywhere."""
        if self.y > TOP and self.y + (height if height < BOTTOM - TOP else 30) > BOTTOM + 1e-6:
            self.add_page()

    def down(self, distance: float) -> None:
        self.set_y(self.y + distance)

    # -- the page

    def header(self) -> None:
        if self.page_no() > 1:
            for number, text in enumerate(self.running):
                line, *more = self.ruler.wrap([Run(text, colour=QUIET)], WIDTH / 2 - 4, 7)
                line = [*line, Run("…", colour=QUIET)] if more else line
                self.draw(line, LEFT + number * (WIDTH - self.ruler.measure(line, 7)), 10, 7)
            self.fill(14.4, 0.2, RULE)
        self.set_y(TOP)

    def footer(self) -> None:
        self.set_font("sans", "", 7)
        self.set_text_color(QUIET)
        self.set_xy(LEFT, 285)
        self.cell(20, 4, f"Page {self.page_no()} of {_TOTAL}")

    def front(self, document: Document) -> None:
        self.set_y(15)
        self.flow([Run(document.title, True, ACCENT)], TITLE)
        self.down(2)
        for name, text in document.facts:
            self.flow([Run(text)], SMALL, indent=18, mark=printable(name))
        if document.command:
            self.down(1)
            self.command(Command(document.command))
        self.fill(self.y + 2, 0.6, ACCENT)
        self.down(2)

    def heading(self, title: str, following: Block | None) -> None:
        self.down(4)
        self.room(leading(HEADING) + (8 + _height(following) if isinstance(following, DRAWABLE) else 28))
        self.start_section(printable(title), 0)
        self.flow([Run(title, True, ACCENT)], HEADING)
        self.down(1.5)

    def caption(self, text: str, following: float) -> None:
        """A small heading that stays with what follows, and an entry in the outline."""
        self.room(leading(BODY) + 1 + following)
        self.start_section(printable(text), 1)
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
            if block.head:
                self.table(block)
        elif isinstance(block, StatusGrid):
            self.table(block.as_table())
        elif isinstance(block, HeatTable):
            self.table(block.heat.as_table())
        elif isinstance(block, DRAWABLE):
            self.picture(block)
        else:
            self.nested(block)
        self.down(2.4)

    def nested(self, block: Block) -> None:
        if isinstance(block, Command):
            self.command(block)
        elif isinstance(block, Details):
            self.unfolded(block)
        elif isinstance(block, Columns):
            for panel in block.panels:
                if panel.title:
                    self.caption(panel.title, 12)
                for inner in panel.blocks:
                    self.block(inner)

    def unfolded(self, block: Details) -> None:
        """Its title as the caption of its table, or above its blocks."""
        first, *others = block.blocks or (Paragraph(""),)
        if isinstance(first, Table):
            self.table(replace(first, caption=block.title))
        else:
            self.caption(block.title, 24)
            self.block(first)
        for inner in others:
            self.block(inner)

    def command(self, block: Command) -> None:
        """On a grey ground, in letters of one width; a long one goes on in the next line."""
        if block.words:
            self.room(leading(BODY) + 6)
            self.flow([Run(block.words)])
        for line in self.ruler.wrap([Run(block.text)], WIDTH * 0.84, SMALL):  # those letters are wider
            self.room(leading(SMALL) + 1.6)
            y = self.y
            self.fill(y, leading(SMALL) + 1.6, HEAD)
            text = "".join(run.text for run in line)
            self.set_text_color(on_paper("text"))
            self.set_font(*(("last", "") if self.strange & set(text) else ("mono", "")), SMALL)
            self.set_xy(LEFT + 2, y + 0.8)
            self.cell(WIDTH, leading(SMALL), text)
            self.set_y(y + leading(SMALL) + 1.6)

    def verdict(self, verdict: Verdict) -> None:
        """A box in the colour of the level, with its word."""
        tone = verdict.level.tone or "none"
        ground, ink = tint(tone)
        level = [Run(f"{verdict.name}:", colour=ink), Run(verdict.level.text, True, ink)]
        parts = [(15.0, level), (BODY, [Run(verdict.meaning)])]
        mark = "• " if len(verdict.reasons) > 1 else ""
        parts += [(SMALL, [Run(f"{mark}{reason}")]) for reason in verdict.reasons]
        text = [(size, line) for size, runs in parts for line in self.ruler.wrap(runs, WIDTH - 12, size)]
        lines = [(6.0, Line()), *text, (6.0, Line())]
        self.room(sum(leading(size) for size, _ in lines))
        for size, line in lines:
            self.room(leading(size))
            y = self.y
            for colour, width in ((ground, WIDTH), (on_paper(tone), 2)):
                self.fill(y, leading(size) + 0.1, colour, width)  # a hair higher, so that no seam shows
            self.draw(line, LEFT + 7, y, size)
            self.set_y(y + leading(size))

    def picture(self, block: Drawable) -> None:
        """The marks of its drawing; nothing where it has no value."""
        if not drawable(block):
            return
        drawing, scale = draw(block), _scale(block)
        self.caption(block.title, drawing.height * scale)
        top = self.y
        with self._marked_sequence(title=printable(block.title), alt_text=printable(spoken(block))):
            for mark in drawing.marks():
                self.mark(mark, LEFT, top, scale)
        self.set_y(top + drawing.height * scale + 1)

    def mark(self, mark: Mark, x0: float, y0: float, scale: float) -> None:
        """One mark of a drawing whose corner is at x0, y0 mm."""
        if isinstance(mark, Rect):
            self.set_fill_color(on_paper(mark.fill))
            self.rect(x0 + mark.x * scale, y0 + mark.y * scale, mark.width * scale, mark.height * scale, "F")
        elif isinstance(mark, Stroke):
            self.set_draw_color(on_paper(mark.colour))
            self.set_line_width(mark.width * scale)
            self.set_dash_pattern(*((0.8, 0.8) if mark.dashed else ()))
            self.polyline([(x0 + x * scale, y0 + y * scale) for x, y in mark.points])
            self.set_dash_pattern()
        elif isinstance(mark, Dot):
            self.set_draw_color(on_paper(mark.colour))
            self.set_line_width(scale)
            self.set_fill_color(on_paper("card" if mark.hollow else mark.colour))
            self.circle(x0 + mark.x * scale, y0 + mark.y * scale, mark.radius * scale, "DF")
        else:
            self.words(mark, x0 + mark.x * scale, y0 + mark.y * scale, mark.size * scale * 72 / 25.4)

    def words(self, mark: Text, x: float, y: float, size: float) -> None:
        """A text of a drawing: x, y is where its anchor stands on the baseline."""
        run = Run(printable(mark.text), mark.bold, on_paper(mark.colour))
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * self.ruler.measure([run], size)
        rise = leading(size) / 2 + 0.3 * size * 25.4 / 72  # fpdf2's baseline in a cell of this height
        turned = self.rotation(mark.turn, x, y) if mark.turn else contextlib.nullcontext()
        with turned:
            self.draw([run], x - shift, y - rise, size)

    # -- tables

    def table(self, table: Table) -> None:
        """Columns as wide as their content asks; the head again on every page; no row cut by the end of a page."""
        rows = [[[Run(name, True)] for name in table.head], *([_styled(cell) for cell in row] for row in table.rows)]
        size, widths = self.ruler.fit(rows, WIDTH - 2 * PAD * len(table.head), SIZES)
        columns = [self.ruler.column([row[at] for row in rows], width, size) for at, width in enumerate(widths)]
        reach = [max(self.ruler.measure(line, size) for lines in column for line in lines) for column in columns]
        flush = numeric_columns(table)
        grid = Grid(size, widths, [end if right else None for end, right in zip(reach, flush, strict=True)])
        head, *body = zip(*columns, strict=True)
        heights = [grid.height(row) for row in (head, *body)]
        start = min(sum(heights), max(45, sum(heights[:4])))  # no few rows alone at the foot of a page
        if table.caption:
            self.caption(table.caption, start)
        self.room(start)
        self.row(head, grid, HEAD)
        page = BOTTOM - TOP - heights[0]
        most = int((page - 2 * RISE) / leading(size))  # lines of one row that a page can hold
        for number, row in enumerate(body):
            for first in range(0, max(map(len, row)), most):
                part = [lines[first : first + most] for lines in row]
                together = sum(heights[-3:]) if number == len(body) - 3 else grid.height(part)  # the last three rows
                if self.y + min(together, page) > BOTTOM + 1e-6:
                    self.add_page()
                    self.row(head, grid, HEAD)
                self.row(part, grid, STRIPE if number % 2 else PAPER)
        self.fill(self.y, 0.2, RULE, grid.width)
        self.down(1)

    def row(self, cells: Sequence[list[Line]], grid: Grid, ground: str) -> None:
        x, y = LEFT + PAD, self.y
        self.fill(y, grid.height(cells), ground, grid.width)
        for lines, width, edge in zip(cells, grid.widths, grid.edges, strict=True):
            for number, line in enumerate(lines):
                shift = 0.0 if edge is None else edge - self.ruler.measure(line, grid.size)
                self.draw(line, x + shift, y + RISE + number * leading(grid.size), grid.size)
            x += width + 2 * PAD
        self.set_y(y + grid.height(cells))


def _scale(block: Drawable) -> float:
    """mm in a pixel of its drawing: as wide as the text, never larger than life, and several of them to a page."""
    drawing = draw(block)
    return min(PIXEL, WIDTH / drawing.width, (150 if isinstance(block, HeatMap) else 66) / drawing.height)


def _height(block: Drawable) -> float:
    return draw(block).height * _scale(block) if drawable(block) else 20.0


def _styled(cell: Cell) -> list[Run]:
    if cell.tone:
        ground, ink = tint(cell.tone)
        return [Run(cell.text, True, ink, ground)]
    lighter = f"{cell.interval}{cell.rest}".strip()
    shown = f"{cell.shown}*" if cell.starred else cell.shown
    return [Run(shown), Run(lighter, colour=QUIET)] if lighter else [Run(shown)]


def _paragraph(paragraph: Paragraph) -> list[Run]:
    note = [Run(f"({paragraph.note})", colour=QUIET)] if paragraph.note else []
    tag = _styled(paragraph.tag) if paragraph.tag.text else []
    return [*tag, Run(paragraph.lead, True), Run(paragraph.text), *note]


def _ended(stamp: str) -> datetime:
    """When the run ended, for the file's own date: never the time of drawing, so that the bytes stay the same."""
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(stamp)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return datetime(2000, 1, 1, tzinfo=UTC)
