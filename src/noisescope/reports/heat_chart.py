"""A heat map laid out: layers run to the right, operators stand below each other, and above what each layer does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from noisescope.reports.axes import (
    LABEL,
    LANE,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    axis_of,
    bar_shape,
    foot_of,
    grid,
    known,
    labels_below,
    reach_of,
)
from noisescope.reports.document import TONES, Cell, HeatMap
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
