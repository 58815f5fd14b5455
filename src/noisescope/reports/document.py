"""A report laid out for reading: sections of a few kinds of blocks. Markdown, HTML and PDF draw these and nothing else.

Every number is rounded and put into words once, when a cell is made, so that no two forms can disagree. Markdown, the
plainest form, is made here; it leaves charts out, for the table beside each holds the same numbers.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from noisescope.plain_text import markdown, one_line

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
    """Plain text; `lead` is set in bold before it."""

    text: str
    lead: str = ""


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
    """`key` names it in the page (sorting, tests). A `folded` one shows these words until it is opened."""

    key: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    folded: str = ""


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
    """Values over a number, with intervals: accuracy at noise levels. `limit` is a line that none should pass."""

    key: str
    title: str
    across: str
    unit: str
    points: tuple[tuple[float, Bar], ...]
    limit: float | None = None


@dataclass(frozen=True)
class HeatMap:
    """Layer x operator. cells[row][column] is None where the model has no such site; `notes` go into the hover.

    `legend` says what a star means.
    """

    key: str
    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    notes: tuple[tuple[str, ...], ...]
    legend: str = ""


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


Block: TypeAlias = Paragraph | Bullets | Verdict | Table | Chart | Curve | HeatMap | StatusGrid


@dataclass(frozen=True)
class Section:
    """`key` is its anchor."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """`facts` are (name, text) pairs under the title: model, data, noise. `finished`: when the run ended, ISO 8601."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    finished: str = ""


def to_markdown(document: Document) -> str:
    lines = [f"# {markdown(document.title)}", ""]
    lines += [f"**{markdown(name)}**: {markdown(text)}  " for name, text in document.facts]
    for section in document.sections:
        lines += ["", f"## {markdown(section.title)}"]
        for block in section.blocks:
            if drawn := list(_block(block)):
                lines += ["", *drawn]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> Iterable[str]:
    if isinstance(block, Verdict):
        word = markdown(f"{block.name}: {block.level.text}")
        yield f"**{word}**" + (f" - {markdown(block.meaning)}" if block.meaning else "")
        yield from (
            ["", *(f"- {markdown(reason, starts_line=True)}" for reason in block.reasons)] if block.reasons else []
        )
    elif isinstance(block, Paragraph):
        yield _paragraph(block)
    elif isinstance(block, Bullets):
        yield from (f"{f'{i}.' if block.numbered else '-'} {_paragraph(item)}" for i, item in enumerate(block.items, 1))
    elif isinstance(block, Table):
        yield from [f"### {markdown(block.caption)}", ""] if block.caption else []
        yield from [f"<details><summary>{html.escape(one_line(block.folded))}</summary>", ""] if block.folded else []
        yield from table(block.head, ((cell.text for cell in row) for row in block.rows))
        yield from ["", "</details>"] if block.folded else []
    elif isinstance(block, HeatMap):
        title = f"{block.title} ({'; '.join(heat_words(block))})"
        yield from [f"### {markdown(title)}", ""]
        rows = zip(block.rows, block.cells, strict=True)
        yield from table(["", *block.columns], ([name, *(c.text if c else "" for c in cells)] for name, cells in rows))
    elif isinstance(block, StatusGrid):
        yield from _block(block.as_table())
        yield from ["", markdown(", ".join(f"{sign} {words}" for _, sign, words in block.legend), starts_line=True)]


def heat_words(block: HeatMap) -> list[str]:
    """The unit of a heat map, and what a star in it means."""
    return [word for word in (block.unit, block.legend and f"* {block.legend}") if word]


def _paragraph(paragraph: Paragraph) -> str:
    if not paragraph.lead:
        return markdown(paragraph.text, starts_line=True)
    return f"**{markdown(paragraph.lead)}** {markdown(paragraph.text)}"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = [markdown(name) for name in head]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(markdown, row)) + " |" for row in body]
