"""Rows as tables: columns from types, safe CSV, short and safe HTML, data frames where pandas is there."""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import dataclass

import pytest

from noisescope.errors import InvalidInput, MissingExtra
from noisescope.estimate import Estimate
from noisescope.sites import Site
from noisescope.tables import MOST_ROWS, Sheet, Table, Tabular

HOSTILE = "<script>alert('x')</script>\x1b[31m\u202e"


@dataclass(frozen=True)
class Inner:
    size: Estimate | None
    word: str


@dataclass(frozen=True)
class Row:
    name: str
    loss: Estimate | None
    inner: Inner | None
    layers: tuple[int, ...]
    site: Site
    fine: bool = True


ROWS = (
    Row("=1+1", Estimate(0.25, 0.125, None, 8), Inner(None, "a"), (3, 4), Site("linear", 3, "layers.3.q")),
    Row(HOSTILE, None, None, (), Site("softmax", 0, "layers.0"), fine=False),
)


class Found(Tabular):
    def __init__(self, rows: tuple[Row, ...] = ROWS) -> None:
        self.rows = rows

    def sheet(self) -> Sheet:
        main = Table.of(Row, self.rows)
        return Sheet(f"title {HOSTILE}", {"rows": main, "none": Table(("a",), ())}, {"name": "who", "loss": "lost"})


def test_columns_come_from_the_types() -> None:
    """So they are the same where a value is missing; an estimate has four, a nested value its own."""
    table = Table.of(Row, ROWS)
    inner = ("inner_size", "inner_size_low", "inner_size_high", "inner_size_n", "inner_word")
    loss = ("loss", "loss_low", "loss_high", "loss_n")
    assert table.columns == ("name", *loss, *inner, "layers", "site", "fine")
    assert table.columns == Table.of(Row, ()).columns
    assert table.rows[0][1:5] == (0.25, 0.125, None, 8) and table.rows[1][1:10] == (None,) * 9
    assert table.rows[0][-2] == str(ROWS[0].site)
    assert "loss" not in Table.of(Row, ROWS, without=("loss",)).columns


def test_csv_is_read_back_and_holds_no_formula() -> None:
    """Control characters are escapes, lists are JSON, what is missing is empty."""
    first, second = csv.DictReader(io.StringIO(Found().to_csv(), newline=""))
    assert (first["name"], first["loss"], first["loss_high"], first["layers"]) == ("'=1+1", "0.25", "", "[3, 4]")
    assert first["fine"] == "true" and "\\x1b" in second["name"] and "\x1b" not in Found().to_csv()


def test_html_is_short_and_escaped() -> None:
    """No markup of the data, no script, no style sheet, and an interval beside its estimate."""
    html = Found()._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html and "\x1b" not in html and "\u202e" not in html
    assert "0.25 [0.125, ...]" in html and "who" in html and "to_frame(&quot;none&quot;)" in html
    assert set(re.findall(r"</?(\w+)", html)) == {"div", "strong", "table", "tr", "th", "td"}
    assert not re.search(r"(?<![-\w])(color|background)", html)  # the notebook's own, light or dark
    many = Found(ROWS * 20)._repr_html_()
    assert many.count("<tr") == 1 + MOST_ROWS and f"{MOST_ROWS} of 40 rows" in many and len(many) < 6000


def test_a_frame_has_numbers_where_nothing_was_measured() -> None:
    pandas = pytest.importorskip("pandas")
    frame = Found().to_frame()
    assert isinstance(frame, pandas.DataFrame) and frame["loss"].dtype == frame["inner_size"].dtype == "float64"
    assert frame["layers"].tolist() == [(3, 4), ()] and Found().to_frame("none").empty


def test_without_pandas_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'noisescope[pandas]'")):
        Found().to_frame()
    assert Found().to_csv().startswith("name,loss")


def test_an_unknown_table_lists_those_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"unknown table 'row'.*rows, none"):
        Found().to_frame("row")


def test_print_shows_what_a_notebook_shows() -> None:
    """Title, the first rows under their headings, and the tables there are; nothing of it can write to a terminal."""
    shown = str(Found())
    lines = shown.splitlines()
    assert lines[0].startswith("title ") and lines[2].split() == ["who", "lost"]
    assert "0.25 [0.125, ...]" in lines[3] and lines[-1] == 'Tables: to_frame("rows"), to_frame("none")'
    assert "8 of 20 rows" in str(Found(ROWS * 10)) and "Row(" not in shown and "\x1b" not in shown
