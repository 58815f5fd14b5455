"""A picture as a few kinds of marks: what SVG, PDF and matplotlib all can draw.

Charts are laid out once, in pixels with y downwards (charts.py). A colour is the name of a role in palette.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

SIZE = 12.0  # pixels: of text
LETTER = 0.58  # mean width of a letter over the size of its text; that of DejaVu Sans, the widest of the fonts in use


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    hit: bool = False  # invisible: the area that a pointer reacts to


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A disc, or a ring where it is hollow."""

    x: float
    y: float
    radius: float
    colour: str
    hollow: bool = False


@dataclass(frozen=True)
class Text:
    """`y` is the baseline; `anchor` is start, middle or end; `turn` in degrees, against the clock."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = "muted"
    size: float = SIZE
    bold: bool = False
    turn: float = 0.0


Mark: TypeAlias = Rect | Line | Dot | Text


@dataclass(frozen=True)
class Shape:
    """Marks that belong to one value: what a reader can point at, or reach by the keyboard.

    `tip` holds lines of text, `value` the number as it is in the report, `row` the line of a grid it stands in.
    """

    marks: tuple[Mark, ...]
    tip: str
    value: float | None = None
    row: int = 0


@dataclass(frozen=True)
class Drawing:
    width: float
    height: float
    label: str  # what a screen reader says first
    items: tuple[Mark | Shape, ...]

    def marks(self) -> Iterator[Mark]:
        """Every mark that can be seen, in the order of drawing."""
        for item in self.items:
            for mark in item.marks if isinstance(item, Shape) else (item,):
                if not (isinstance(mark, Rect) and mark.hit):
                    yield mark


def text_width(text: str, size: float = SIZE) -> float:
    """Roughly, in pixels; on the safe side."""
    return LETTER * size * sum(2 if ord(char) > 0x2E80 else 1 for char in text)


def short(name: str, limit: int = 28) -> str:
    """A name that leaves room for the picture; the table beside it has the whole."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[1 - limit // 2 :]}"
