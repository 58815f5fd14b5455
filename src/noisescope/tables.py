"""Results as tables: one place for data frames, CSV files and the short HTML that a notebook shows.

A result names its tables once, in `sheet()`. Columns come from the types of its rows: every run has the same ones. An
`Estimate` is four columns (`kl`, `kl_low`, `kl_high`, `kl_n`), a nested value one for each of its fields.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from noisescope.errors import MissingExtra, unknown
from noisescope.estimate import Estimate
from noisescope.jsonform import field_types, to_json
from noisescope.sites import Site
from noisescope.text_escaping import aligned, csv_cell, html_text, one_line

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_ROWS = 8  # of a table in a notebook
MOST_LINES = 6
LONGEST_LINE, LONGEST_CELL = 800, 200  # characters
_ENDS = ("low", "high", "n")
# No colour of text or background is set, so that it reads on light and on dark pages.
_BOX = "border-left:4px solid {};padding:2px 0 2px 12px;line-height:1.5;max-width:72em"
_BORDERS = {"critical": "#d9304f", "high": "#e8743b", "moderate": "#d9a514", "low": "#2e9d5b", "": "#8a8f98"}
_CELL = "padding:2px 12px 2px 0;text-align:{}"
_TABLE = "border-collapse:collapse;margin:6px 0"
_ROW = "vertical-align:top"
_QUIET = "opacity:.75"


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. A cell is a plain value, a tuple or a mapping."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, kind: type, rows: Iterable[object], *, without: Iterable[str] = ()) -> Self:
        """Dataclass values of one kind, a column for each field but those named.

        >>> Table.of(Estimate, [Estimate(0.5, 0.4, None, 10)], without=("level", "note", "method"))
        Table(columns=('value', 'low', 'high', 'n'), rows=((0.5, 0.4, None, 10),))
        """
        fields = {name: _plain(hint) for name, hint in field_types(kind).items() if name not in set(without)}
        columns = (column for name, hint in fields.items() for column in _columns(name, hint))
        cells = ((cell for name, hint in fields.items() for cell in _cells(hint, getattr(row, name))) for row in rows)
        return cls(tuple(columns), tuple(map(tuple, cells)))

    def beside(self, columns: Sequence[str], cells: Iterable[tuple[Any, ...]]) -> Self:
        """The same table with other columns before its own."""
        rows = (left + right for left, right in zip(cells, self.rows, strict=True))
        return type(self)((*columns, *self.columns), tuple(rows))

    def to_csv(self) -> str:
        """Text for a CSV file; no spreadsheet takes a cell of it for a formula."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerows([map(_csv_cell, self.columns), *(map(_csv_cell, row) for row in self.rows)])
        return text.getvalue()

    def to_frame(self) -> DataFrame:
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra(
                "a data frame needs the package pandas: pip install 'noisescope[pandas]'. to_csv() works without it"
            ) from error
        frame = pandas.DataFrame(list(self.rows), columns=list(self.columns))
        empty = [name for name in self.columns if frame[name].isna().all()]
        return frame.astype(dict.fromkeys(empty, "float64"))  # numbers that this run lacks are NaN, not objects

    def first(self, heads: Mapping[str, str]) -> list[list[str]]:
        """The first rows of some columns as text; an estimate stands with its interval."""
        at = {name: number for number, name in enumerate(self.columns)}
        return [[_shown(row[at[name]]) + _interval(row, at, name) for name in heads] for row in self.rows[:MOST_ROWS]]

    def to_html(self, heads: Mapping[str, str]) -> str:
        """The first rows of some columns, by their headings."""
        at = {name: number for number, name in enumerate(self.columns)}
        numeric = (all(_is_number(row[at[name]]) for row in self.rows) for name in heads)
        sides = ["right" if each else "left" for each in numeric]
        lines = ["".join(_html_cell("th", head, side) for head, side in zip(heads.values(), sides, strict=True))]
        lines += [
            "".join(_html_cell("td", text, side) for text, side in zip(row, sides, strict=True))
            for row in self.first(heads)
        ]
        body = "".join(f'<tr style="{_ROW}">{line}</tr>' for line in lines)
        return f'<table style="{_TABLE}">{body}</table>'


@dataclass(frozen=True)
class Sheet:
    """A result in brief, and its tables, the main one first.

    A notebook shows `title`, `lines` and the columns `heads` (column -> heading) of `shown`, else of the main table.
    `tone` is how alarming it is: critical, high, moderate, low or empty.
    """

    title: str
    tables: Mapping[str, Table]
    heads: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    shown: Table | None = None
    tone: str = ""

    @property
    def _main(self) -> Table:
        return self.shown or next(iter(self.tables.values()))

    @property
    def _left_out(self) -> str:
        count = len(self._main.rows)
        return f"{MOST_ROWS} of {count} rows. " if self.heads and count > MOST_ROWS else ""

    def to_text(self) -> str:
        """For print: title, lines and the first rows."""
        lines = [one_line(line, LONGEST_LINE) for line in (self.title, *self.lines[:MOST_LINES])]
        if self._main.rows and self.heads:
            rows = [[one_line(cell, LONGEST_CELL) for cell in row] for row in self._main.first(self.heads)]
            lines += ["", aligned([list(self.heads.values()), *rows], "  ")]
        names = ", ".join(f'to_frame("{name}")' for name in self.tables)
        return "\n".join([*lines, f"{self._left_out}Tables: {names}"])

    def to_html(self) -> str:
        table = self._main
        parts = [f"<div><strong>{html_text(self.title, LONGEST_LINE)}</strong></div>"]
        parts += [f"<div>{html_text(line, LONGEST_LINE)}</div>" for line in self.lines[:MOST_LINES]]
        if table.rows and self.heads:
            parts.append(table.to_html(self.heads))
        names = ", ".join(f'to_frame("{name}")' for name in self.tables)
        parts.append(f'<div style="{_QUIET}">{html_text(f"{self._left_out}Tables: {names}")}</div>')
        return f'<div style="{_BOX.format(_BORDERS[self.tone])}">{"".join(parts)}</div>'


class Tabular(ABC):
    """A result that notebooks show in brief, and whose rows are tables."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """What a notebook shows, and the tables by name."""

    def table(self, table: str | None = None) -> Table:
        """One of the tables; without a name the main one."""
        found = self.sheet().tables
        if table is not None and table not in found:
            raise unknown("table", table, found)
        return found[next(iter(found)) if table is None else table]

    def to_frame(self, table: str | None = None) -> DataFrame:
        """A table as a pandas data frame; without a name the main one. An unknown name lists those there are."""
        return self.table(table).to_frame()

    def to_csv(self, table: str | None = None) -> str:
        """The same table as the text of a CSV file."""
        return self.table(table).to_csv()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()

    def __str__(self) -> str:
        return self.sheet().to_text()


# -- columns and cells of typed values


def _plain(hint: Any) -> Any:
    """A type without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        left = [one for one in typing.get_args(hint) if one is not type(None)]
        return left[0] if len(left) == 1 else object
    return hint


def _inner(hint: Any) -> dict[str, Any] | None:
    """Fields of a nested value that get columns of their own; None for a single cell."""
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint) or hint is Site:
        return None
    return {name: _plain(kind) for name, kind in field_types(hint).items()}


def _columns(name: str, hint: Any) -> list[str]:
    if isinstance(hint, type) and issubclass(hint, Estimate):
        return [name, *(f"{name}_{end}" for end in _ENDS)]
    inner = _inner(hint)
    if inner is None:
        return [name]
    return [column for key, kind in inner.items() for column in _columns(f"{name}_{key}", kind)]


def _cells(hint: Any, value: Any) -> list[Any]:
    if isinstance(hint, type) and issubclass(hint, Estimate):
        return [None] * 4 if value is None else [value.value, *(getattr(value, end) for end in _ENDS)]
    inner = _inner(hint)
    if inner is None:
        return [str(value) if isinstance(value, Site) else value]
    return [
        cell for key, kind in inner.items() for cell in _cells(kind, None if value is None else getattr(value, key))
    ]


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return csv_cell(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else csv_cell(json.dumps(to_json(value)))


# -- HTML


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(member)}" for name, member in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_shown, value))
    return str(value)


def _interval(row: Sequence[Any], at: Mapping[str, int], name: str) -> str:
    """The interval of an estimate's value, where it has one."""
    if f"{name}_low" not in at or f"{name}_high" not in at or row[at[name]] is None:
        return ""
    low, high = (row[at[f"{name}_{end}"]] for end in ("low", "high"))
    return "" if low is None and high is None else f" [{_shown(low) or '...'}, {_shown(high) or '...'}]"


def _html_cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="{_CELL.format(side)}">{html_text(text, LONGEST_CELL)}</{tag}>'
