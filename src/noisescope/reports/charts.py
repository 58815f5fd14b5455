"""Charts, curves and heat maps of a document laid out as drawings, once for page, PDF and figures.

Every number comes from the document; only places, colours and the ticks of axes are worked out here. All fit a width
of 680 pixels, the text column of an A4 page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from noisescope.reports.axes import (
    LANE,
    LEFT,
    LOG_RATIO,
    RIGHT,
    WIDEST,
    WIDTH,
    Axis,
    axis_of,
    bar_shape,
    foot_of,
    grid,
    has_interval,
    interval_sign,
    known,
    labels_below,
    legend_of,
    linear_axis,
    log_axis,
    reach_of,
    tip_of,
    whisker,
)
from noisescope.reports.document import Bar, Cell, Chart, Curve, HeatMap
from noisescope.reports.drawing import Dot, Drawing, Line, Mark, Rect, Shape, Text, short, text_width
from noisescope.reports.heat_chart import draw_heat_map

Drawable: TypeAlias = Chart | Curve | HeatMap
DRAWABLE = (Chart, Curve, HeatMap)

HEIGHT = 190.0  # of the plot


def drawable(block: Drawable) -> bool:
    """Whether there is a number to draw; nothing empty is drawn."""
    return any(known(cell.value) is not None for cell in _cells(block))


def draw(block: Drawable, *, title: bool = False) -> Drawing:
    """A block as a drawing; with its title where nothing around it has one."""
    if isinstance(block, HeatMap):
        found = draw_heat_map(block)
    else:
        found = _chart(block) if isinstance(block, Chart) else _curve(block)
    if not title:
        return found
    head = Text(0, 15, short(block.title, 80), colour="text", size=14, bold=True)
    moved = tuple(_down(item, 28) for item in found.items)
    return replace(found, height=found.height + 28, items=(head, *moved))


def spoken(block: Drawable) -> str:
    """What a screen reader says in place of the picture."""
    if isinstance(block, HeatMap):
        return f"{block.title} ({block.unit}): the numbers are in the table below"
    bars = block.bars if isinstance(block, Chart) else [bar for _, bar in (*block.points, *block.marked)]
    said = (f"{bar.label} {bar.cell.text} {bar.mark}".strip() for bar in bars)
    return f"{block.title} ({block.unit}): {'; '.join(said)}"


def _cells(block: Drawable) -> Iterable[Cell]:
    if isinstance(block, HeatMap):
        return [cell for row in block.cells for cell in row if cell is not None]
    return [bar.cell for bar in (block.bars if isinstance(block, Chart) else _bars(block))]


def _bars(curve: Curve) -> list[Bar]:
    return [bar for _, bar in (*curve.points, *curve.marked)]


def _down(item: Mark | Shape, by: float) -> Mark | Shape:
    if isinstance(item, Shape):
        return replace(item, marks=tuple(_move(mark, by) for mark in item.marks))
    return _move(item, by)


def _move(mark: Mark, by: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, points=tuple((x, y + by) for x, y in mark.points))
    return replace(mark, y=mark.y + by)


# -- bars


def _chart(chart: Chart) -> Drawing:
    """Bars side by side with their intervals; on a log scale, where a bar has no foot, dots."""
    bars = chart.bars
    pitch = min(WIDEST, (WIDTH - LEFT - RIGHT) / max(1, len(bars)))
    centres = [LEFT + pitch * (i + 0.5) for i in range(len(bars))]
    extra = [("95 % interval", interval_sign)] if has_interval(bars) else []
    legend = legend_of((bar.cell.tone for bar in bars if known(bar.cell.value) is not None), extra)
    unit = Text(LEFT, foot_of(legend) + 10, short(chart.unit, 80), size=11)
    flags = [
        (i, centres[i], centres[i] + 8 + text_width(short(bar.mark, 40), 11)) for i, bar in enumerate(bars) if bar.mark
    ]
    lanes = lanes_of([(start, end) for _, start, end in flags])
    top = unit.y + 10 + LANE * (1 + max(lanes, default=-1))
    bottom = top + HEIGHT
    axis = axis_of(bars, bottom, top)
    foot = bottom if axis.log else axis.place(0.0)
    right = max(LEFT + pitch * len(bars), LEFT + 160)
    flag_of = {i: top - LANE * (lane + 1) + 6 for (i, _, _), lane in zip(flags, lanes, strict=True)}
    shapes = [
        bar_shape(bar, x, pitch, axis, (top, bottom, foot), flag_of.get(i))
        for i, (bar, x) in enumerate(zip(bars, centres, strict=True))
    ]
    labels, height = labels_below(centres, [bar.label for bar in bars], bottom)
    width = max(right + RIGHT, *(end + RIGHT for _, _, end in flags), text_width(chart.unit, 11) + LEFT, 240.0)
    items = (*legend, unit, *grid(axis, LEFT, right, foot), *shapes, *labels)
    return Drawing(max(width, reach_of(legend)), bottom + height, chart.title, items)


def lanes_of(flags: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each (start, end) of marks from left to right, 0 next to the plot.

    A mark's text stands right of its line, so each goes above every mark that starts under its text: no line then
    crosses a text.
    """
    lanes: list[int] = []
    for index in range(len(flags) - 1, -1, -1):
        under = [lane for lane, flag in zip(lanes, flags[index + 1 :], strict=True) if flag[0] <= flags[index][1] + 6]
        lanes.insert(0, 1 + max(under, default=-1))
    return lanes


# -- curves


def _curve(curve: Curve) -> Drawing:
    """Points over a number, joined by a line, and points of their own with a name beside them."""
    points = [(x, bar) for x, bar in curve.points if known(x) is not None]
    marked = [(x, bar) for x, bar in curve.marked if known(x) is not None]
    bars = [bar for _, bar in (*points, *marked)]
    extra: list[tuple[str, Callable[[float, float], Sequence[Mark]]]] = []
    extra += [(curve.line, lambda x, y: [Line(((x, y - 4), (x + 12, y - 4)), "none", 2)])] if curve.line else []
    extra += [("95 % interval", interval_sign)] if has_interval(bars) else []
    legend = legend_of({bar.cell.tone for bar in bars if known(bar.cell.value) is not None}, extra)
    unit = Text(LEFT, foot_of(legend) + 10, short(curve.unit, 80), size=11)
    top, right = unit.y + 12, WIDTH - 40
    bottom = top + HEIGHT
    axis = axis_of(bars, bottom, top, curve.limit)
    foot = bottom if axis.log else axis.place(0.0)
    across = _across([x for x, _ in (*points, *marked)] or [0.0], right)
    items: list[Mark | Shape] = [*legend, unit, *grid(axis, LEFT, right, foot)]
    items += [Text(across.place(x), bottom + 16, label, "middle") for x, label in across.ticks]
    items.append(Text(right, bottom + 34, short(curve.across, 80), "end", size=11))
    if curve.limit is not None:
        y = axis.place(curve.limit)
        items += [Line(((LEFT, y), (right, y)), "critical", 1.2, dashed=True), Text(right + 5, y + 4, "limit", size=11)]
    values = [(x, value) for x, bar in points if (value := known(bar.cell.value)) is not None]
    seen = tuple((across.place(x), axis.place(value)) for x, value in values)
    items += [Line(seen, "none", 2)] if len(seen) > 1 else []
    small = len(points) > 12  # a line of many points: the line is what is read
    items += [_point(bar, across.place(x), axis, (top, bottom), 2.0 if small else 4.5) for x, bar in points]
    items += _named(marked, across, axis, (top, bottom), right)
    return Drawing(WIDTH, bottom + 42, curve.title, tuple(items))


def _across(values: Sequence[float], right: float) -> Axis:
    """Noise levels may span decades and begin at 0, which then stands apart at the left."""
    positive = [value for value in values if value > 0]
    if positive and len(positive) > 2 and max(positive) / min(positive) >= LOG_RATIO and min(values) >= 0:
        zero = len(positive) < len(values)
        found = log_axis(min(positive), max(positive), LEFT + (70 if zero else 20), right - 20)
        place = found.place
        ticks = ((0.0, "0"), *found.ticks) if zero else found.ticks
        return Axis(lambda value: LEFT + 20 if value <= 0 else place(value), ticks, True)
    return linear_axis(values, LEFT + 20, right - 20)


def _point(bar: Bar, x: float, axis: Axis, frame: tuple[float, float], radius: float) -> Shape:
    value, tone = known(bar.cell.value), bar.cell.tone or "none"
    marks = list(whisker(bar, x, axis, *frame))
    if value is not None:
        y = axis.place(value)
        marks += [Rect(x - 12, y - 12, 24, 24, "card", hit=True), Dot(x, y, radius, tone, bar.undecided)]
    return Shape(tuple(marks), tip_of(bar), bar.cell.value)


def _named(
    marked: Sequence[tuple[float, Bar]], across: Axis, axis: Axis, frame: tuple[float, float], right: float
) -> list[Shape]:
    """Points with their labels beside them, none over another: upwards, for the line of the best runs below."""
    found: list[Shape] = []
    taken: list[tuple[float, float, float]] = []  # (left, right, baseline)
    for x, bar in sorted(marked, key=lambda point: known(point[1].cell.value) or 0.0):
        at, value = across.place(x), known(bar.cell.value)
        shape = _point(bar, at, axis, frame, 5.0)
        if value is not None:
            words = short(bar.label, 24)
            width = text_width(words, 11)
            fits = at + 9 + width <= right + 34
            left = at + 9 if fits else at - 9 - width
            y = axis.place(value) + 4
            while any(left < end and begin < left + width and abs(y - base) < 12 for begin, end, base in taken):
                y -= 2
            taken.append((left, left + width, y))
            label = Text(at + 9 if fits else at - 9, y, words, "start" if fits else "end", "text", 11)
            shape = replace(shape, marks=(*shape.marks, label))
        found.append(shape)
    return found
