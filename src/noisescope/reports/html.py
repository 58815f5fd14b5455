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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jinja2
from markupsafe import Markup

from noisescope.plain_text import visible
from noisescope.reports.document import TONES, Bar, Cell, Chart, Curve, Document, HeatMap, Table

LEFT, TOP, HEIGHT, RIGHT = 64.0, 36.0, 220.0, 20.0  # the plot's margins and its height
LETTER = 6.6  # mean width of a letter at 12 px
LANE = 18.0  # height of a line of marks
ROTATION = math.radians(50)  # of labels that find no room side by side
LABEL = 16  # letters of a label that are drawn; the tooltip has them all

Ticks = tuple[tuple[float, str], ...]  # (pixel, label)

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
        style=Markup(_asset("page.css")),  # our own two files are all that is not escaped
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        kind=lambda block: type(block).__name__,
    )
    environment.globals.update(LONG_TABLE=LONG_TABLE, LONG_TEXT=LONG_TEXT, LABEL=LABEL, TALL_TABLE=TALL_TABLE)
    for function in (exact, numeric_columns, is_wordy, plot_bars, plot_curve, shade):
        environment.globals[function.__name__] = function
    return environment.from_string(_asset("page.html.j2"))


def _visible(value: object) -> object:
    """Every text of the document; what is markup is ours."""
    return visible(value, keep="\n") if type(value) is str else value


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


# -- charts and curves in pixels, y downwards: where their bars, points, whiskers, marks and ticks go


@dataclass(frozen=True)
class Shape:
    """A bar or a point with its whisker. `y` is None where there is no value, `low` and `high` where no interval."""

    bar: Bar
    tip: str
    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    flag: float = 0.0  # y of its mark

    @property
    def summit(self) -> float:
        """Where the line from its mark ends."""
        return min((y for y in (self.y, self.high) if y is not None), default=self.flag + 24)


@dataclass(frozen=True)
class Plot:
    """A chart ready to be drawn."""

    width: float
    height: float
    right: float
    top: float
    bottom: float
    zero: float
    ticks: Ticks
    shapes: tuple[Shape, ...]
    pitch: float = 0.0  # from bar to bar
    rotated: bool = False  # whether the labels are
    across: Ticks = ()  # of a numeric x axis
    tones: tuple[str, ...] = ()  # those in use, for the legend
    left: float = LEFT
    limit: float | None = None  # y of a line that no point should pass


def plot_bars(chart: Chart) -> Plot:
    """Bars side by side, never closer than their rotated labels stand clear; a wide chart scrolls in its box."""
    pitch = max(15.0, min(48.0, 900 / max(1, len(chart.bars))))
    centres = [LEFT + pitch * (i + 0.5) for i in range(len(chart.bars))]
    flags = {i: centres[i] + 8 + LETTER * len(bar.mark) for i, bar in enumerate(chart.bars) if bar.mark}  # right ends
    lanes = _lanes([(centres[i], end) for i, end in flags.items()])
    top = TOP + LANE * (1 + max(lanes, default=-1))
    scale, ticks = _scale(chart.bars, top)
    shapes = [_shape(bar, x, scale, top) for bar, x in zip(chart.bars, centres, strict=True)]
    for index, lane in zip(flags, lanes, strict=True):
        shapes[index] = replace(shapes[index], flag=top - LANE * (lane + 1))
    longest = LETTER * min(LABEL, max((len(bar.label) for bar in chart.bars), default=0))
    rotated = longest > pitch - 6
    right = LEFT + pitch * len(chart.bars)
    return Plot(
        width=max(right, *flags.values(), 240.0) + RIGHT,
        height=top + HEIGHT + (longest * math.sin(ROTATION) + 20 if rotated else 28),
        right=right, top=top, bottom=top + HEIGHT, zero=scale(0.0), ticks=ticks, shapes=tuple(shapes), pitch=pitch,
        rotated=rotated, tones=tuple(t for t in TONES if t and any(bar.cell.tone == t for bar in chart.bars)),
    )  # fmt: skip


def plot_curve(curve: Curve) -> Plot:
    """Points over a numeric axis, joined by a line."""
    points = [(x, bar) for x, bar in curve.points if drawable(x) is not None]
    scale, ticks = _scale([bar for _, bar in points], TOP, curve.limit)
    steps = _steps([x for x, _ in points] or [0.0])
    right = LEFT + 620
    pixels_a_unit = (right - LEFT - 40) / (steps[-1] - steps[0])

    def along(x: float) -> float:
        return LEFT + 20 + (x - steps[0]) * pixels_a_unit

    return Plot(
        width=right + 2 * RIGHT, height=TOP + HEIGHT + 48, right=right, top=TOP, bottom=TOP + HEIGHT, zero=scale(0.0),
        ticks=ticks, shapes=tuple(_shape(bar, along(x), scale, TOP) for x, bar in points),
        across=tuple((along(x), f"{x:g}") for x in steps), limit=None if curve.limit is None else scale(curve.limit),
    )  # fmt: skip


def _shape(bar: Bar, x: float, scale: Callable[[float], float], top: float) -> Shape:
    """An end of the interval that is not known lies beyond the plot: its whisker runs to the edge."""
    lines = (bar.label, bar.cell.text, bar.mark, bar.cell.tone and f"colour: {bar.cell.tone}")
    shape = Shape(bar, "\n".join(line for line in lines if line), x, None)
    value, low, high = (drawable(number) for number in (bar.cell.value, bar.low, bar.high))
    if value is not None:
        shape = replace(shape, y=scale(value))
        if low is not None or high is not None:
            ends = top + HEIGHT if low is None else scale(low), top if high is None else scale(high)
            shape = replace(shape, low=ends[0], high=ends[1])
    return shape


def _scale(bars: Iterable[Bar], top: float, limit: float | None = None) -> tuple[Callable[[float], float], Ticks]:
    """From value to pixel, with room for every whisker, for zero and the limit; and the ticks."""
    known = [limit, *(n for bar in bars for n in (bar.cell.value, bar.low, bar.high))]
    steps = _steps([0.0, *(n for n in known if drawable(n) is not None and n is not None)])

    def scale(value: float) -> float:
        return top + HEIGHT * (steps[-1] - value) / (steps[-1] - steps[0])

    return scale, tuple((scale(step), f"{step:g}") for step in steps)


def _steps(values: Sequence[float]) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) around the values, about five."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: from it to zero
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-290:
        low, high = 0.0, 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= 5)
    return [step * k for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def drawable(value: float | None) -> float | None:
    """None for what has no pixel: NaN, infinity, and numbers whose difference would overflow."""
    return value if value is not None and abs(value) < 1e290 else None


def _lanes(flags: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each (start, end) of marks from left to right, 0 next to the plot.

    A mark's text stands right of its line, so each goes above every mark that starts under its text: no line then
    crosses a text.
    """
    lanes: list[int] = []
    for index in range(len(flags) - 1, -1, -1):
        under = [lane for lane, flag in zip(lanes, flags[index + 1 :], strict=True) if flag[0] <= flags[index][1] + 6]
        lanes.insert(0, 1 + max(under, default=-1))
    return lanes
