"""Charts and curves in pixels, y downwards: where their bars, points, whiskers, marks and ticks go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from noisescope.reports.document import TONES, Bar, Chart, Curve

LEFT, TOP, HEIGHT, RIGHT = 64.0, 36.0, 220.0, 20.0  # the plot's margins and its height
LETTER = 6.6  # mean width of a letter at 12 px
LANE = 18.0  # height of a line of marks
ROTATION = math.radians(50)  # of labels that find no room side by side
LABEL = 16  # letters of a label that are drawn; the tooltip has them all

Ticks = tuple[tuple[float, str], ...]  # (pixel, label)


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
