"""A report laid out for reading: sections of a few kinds of blocks. Markdown, HTML and PDF draw these and nothing else.

Every number is turned into words once, when a cell is made, so that no two forms can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

TONES = ("critical", "high", "moderate", "low", "unsure", "")  # how alarming a cell is: colour, never colour alone


@dataclass(frozen=True)
class Cell:
    """A text, and the number behind it where there is one: for sorting, colours and hover."""

    text: str
    value: float | None = None
    tone: str = ""


@dataclass(frozen=True)
class Paragraph:
    """Plain text; `lead` is set in bold before it."""

    text: str
    lead: str = ""


@dataclass(frozen=True)
class Bullets:
    items: tuple[Paragraph, ...]
    numbered: bool = False


@dataclass(frozen=True)
class Verdict:
    """The first thing a reader sees: a word, what it means, and why."""

    level: Cell
    meaning: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`key` names it in the page (sorting, tests)."""

    key: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a chart, with the ends of its 95 % interval and a mark such as "avalanche point"."""

    label: str
    cell: Cell
    low: float | None = None
    high: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Chart:
    """Bars in the order of the model; what they show stands in a table beside them, too."""

    key: str
    title: str
    unit: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Curve:
    """Values over a number, with intervals: accuracy at noise levels. `limit` is a line that none should pass."""

    key: str
    title: str
    across: str
    unit: str
    points: tuple[tuple[float, Bar], ...]
    limit: float | None = None


@dataclass(frozen=True)
class HeatMap:
    """Layer x operator. cells[row][column] is None where the model has no such site; `notes` go into the hover."""

    key: str
    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    notes: tuple[tuple[str, ...], ...]
    legend: str = ""


Block: TypeAlias = Paragraph | Bullets | Verdict | Table | Chart | Curve | HeatMap


@dataclass(frozen=True)
class Section:
    """`key` is its anchor."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """`facts` are (name, text) pairs under the title: model, data, noise."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
