"""Charts, curves and heat maps of a document laid out as drawings, once for page, PDF and figures.

Every number comes from the document; only places, colours and the ticks of axes are worked out here. All fit a width
of 680 pixels, the text column of an A4 page. In a heat map layers run to the right, operators stand below each other,
and above stands what each layer does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from noisescope.reports.axes import (
    LABEL,
    LANE,
    LEFT,
    LOG_RATIO,
    RIGHT,
    TOP,
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
from noisescope.reports.document import TONES, Bar, Cell, Chart, Curve, HeatMap
from noisescope.reports.drawing import SIZE, Dot, Drawing, Line, Mark, Rect, Shape, Text, short, text_width
from noisescope.reports.palette import STEPS

STRIP = 96.0  # height of the row of layers above a heat map
CELL = (40.0, 22.0)  # the largest cell
GAP = 0.6  # cells between the layers and other places


@dataclass(frozen=True)
class Scale:
    """Of a heat map: the logarithms of its least and its largest value, and their texts."""

    low: float
    high: float
    least: str
    most: str

    def step(self, cell: Cell | None) -> int | None:
        """The step of the ramp, 0 to STEPS - 1; the lowest for what is not above zero, None without a number."""
        value = None if cell is None else known(cell.value)
        if value is None:
            return None
        if value <= 0:
            return 0
        share = 1.0 if self.high == self.low else (math.log10(value) - self.low) / (self.high - self.low)
        return min(STEPS - 1, int(share * STEPS))


def scale_of(heat: HeatMap) -> Scale:
    positive = [c for row in heat.cells for c in row if c and (known(c.value) or 0.0) > 0]
    ordered = sorted(positive, key=lambda cell: cell.value or 0.0)
    if not ordered:
        return Scale(0.0, 0.0, "", "")
    ends = ordered[0], ordered[-1]
    low, high = (math.log10(cell.value or 1.0) for cell in ends)
    return Scale(low, high, ends[0].shown, ends[1].shown)


def draw_heat_map(heat: HeatMap) -> Drawing:
    left = min(140.0, max(LEFT, 14 + max((text_width(short(name, LABEL)) for name in heat.columns), default=0.0)))
    others = heat.strip[len(heat.rows) :]  # places that are no rows, after a gap
    gap = GAP if others else 0.0
    pitch = min(CELL[0], (WIDTH - left - RIGHT) / max(1, len(heat.rows) + len(others) + gap))
    centres = [left + pitch * (i + 0.5) for i in range(len(heat.rows))]
    centres += [left + pitch * (len(heat.rows) + gap + i + 0.5) for i in range(len(others))]
    right = max([left, *(x + pitch / 2 for x in centres)])
    items: list[Mark | Shape] = []
    y = TOP
    if heat.strip:
        items += _strip(heat, centres, pitch, left, right)
        y += STRIP + 2 * LANE
    title = Text(left, y + 11, short(f"{heat.title}, {heat.unit}", 90), size=11)
    items.append(title)
    y += LANE
    scale = scale_of(heat)
    for at, name in enumerate(heat.columns):
        items.append(Text(left - 8, y + CELL[1] * (at + 0.5) + 4, short(name, LABEL), "end"))
        items += [_cell(heat, row, at, scale, (centres[row], y + CELL[1] * at, pitch)) for row in range(len(heat.rows))]
    bottom = y + CELL[1] * len(heat.columns)
    reach = left + text_width(
        title.text, title.size
    )  # names stand right below their points where the title ends before
    beside = bool(others) and reach < centres[len(heat.rows)] - pitch / 2 - 8
    for x, bar in zip(centres[len(heat.rows) :], others, strict=True):
        items.append(Text(x + 4, y + 2 - (LANE + LANE - 6) * beside, short(bar.label, LABEL), "end", turn=90.0))
    labels, height = labels_below(centres[: len(heat.rows)], heat.rows, bottom, left)
    foot = _ramp(heat, scale, left, bottom + height + 4)
    return Drawing(max(right + RIGHT, reach_of(foot)), foot_of(foot), heat.title, (*items, *labels, *foot))


def _strip(heat: HeatMap, centres: Sequence[float], pitch: float, left: float, right: float) -> list[Mark | Shape]:
    """One dot or bar for each layer with its interval, over the column of the layer."""
    top = TOP + LANE
    bottom = top + STRIP
    axis = axis_of(heat.strip, bottom, top)
    foot = bottom if axis.log else axis.place(0.0)
    found: list[Mark | Shape] = [Text(left, TOP + 8, short(heat.strip_title, 100), size=11)]
    found += grid(axis, left, right, foot)
    frame = (top, bottom, foot)
    found += [bar_shape(bar, x, pitch, axis, frame, None) for bar, x in zip(heat.strip, centres, strict=True)]
    return found


def _cell(heat: HeatMap, row: int, column: int, scale: Scale, place: tuple[float, float, float]) -> Shape:
    x, y, pitch = place
    cell, name = heat.cells[row][column], f"{heat.rows[row]}, {heat.columns[column]}"
    step = scale.step(cell)
    gap = 1.5 if pitch > 8 else 0.5
    if cell is None or step is None:
        words = "no such site" if cell is None else cell.text or "no value"
        mark: Mark = Line(((x - pitch / 4, y + CELL[1] / 2), (x + pitch / 4, y + CELL[1] / 2)), "line", 1.5)
        hit = Rect(x - pitch / 2, y, pitch, CELL[1], "card", hit=True)
        return Shape((hit, mark), f"{name}\n{words}", row=column + 1)
    box = Rect(x - pitch / 2 + gap / 2, y + gap / 2, pitch - gap, CELL[1] - gap, f"heat-{step}")
    star = [Dot(x, y + CELL[1] / 2, min(2.2, pitch / 5), f"heat-ink-{step}")] if cell.starred else []
    hit = replace(box, hit=True)
    note = heat.notes[row][column]
    tip = "\n".join(line for line in (name, f"{cell.text} {heat.unit}", note) if line)
    return Shape((box, *star, hit), tip, row=column + 1)


def _ramp(heat: HeatMap, scale: Scale, left: float, y: float) -> list[Mark]:
    """The colours from the least to the largest value, and what a dot means."""
    marks: list[Mark] = []
    if scale.most:
        marks.append(Text(left, y + 10, scale.least, size=11))
        x = left + text_width(scale.least, 11) + 6
        marks += [Rect(x + 12 * step, y, 12, 11, f"heat-{step}") for step in range(STEPS)]
        marks.append(Text(x + 12 * STEPS + 6, y + 10, f"{scale.most} {short(heat.unit, 40)} (log scale)", size=11))
    tones = [t for t in TONES if t and any(bar.cell.tone == t for bar in heat.strip)]
    if tones:
        y += LANE if marks else 0.0
        x = left
        for tone in tones:
            words = f"{tone} loss"
            marks += [Dot(x + 4, y + 6, 4, tone), Text(x + 14, y + 10, words, size=11)]
            x += 30 + text_width(words, 11)
    starred = any(cell and cell.starred for row in heat.cells for cell in row)
    if starred and heat.legend:
        y += LANE if marks else 0.0
        marks += [Dot(left + 4, y + 6, 2.4, "text"), Text(left + 14, y + 10, short(heat.legend, 96), size=11)]
    return marks or [Text(left, y + 10, "no values", size=SIZE)]


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
    said = (f"{bar.label} {bar.cell.text} {bar.mark}".strip() for bar in _bars(block))
    return f"{block.title} ({block.unit}): {'; '.join(said)}"


def _cells(block: Drawable) -> Iterable[Cell]:
    if isinstance(block, HeatMap):
        return [cell for row in block.cells for cell in row if cell is not None]
    return [bar.cell for bar in _bars(block)]


def _bars(block: Chart | Curve) -> Sequence[Bar]:
    return block.bars if isinstance(block, Chart) else [bar for _, bar in (*block.points, *block.marked)]


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
