"""A document as one HTML file that needs nothing else: no library, no font, no request.

The page is readable without JavaScript; the script adds sorting, filters, tooltips, copying and the keyboard.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources

import jinja2
from markupsafe import Markup

from noisescope.reports import palette
from noisescope.reports.charts import draw, drawable, scale_of
from noisescope.reports.document import Document, Table, numeric_columns
from noisescope.reports.figure_files import inline_svg
from noisescope.text_escaping import visible

LONG_TABLE = 8  # rows; above this a table gets a filter
TALL_TABLE = 20  # rows; above this a table scrolls in a box of its own
LONG_TEXT = 40  # letters; such a cell wraps, and keeps room to be read


def to_html(document: Document) -> str:
    """The page as text; the same document gives the same text."""
    return _template().render(document=document).strip() + "\n"


@functools.cache
def _template() -> jinja2.Template:
    script = _asset("page.js")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_visible
    )
    environment.globals.update(
        style=Markup(palette.css() + _asset("page.css")),  # our own files and drawings are all that is not escaped
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        kind=lambda block: type(block).__name__,
        picture=lambda block: inline_svg(draw(block)),
    )
    environment.globals.update(LONG_TABLE=LONG_TABLE, LONG_TEXT=LONG_TEXT, TALL_TABLE=TALL_TABLE)
    for function in (drawable, exact, numeric_columns, is_wordy, scale_of):
        environment.globals[function.__name__] = function
    return environment.from_string(_asset("page.html.j2"))


def _visible(value: object) -> object:
    """Every text of the document; what is markup is ours."""
    return visible(value, keep="\n") if type(value) is str else value


def _asset(name: str) -> str:
    return importlib.resources.files("noisescope.reports").joinpath("assets", name).read_text(encoding="utf-8")


def exact(value: float | None) -> str:
    """The number as JSON writes it, so that page and report can be compared."""
    return "" if value is None else repr(float(value))


def is_wordy(table: Table) -> bool:
    """Whether most rows hold a sentence: a phone shows their cells one below the other."""
    sentences = [
        any(len(cell.text) > LONG_TEXT and " " in cell.text and cell.value is None for cell in row)
        for row in table.rows
    ]
    return 2 * sum(sentences) > len(sentences)
