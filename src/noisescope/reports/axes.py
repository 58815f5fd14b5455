"""What charts have in common: scales with round ticks, intervals, legends, labels that find room, one bar.

Pixels, y downwards. Everything fits a width of 680, the text column of an A4 page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from noisescope.reports.document import TONES, Bar
from noisescope.reports.drawing import Dot, Line, Mark, Rect, Shape, Text, short, text_width

WIDTH = 680.0
LEFT, RIGHT, TOP = 64.0, 16.0, 8.0
LANE = 17.0  # height of a line of text
TURN = 50.0  # degrees: of labels that find no room side by side
LABEL = 16  # letters of a label that are drawn; the tip has them all
WIDEST = 48.0  # from bar to bar
NARROW = 13.0  # from one turned label to the next
LOG_RATIO = 30.0  # largest value or upper end over the smallest value: from here on a log scale


@dataclass(frozen=True)
class Axis:
    """From value to pixel, with the ticks; `log` where values span decades."""

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]  # (value, label)
    log: bool = False


def known(value: float | None) -> float | None:
    """None for what has no pixel: NaN, infinity, and numbers whose difference would overflow."""
    return value if value is not None and abs(value) < 1e290 else None


def axis_of(bars: Iterable[Bar], start: float, end: float, limit: float | None = None) -> Axis:
    """With room for every whisker, for zero and for a limit; from pixel `start` (the least) to `end`."""
    bars = list(bars)
    values = [value for bar in bars if (value := known(bar.cell.value)) is not None]
    lows = [low for bar in bars if (low := known(bar.low)) is not None]
    highs = [high for bar in bars if (high := known(bar.high)) is not None]
    if values and min(values) > 0 and max(*values, *highs, 0) / min(values) >= LOG_RATIO and min(lows, default=0) >= 0:
        ends = [*values, *highs, *(low for low in lows if low > 0), *([limit] if limit and limit > 0 else [])]
        return log_axis(max(min(ends), min(values) / 1000), max(ends), start, end)
    return linear_axis([0.0, *values, *lows, *highs, *([] if limit is None else [limit])], start, end)


def linear_axis(values: Sequence[float], start: float, end: float) -> Axis:
    steps = round_steps(values)
    pixels = (end - start) / (steps[-1] - steps[0])
    return Axis(lambda value: start + (value - steps[0]) * pixels, tuple((step, f"{step:g}") for step in steps))


def log_axis(least: float, most: float, start: float, end: float) -> Axis:
    low, high = math.floor(math.log10(least) + 1e-9), math.ceil(math.log10(most) - 1e-9)
    high = max(high, low + 1)
    pixels = (end - start) / (high - low)
    every = math.ceil((high - low) / 6)
    ticks = tuple((10.0**power, f"{10.0**power:g}") for power in range(low, high + 1, every))

    def place(value: float) -> float:  # what lies below the axis stands on it
        return start + (max(math.log10(value), low) - low) * pixels if value > 0 else start

    return Axis(place, ticks, True)


def round_steps(values: Sequence[float]) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) around the values, about five."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: from it to zero
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-290:
        low, high = 0.0, 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= 5)
    return [step * k for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def grid(axis: Axis, left: float, right: float, foot: float) -> list[Mark]:
    """Lines across the plot with their labels; zero, or the foot of a log scale, is darker."""
    marks: list[Mark] = []
    for value, label in axis.ticks:
        y = axis.place(value)
        marks.append(Line(((left, y), (right, y)), "line"))
        marks.append(Text(left - 8, y + 4, label, "end", size=11))
    marks.append(Line(((left, foot), (right, foot)), "muted"))
    return marks


def whisker(bar: Bar, x: float, axis: Axis, top: float, bottom: float) -> list[Mark]:
    """The 95 % interval: capped where an end is known, dashed to the edge of the plot where it is open."""
    value, ends = known(bar.cell.value), (known(bar.low), known(bar.high))
    if value is None or ends == (None, None):
        return []
    marks: list[Mark] = []
    for end, edge in zip(ends, (bottom, top), strict=True):
        y = edge if end is None else axis.place(end)
        marks.append(Line(((x, axis.place(value)), (x, y)), "text", 1.3, dashed=end is None))
        if end is not None:
            marks.append(Line(((x - 3.5, y), (x + 3.5, y)), "text", 1.3))
    return marks


def tip_of(bar: Bar, unit: str = "") -> str:
    shown = f"{bar.cell.text} {unit}".strip()
    lines = (bar.label, shown, bar.mark, bar.cell.tone and f"colour: {bar.cell.tone}")
    return "\n".join(line for line in lines if line)


Sign: TypeAlias = Callable[[float, float], Sequence[Mark]]


def legend_of(tones: Iterable[str], extra: Sequence[tuple[str, Sign]]) -> list[Mark]:
    """Swatches of the tones in use and other signs, in lines from the top left, each with its words."""
    shown = set(tones)
    entries = [(tone, _swatch(tone)) for tone in TONES if tone and tone in shown]
    marks: list[Mark] = []
    x, y = LEFT, TOP + 10
    for words, sign in (*entries, *extra):
        width = 16 + text_width(words, 11)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x, y = LEFT, y + LANE
        marks += [*sign(x, y), Text(x + 17, y, short(words, 90), size=11)]
        x += width + 16
    return marks


def _swatch(tone: str) -> Sign:
    return lambda x, y: [Rect(x, y - 9, 10, 10, tone)]


def interval_sign(x: float, y: float) -> list[Mark]:
    stem = Line(((x + 5, y - 10), (x + 5, y + 1)), "text", 1.3)
    return [stem, *(Line(((x + 2, y + at), (x + 8, y + at)), "text", 1.3) for at in (-10, 1))]


def foot_of(marks: Sequence[Mark]) -> float:
    """Where a legend ends."""
    return max((mark.y + 8 for mark in marks if isinstance(mark, Text)), default=TOP)


def has_interval(bars: Iterable[Bar]) -> bool:
    return any(known(bar.low) is not None or known(bar.high) is not None for bar in bars)


def labels_of(names: Sequence[str]) -> tuple[list[str], str]:
    """Labels under an axis, and the first word if all share one ("layer 0", "layer 1")."""
    labels = [short(name, LABEL) for name in names]
    first = names[0].partition(" ")[0] + " " if len(names) > 1 else ""
    if len(first) > 1 and all(name.startswith(first) and name != first for name in names):
        return [short(name.removeprefix(first), LABEL) for name in names], first.strip()
    return labels, ""


def labels_below(
    centres: Sequence[float], names: Sequence[str], y: float, left: float = LEFT
) -> tuple[list[Mark], float]:
    """Labels under the plot, some left out where they find no room, and the height they take."""
    labels, shared = labels_of(names)
    pitch = centres[1] - centres[0] if len(centres) > 1 else WIDEST * 2
    longest = max(map(text_width, labels), default=0.0)
    flat = longest <= pitch - 4 or (shared and longest < 30)
    room = longest + 6 if flat else NARROW
    step = max(1, math.ceil(room / pitch)) if pitch < room else 1
    marks: list[Mark] = []
    for x, label in list(zip(centres, labels, strict=True))[::step]:
        marks.append(Text(x, y + 16, label, "middle") if flat else Text(x + 4, y + 14, label, "end", turn=TURN))
    height = 22.0 if flat else longest * math.sin(math.radians(TURN)) + 24
    if shared:
        marks.append(Text(left - 8, y + 16, shared, "end"))
    return marks, height


def reach_of(legend: Sequence[Mark]) -> float:
    ends = [mark.x + text_width(mark.text, mark.size) + RIGHT for mark in legend if isinstance(mark, Text)]
    return max(ends, default=0.0)


def bar_shape(
    bar: Bar, x: float, pitch: float, axis: Axis, frame: tuple[float, float, float], flag: float | None
) -> Shape:
    top, bottom, foot = frame
    value, tone = known(bar.cell.value), bar.cell.tone or "none"
    marks: list[Mark] = [Rect(x - pitch / 2, top, pitch, bottom - top, "card", hit=True)]
    summit = foot
    if value is not None:
        y = axis.place(value)
        if axis.log:
            marks += [*whisker(bar, x, axis, top, bottom), Dot(x, y, min(4.5, pitch / 2.5), tone)]
        else:
            marks.append(Rect(x - pitch * 0.31, min(y, foot), pitch * 0.62, max(abs(foot - y), 1.5), tone))
            marks += whisker(bar, x, axis, top, bottom)
        high = known(bar.high)
        summit = min(y, y if high is None else axis.place(high))
    if flag is not None:
        marks.append(Line(((x, flag - 8), (x, max(summit - 3, flag))), "muted", dashed=True))
        marks.append(Text(x + 5, flag, short(bar.mark, 40), colour="text", size=11, bold=not bar.undecided))
    return Shape(tuple(marks), tip_of(bar), bar.cell.value)
