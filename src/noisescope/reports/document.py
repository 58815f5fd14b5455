"""A report laid out for reading: sections of a few kinds of blocks. Markdown, HTML and PDF draw these and nothing else.

Every number is rounded and put into words once, when a cell is made, so that no two forms can disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

TONES = ("critical", "high", "moderate", "low", "unsure", "")  # how alarming a cell is: colour, never colour alone


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number behind it where there is one: for sorting, colours and hover.

    An estimate has its `interval` ("[0.1 %, 3 %]") and what follows it (" (n = 4)") apart, for they are drawn lighter.
    A `starred` cell of a heat map was injected.
    """

    shown: str
    value: float | None = None
    tone: str = ""
    interval: str = ""
    rest: str = ""
    starred: bool = False

    @property
    def text(self) -> str:
        """All of it, as one line."""
        span = f" {self.interval}" if self.interval else ""
        return f"{self.shown}{'*' if self.starred else ''}{span}{self.rest}"


@dataclass(frozen=True)
class Paragraph:
    """Plain text; `tag` and `lead` stand before it, a coloured word and bold text; `note` is set lighter after it."""

    text: str
    lead: str = ""
    note: str = ""
    tag: Cell = Cell("")


@dataclass(frozen=True)
class Bullets:
    items: tuple[Paragraph, ...]
    numbered: bool = False


@dataclass(frozen=True)
class Verdict:
    """The first thing a reader sees: a word, what it means, and why. `name` says what the word is of."""

    level: Cell
    meaning: str
    reasons: tuple[str, ...] = ()
    name: str = "Risk"


@dataclass(frozen=True)
class Table:
    """`key` names it in the page (sorting, tests)."""

    key: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a chart, with the ends of its 95 % interval and a mark such as "avalanche point".

    A mark that the interval does not decide is `undecided`, and drawn hollow.
    """

    label: str
    cell: Cell
    low: float | None = None
    high: float | None = None
    mark: str = ""
    undecided: bool = False


@dataclass(frozen=True)
class Chart:
    """Bars in the order of the model; what they show stands in a table beside them, too."""

    key: str
    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Curve:
    """Values over a number, with intervals: accuracy at noise levels. `limit` is a line that none should pass.

    `points` are joined by a line, which `line` names; `marked` ones stand alone, each with its label.
    """

    key: str
    title: str
    across: str
    unit: str
    points: tuple[tuple[float, Bar], ...]
    limit: float | None = None
    marked: tuple[tuple[float, Bar], ...] = ()
    line: str = ""


@dataclass(frozen=True)
class HeatMap:
    """Layer x operator. cells[row][column] is None where the model has no such site; `notes` go into the hover.

    `legend` says what a star means. `strip` has a bar for each row, drawn above the map under its `strip_title`, and
    after them bars of places that are no rows.
    """

    key: str
    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    notes: tuple[tuple[str, ...], ...]
    legend: str = ""
    strip: tuple[Bar, ...] = ()
    strip_title: str = ""

    def as_table(self) -> Table:
        """The numbers, where there is no colour."""
        rows = zip(self.rows, self.cells, strict=True)
        body = tuple((Cell(name), *(cell or Cell("") for cell in cells)) for name, cells in rows)
        return Table(self.key, ("", *self.columns), body, f"{self.title} ({'; '.join(heat_words(self))})")


@dataclass(frozen=True)
class HeatTable:
    """The numbers of a heat map; a page can sort and filter them."""

    heat: HeatMap


@dataclass(frozen=True)
class StatusGrid:
    """Layer x operator, each cell in one of a few states. cells[row][column] is None where the model has no such site.

    A cell's tone is its colour, its text says the same without colour; `notes` go into the hover. `legend` names the
    states: (tone, sign for plain text, words).
    """

    key: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    notes: tuple[tuple[str, ...], ...]
    legend: tuple[tuple[str, str, str], ...]

    def as_table(self) -> Table:
        """In signs and words, where there is no colour."""
        signs = {tone: sign for tone, sign, _ in self.legend}
        cells = [[Cell(f"{signs[c.tone]} {c.text}".strip() if c else "") for c in row] for row in self.cells]
        rows = ((Cell(name), *row) for name, row in zip(self.rows, cells, strict=True))
        return Table(self.key, ("", *self.columns), tuple(rows), self.title)


@dataclass(frozen=True)
class Command:
    """A command that can be pasted as it stands, and what it does."""

    text: str
    words: str = ""


@dataclass(frozen=True)
class Details:
    """Blocks that a page and Markdown show folded, under a title; a PDF shows them."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Panel:
    """Blocks under a small heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Columns:
    """Panels side by side where there is room, else one below the other."""

    panels: tuple[Panel, ...]


Block: TypeAlias = (
    Paragraph
    | Bullets
    | Verdict
    | Table
    | Chart
    | Curve
    | HeatMap
    | HeatTable
    | StatusGrid
    | Command
    | Details
    | Columns
)


def every_block(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks and all that is inside them, in the order of reading."""
    for block in blocks:
        yield block
        if isinstance(block, Details):
            yield from every_block(block.blocks)
        elif isinstance(block, Columns):
            yield from every_block(inner for panel in block.panels for inner in panel.blocks)


@dataclass(frozen=True)
class Section:
    """`key` is its anchor."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """`facts` are (name, text) pairs under the title: model, data, noise. `finished`: when the run ended, ISO 8601.

    `command` is what made it.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    finished: str = ""
    command: str = ""

    def summary(self) -> Document:
        """One page, for a pull request: the first section and nothing else."""
        return replace(self, title=f"{self.title}: summary", sections=self.sections[:1])

    def blocks(self) -> Iterator[Block]:
        """Every block, those inside others too."""
        return every_block(block for section in self.sections for block in section.blocks)


def heat_words(block: HeatMap) -> list[str]:
    """The unit of a heat map, and what a star in it means."""
    return [word for word in (block.unit, block.legend and f"* {block.legend}") if word]


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers, with or without intervals, and are set to the right; never the first."""
    columns = [[row[i] for row in table.rows if row[i].text] for i in range(len(table.head))]
    return [i > 0 and any(cell.value is not None for cell in cells) for i, cells in enumerate(columns)]
