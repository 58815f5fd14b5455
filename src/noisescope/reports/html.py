"""A document as one HTML file that needs nothing else: no library, no font, no request.

Numbers come from the document as they are; only pixel positions, colours and the ticks of axes are worked out here.
The page is readable without JavaScript; the script adds sorting, filters, tooltips and the keyboard.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import math
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from noisescope.reports.chart_layout import LABEL, drawable, plot_bars, plot_curve
from noisescope.reports.document import Cell, Document, HeatMap, Table

LONG_TABLE = 8  # rows; above this a table gets a filter
TALL_TABLE = 20  # rows; above this a table scrolls in a box of its own
LONG_TEXT = 40  # letters; such a cell wraps, and keeps room to be read


def to_html(document: Document) -> str:
    """The page as text; the same document gives the same text."""
    page = _template().render(document=document).strip() + "\n"
    return page.encode("utf-8", "replace").decode()  # a lone surrogate could not be written to a file


@functools.cache
def _template() -> jinja2.Template:
    script = _asset("page.js")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals.update(
        style=Markup(_asset("page.css")),  # our own two files are all that is not escaped
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        kind=lambda block: type(block).__name__,
    )
    environment.globals.update(LONG_TABLE=LONG_TABLE, LONG_TEXT=LONG_TEXT, LABEL=LABEL, TALL_TABLE=TALL_TABLE)
    for function in (exact, numeric_columns, is_wordy, plot_bars, plot_curve, shade):
        environment.globals[function.__name__] = function
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return importlib.resources.files("noisescope.reports").joinpath("assets", name).read_text(encoding="utf-8")


# -- cells


def exact(value: float | None) -> str:
    """The number as JSON writes it, so that page and report can be compared."""
    return "" if value is None else repr(float(value))


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold bare numbers and are set to the right; never the first, which names the row."""
    columns = [[row[i] for row in table.rows if row[i].text] for i in range(len(table.head))]
    bare = [bool(cells) and all(c.value is not None and not c.interval for c in cells) for cells in columns]
    return [index > 0 and yes for index, yes in enumerate(bare)]


def is_wordy(table: Table) -> bool:
    """Whether most rows hold a sentence: a phone shows their cells one below the other."""
    sentences = [
        any(len(cell.text) > LONG_TEXT and " " in cell.text and cell.value is None for cell in row)
        for row in table.rows
    ]
    return 2 * sum(sentences) > len(sentences)


# -- heat map

# Viridis (van der Walt and Smith, matplotlib) in ten even steps: even in lightness, safe for the colour-blind.
RAMP = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Shades:
    """Colours of a heat map: (background, ink) of each cell that has a number; ends and decades of its legend."""

    cells: tuple[tuple[tuple[str, str] | None, ...], ...]
    least: str
    most: str
    decades: tuple[tuple[float, int], ...]  # (per cent of the ramp, exponent)
    gradient: str


def shade(heat: HeatMap) -> Shades:
    """By log10 of the value; what is not above zero gets the lowest colour."""
    positive = [c for row in heat.cells for c in row if c and (drawable(c.value) or 0.0) > 0]
    logs = [math.log10(cell.value) for cell in positive if cell.value]
    low, high = min(logs, default=0.0), max(logs, default=0.0)

    def paint(cell: Cell | None) -> tuple[str, str] | None:
        if cell is None or cell.value is None or math.isnan(cell.value):
            return None
        share = 0.0 if cell.value <= 0 else 1.0 if high == low else (math.log10(cell.value) - low) / (high - low)
        background = _colour(min(1.0, max(0.0, share)))
        return "#{:02x}{:02x}{:02x}".format(*background), ink(background)

    ordered = sorted(positive, key=lambda cell: cell.value or 0.0)
    inside = range(math.ceil(low), math.floor(high) + 1) if high > low else range(0)
    return Shades(
        tuple(tuple(paint(cell) for cell in row) for row in heat.cells),
        ordered[0].text if ordered else "",
        ordered[-1].text if ordered else "",
        tuple((100 * (decade - low) / (high - low), decade) for decade in inside),
        ", ".join(f"#{stop}" for stop in RAMP),
    )


def _colour(share: float) -> Colour:
    """A place on the ramp, 0 to 1, linear between its stops."""
    at = share * (len(RAMP) - 1)
    first = min(int(at), len(RAMP) - 2)
    below, above = (bytes.fromhex(RAMP[i]) for i in (first, first + 1))
    red, green, blue = (round(a + (b - a) * (at - first)) for a, b in zip(below, above, strict=True))
    return red, green, blue


def ink(background: Colour) -> str:
    """Black or white, whichever stands out more: never less than 4.58 : 1, the square root of 21."""
    light = luminance(background)
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"


def luminance(colour: Colour) -> float:
    """Relative luminance of sRGB, WCAG 2.2."""
    red, green, blue = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
