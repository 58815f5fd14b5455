"""A document as PDF: A4 portrait, searchable text, an outline, tables whose rows stay whole and are never clipped.

fpdf2 writes the file; where lines and pages break is decided here, so that intervals such as [0.1, 0.2] stay on one
line and module names break at their dots. The same document gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from noisescope.errors import MissingExtra
from noisescope.reports.document import (
    Block,
    Bullets,
    Cell,
    Chart,
    Document,
    HeatMap,
    Paragraph,
    Section,
    Table,
    Verdict,
)
from noisescope.reports.figures import COLOURS, FONTS, INK, QUIET, Drawable, figure_of, foreign, printable, save

try:
    from fpdf import FPDF
except ImportError:
    raise MissingExtra("a PDF report needs the package fpdf2: pip install 'fpdf2>=2.8'") from None

LEFT, TOP, BOTTOM, WIDTH = 16.0, 20.0, 279.0, 178.0  # mm: where text may stand on a page of 210 x 297
POINT = 25.4 / 72  # mm
BODY, SMALL, SIZES = 9.0, 8.0, (8.0, 7.5, 7.0, 6.5, 6.0)  # points; a table takes the first size it fits in
PAD = 1.3  # mm left and right of a cell's text
ACCENT, STRIPE, HEAD, RULE = "#0B4A75", "#F5F7F9", "#E4ECF2", "#B8C4CE"
# tone: the light ground and the dark text of a band, each pair with a contrast above 7
TINTS = {
    "critical": ("#FBDDCB", "#7A2E00"), "high": ("#FDE8BF", "#664400"), "moderate": ("#FAF5B7", "#524D00"),
    "low": ("#CDEDE2", "#00462F"), "unsure": ("#E6E6E6", "#3D3D3D"), "": ("#DCEBF5", "#0B3A5C"),
}  # fmt: skip
# What stays on one line if it can: an interval in brackets, a number with its %, a count.
_ATOM = re.compile(r"[^\s\[]*\[[^\[\]]{0,40}\]\S*|[-+.\de]+ %\S*|\(n = \d+\)\S*|\S+")
_TOTAL = "\0"  # stands for the number of pages; no text can hold it, see printable


@dataclass(frozen=True)
class Run:
    """Text in one style; a line is a few of them."""

    text: str
    bold: bool = False
    colour: str = INK


Line = list[Run]


def to_pdf(document: Document) -> bytes:
    paper = _Paper(document)
    paper.add_page()
    paper.front(document)
    for section in document.sections:
        paper.section(section)
    return bytes(paper.output())


class _Paper(FPDF):  # type: ignore[misc]
    def __init__(self, document: Document) -> None:
        super().__init__("P", "mm", "A4")
        self.set_margins(LEFT, TOP, LEFT)
        self.set_auto_page_break(False)
        self.c_margin = 0
        self.alias_nb_pages(_TOTAL)
        self.set_creation_date(_finished(document))
        self.set_title(printable(document.title))
        self.set_creator("noisescope")
        self.set_lang("en-GB")
        self.running = [printable(document.title), *(printable(text) for _, text in document.facts[:1])]
        self.add_font("sans", "", FONTS / "DejaVuSans.ttf")
        self.add_font("sans", "B", FONTS / "DejaVuSans-Bold.ttf")
        spelled = set(json.dumps(dataclasses.asdict(document), ensure_ascii=False)) | set(string.printable + "•…\ufffd")
        strange = foreign(printable("".join(sorted(spelled))))
        last_resort = FONTS / "LastResortHE-Regular.ttf"  # a sign for every character; matplotlib has it from 3.9 on
        self.lost = dict.fromkeys(map(ord, strange), "\ufffd") if not last_resort.exists() else {}
        if strange and not self.lost:
            self.add_font("last", "", last_resort, unicode_range=sorted(map(ord, strange)))
            self.set_fallback_fonts(["last"], exact_match=False)
        self.advances: dict[tuple[str, bool], float] = {}  # mm at 1 point; measured before there is a page to write on
        for bold in (False, True):
            self.set_font("sans", "B" if bold else "", 100)
            self.advances |= {(char, bold): self.get_string_width(char) / 100 for char in spelled if char.isprintable()}

    # -- lines

    def measure(self, text: str, bold: bool, size: float) -> float:
        return size * sum(self.advances.get((char, bold), self.advances["\ufffd", bold]) for char in text)

    def wrap(self, runs: Iterable[Run], width: float, size: float) -> list[Line]:
        """Lines no wider than `width`. A word that is too wide breaks after a dot or the like, at worst anywhere."""
        lines: list[Line] = [[]]
        used = 0.0
        for run in runs:
            text = printable(run.text).translate(self.lost)
            for spaced, piece in self._pieces(text, run.bold, width, size):
                piece_width = self.measure(piece, run.bold, size)
                gap = " " if spaced and lines[-1] else ""
                if lines[-1] and used + self.measure(gap, run.bold, size) + piece_width > width + 1e-6:
                    lines.append([])
                    used, gap = 0.0, ""
                line = lines[-1]
                if line and (line[-1].bold, line[-1].colour) == (run.bold, run.colour):
                    line[-1] = dataclasses.replace(line[-1], text=line[-1].text + gap + piece)
                else:
                    line.append(dataclasses.replace(run, text=gap + piece))
                used += self.measure(gap, run.bold, size) + piece_width
        return lines

    def _pieces(self, text: str, bold: bool, width: float, size: float) -> Iterable[tuple[bool, str]]:
        """What may stand alone on a line, each with whether a space goes before it."""
        for atom in _ATOM.findall(text):
            if self.measure(atom, bold, size) <= width:
                yield True, atom
                continue
            for word in atom.split(" "):
                spaced = True
                for part in re.split(r"(?<=[._/\\:,=-])", word):
                    for piece in [part] if self.measure(part, bold, size) <= width else part:
                        yield spaced, piece
                        spaced = False

    def draw(self, line: Line, x: float, y: float, size: float, height: float) -> None:
        for run in line:
            width = self.measure(run.text, run.bold, size)
            self.set_font("sans", "B" if run.bold else "", size)
            self.set_text_color(run.colour)
            self.set_xy(x, y)
            self.cell(width, height, run.text)
            x += width

    def write_runs(self, runs: Iterable[Run], *, size: float = BODY, indent: float = 0, mark: str = "") -> None:
        height = _leading(size)
        for number, line in enumerate(self.wrap(runs, WIDTH - indent, size)):
            self.room(height)
            y = self.y
            if mark and number == 0:
                self.draw([Run(mark, colour=QUIET)], LEFT + indent - 5, y, size, height)
            self.draw(line, LEFT + indent, y, size, height)
            self.set_y(y + height)

    def room(self, height: float) -> None:
        """Go on to the next page if less than this is left here."""
        if self.y + min(height, BOTTOM - TOP) > BOTTOM + 1e-6:
            self.add_page()

    def fill(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.set_fill_color(colour)
        self.rect(x, y, width, height, style="F")

    # -- the page

    def header(self) -> None:
        if self.page_no() > 1:
            for text, x in zip(self.running, (LEFT, LEFT + 45), strict=False):
                line = self.wrap([Run(text, colour=QUIET)], WIDTH - 45, 7)[0]
                x = x if x == LEFT else LEFT + WIDTH - sum(self.measure(run.text, run.bold, 7) for run in line)
                self.draw(line, x, 10, 7, 4)
            self.fill(LEFT, 14.6, WIDTH, 0.2, RULE)
        self.set_y(TOP)

    def footer(self) -> None:
        self.draw([Run("noisescope", colour=QUIET)], LEFT, 285, 7, 4)
        self.set_font("sans", "", 7)
        self.set_xy(LEFT + WIDTH - self.measure("Page 88 of 88", False, 7), 285)
        self.cell(20, 4, f"Page {self.page_no()} of {_TOTAL}")

    def front(self, document: Document) -> None:
        self.write_runs([Run(document.title, True, ACCENT)], size=19)
        self.set_y(self.y + 2)
        for name, text in document.facts:
            top = self.y
            self.write_runs([Run(name, True, QUIET)], size=SMALL)
            self.set_y(top)
            self.write_runs([Run(text)], size=SMALL, indent=18)
        self.fill(LEFT, self.y + 2, WIDTH, 0.6, ACCENT)
        self.set_y(self.y + 3)

    def section(self, section: Section) -> None:
        self.set_y(self.y + 5)
        self.room(38)
        self.start_section(printable(section.title), 0)
        self.write_runs([Run(section.title, True, ACCENT)], size=13)
        self.set_y(self.y + 1.5)
        for block in section.blocks:
            self.block(block)

    def block(self, block: Block) -> None:
        if isinstance(block, Paragraph):
            self.write_runs(_paragraph(block))
        elif isinstance(block, Bullets):
            for number, item in enumerate(block.items, 1):
                self.write_runs(_paragraph(item), indent=6, mark=f"{number}." if block.numbered else "•")
                self.set_y(self.y + 0.6)
        elif isinstance(block, Verdict):
            self.verdict(block)
        elif isinstance(block, Table):
            self.table(block)
        else:
            self.picture(block)
        self.set_y(self.y + 2.4)

    def caption(self, text: str, following: float) -> None:
        """A small heading that stays with what follows, and an entry in the outline."""
        self.room(_leading(BODY) + 1 + following)
        self.start_section(printable(text), 1)
        self.write_runs([Run(text, True)])
        self.set_y(self.y + 1)

    def verdict(self, verdict: Verdict) -> None:
        """A box in the colour of the level, with its word. A box longer than the page goes on in another."""
        ground, ink = TINTS.get(verdict.level.tone, TINTS[""])
        parts = [
            (15.0, 0.0, [Run("Risk: ", colour=ink), Run(verdict.level.text, True, ink)]),
            (BODY + 1, 0.0, [Run(verdict.meaning)]),
            *((SMALL, 4.0, [Run(reason)]) for reason in verdict.reasons),
        ]
        lines: list[tuple[float, float, str, Line]] = []
        for size, indent, runs in parts:
            for number, line in enumerate(self.wrap(runs, WIDTH - 12 - indent, size)):
                lines.append((size, indent, "•" if indent and number == 0 else "", line))
        self.room(sum(_leading(size) for size, *_ in lines) + 7)
        while lines:
            height, count = 7.0, 0
            while count < len(lines) and self.y + height + _leading(lines[count][0]) <= BOTTOM:
                height += _leading(lines[count][0])
                count += 1
            self.fill(LEFT, self.y, WIDTH, height, ground)
            self.fill(LEFT, self.y, 2, height, COLOURS.get(verdict.level.tone, COLOURS[""]))
            y = self.y + 3.5
            for size, indent, mark, line in lines[:count]:
                self.draw([Run(mark, colour=ink)], LEFT + 7, y, size, _leading(size))
                self.draw(line, LEFT + 7 + indent, y, size, _leading(size))
                y += _leading(size)
            self.set_y(y + 3.5)
            lines = lines[count:]
            if lines:
                self.add_page()
        self.set_y(self.y + 1)

    def picture(self, block: Drawable) -> None:
        figure = figure_of(block, title=False)
        across, down = figure.get_size_inches()
        width = min(WIDTH, (BOTTOM - TOP - 20) * across / down)
        height = width * down / across
        with io.BytesIO() as stream:
            save(figure, stream, "png")
            self.caption(block.title, height)
            self.image(stream, LEFT, self.y, width, height, alt_text=_spoken(block))
        self.set_y(self.y + 1)
        if isinstance(block, HeatMap):
            rows = zip(block.rows, block.cells, strict=True)
            body = tuple((Cell(name), *(cell or Cell("") for cell in cells)) for name, cells in rows)
            words = "; ".join(word for word in (block.unit, block.legend) if word)
            self.table(Table(block.key, ("", *block.columns), body, f"The numbers ({words})"))

    # -- tables

    def table(self, table: Table) -> None:
        columns = [[Run(name, True) for name in table.head], *([_plain(cell) for cell in row] for row in table.rows)]
        size, widths = self.fit([[_runs_of(run) for run in row] for row in columns])
        raise NotImplementedError


def _leading(size: float) -> float:
    return size * POINT * 1.35
