"""Charts as drawings: every number of the document at its place, nothing over anything else, nothing outside."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.reports import charts, palette
from noisescope.reports.axes import NARROW, TURN, WIDTH, linear_axis, round_steps
from noisescope.reports.charts import Drawable, draw, drawable, scale_of, spoken
from noisescope.reports.document import Bar, Cell, Chart, Curve, HeatMap
from noisescope.reports.drawing import Dot, Drawing, Line, Rect, Shape, Text, text_width

OPERATORS = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual")
BARS = (
    Bar("L0-2", Cell("20 %", 0.2, "critical"), -0.01, 0.42, "avalanche point"),
    Bar("L1-3", Cell("0 %", 0.0, "low"), -0.19, 0.16),
    Bar("L2-4", Cell("5 %", 0.05, "moderate"), None, None, "avalanche point (borderline)", undecided=True),
    Bar("L3-5", Cell("12 %", 0.12, "high"), 0.1, None),
    Bar("L4-6", Cell("not measurable", None, "unsure")),
)
CHART = Chart("windows-chart", "Accuracy lost by window", "share of the accuracy", BARS)


def heat(*rows: tuple[Cell | None, ...], strip: tuple[Bar, ...] = ()) -> HeatMap:
    names = tuple(f"layer {number}" for number in range(len(rows)))
    columns = OPERATORS[: len(rows[0])] if rows else ()
    notes = (("a note",) * len(columns),) * len(rows)
    return HeatMap("map", "Divergence", "nats", names, columns, rows, notes, "injected", strip, "By layer")


MAP = heat(
    (Cell("0.5", 0.5, starred=True), Cell("1e-05", 1e-5), None),
    (Cell("0", 0.0), Cell("", None), Cell("0.003", 0.003, starred=True)),
)


def curve(*values: tuple[float, float], **more: object) -> Curve:
    points = tuple((x, Bar(f"{x:g}", Cell(f"{y:g}", y), y * 0.9, y * 1.1)) for x, y in values)
    return replace(Curve("k", "Curve", "noise", "accuracy", points), **more)  # type: ignore[arg-type]


def shapes(drawing: Drawing) -> list[Shape]:
    return [item for item in drawing.items if isinstance(item, Shape)]


def fills(shape: Shape) -> list[Rect]:
    return [mark for mark in shape.marks if isinstance(mark, Rect) and not mark.hit]


def texts(drawing: Drawing) -> list[str]:
    return [mark.text for mark in drawing.marks() if isinstance(mark, Text)]


def verticals(shape: Shape) -> list[Line]:
    lines = (mark for mark in shape.marks if isinstance(mark, Line) and mark.colour == "text")
    return [line for line in lines if line.points[0][0] == line.points[1][0]]


def value_at(drawing: Drawing, y: float) -> float:
    """The value at a pixel, read off the labels of a linear axis."""
    labels = [mark for mark in drawing.marks() if isinstance(mark, Text) and mark.anchor == "end" and mark.x < 60]
    ticks = [(mark.y - 4, float(mark.text)) for mark in labels if mark.text.replace(".", "").lstrip("-").isdigit()]
    (first, low), (last, high) = ticks[0], ticks[-1]
    return low + (y - first) * (high - low) / (last - first)


# -- bars


def test_bars_have_the_values_and_the_tones_of_the_document() -> None:
    """Read off the axis; what has no value has no bar, and its tip says why."""
    drawing = draw(CHART)
    boxes = [fills(shape) for shape in shapes(drawing)]
    tops = [value_at(drawing, box.y) for (box,) in boxes[:4]]
    assert tops == pytest.approx([0.2, 0.0, 0.05, 0.12], abs=0.005)
    assert [box.fill for (box,) in boxes[:4]] == ["critical", "low", "moderate", "high"]
    assert boxes[4] == [] and "not measurable" in shapes(drawing)[4].tip
    assert [shape.value for shape in shapes(drawing)] == [bar.cell.value for bar in BARS]


def test_intervals_reach_exactly_to_their_ends() -> None:
    """Capped where an end is known, dashed to the edge where it is open, none where there is no interval."""
    drawing = draw(CHART)
    first, _, bare, opened, _ = shapes(drawing)
    ends = [value_at(drawing, line.points[1][1]) for line in verticals(first)]
    assert ends == pytest.approx([-0.01, 0.42], abs=0.003) and not any(line.dashed for line in verticals(first))
    assert verticals(bare) == []
    assert [line.dashed for line in verticals(opened)] == [False, True]
    top = min(shape.marks[0].y for shape in shapes(drawing) if isinstance(shape.marks[0], Rect))
    assert verticals(opened)[1].points[1][1] == top


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3), st.floats(0, 1e3)), min_size=1, max_size=40))
def test_values_are_to_scale_and_inside(rows: list[tuple[float, float, float]]) -> None:
    """Pixels are a straight line of values between the ends of the axis, which holds zero."""
    bars = [Bar(f"b{i}", Cell("", v), v - down, v + up) for i, (v, down, up) in enumerate(rows)]
    axis = linear_axis([0.0, *(n for bar in bars for n in (bar.low or 0.0, bar.high or 0.0))], 200.0, 10.0)
    for bar in bars:
        for value in (bar.cell.value, bar.low, bar.high):
            assert value is not None and 10.0 - 1e-6 <= axis.place(value) <= 200.0 + 1e-6
    one, two = axis.ticks[0][0], axis.ticks[-1][0]
    assert axis.place((one + two) / 2) == pytest.approx(105.0)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e280, max_value=1e280), min_size=1))
def test_ticks_hold_all_values(values: list[float]) -> None:
    """Rising round numbers, few of them, from below the least value to above the largest."""
    steps = round_steps(values)
    assert 2 <= len(steps) <= 8 and all(a < b for a, b in itertools.pairwise(steps))
    slack = 1e-9 * max(map(abs, [*values, 1e-280]))
    assert steps[0] <= min(values) + slack and steps[-1] >= max(values) - slack


def test_divergences_over_decades_are_dots_on_a_log_scale() -> None:
    """A bar on a linear axis would hide all but one, and on a log scale it has no foot; a loss below 0 stays linear."""
    bars = tuple(Bar(f"L{n}", Cell("", 10.0**-n), 0.0, 20.0**-n) for n in range(1, 6))
    found = shapes(draw(Chart("c", "t", "nats", bars)))
    dots = [mark for shape in found for mark in shape.marks if isinstance(mark, Dot)]
    assert len(dots) == 5 and not any(fills(shape) for shape in found)
    steps = [b.y - a.y for a, b in pairwise(dots)]
    assert max(steps) == pytest.approx(min(steps)) and steps[0] > 10
    alike = tuple(Bar(f"L{n}", Cell("", 0.02), 0.001, 0.05 * 10**n) for n in range(3))  # the intervals differ
    assert not any(fills(shape) for shape in shapes(draw(Chart("c", "t", "nats", alike))))
    losses = tuple(replace(bar, low=-0.1) for bar in bars)
    assert all(fills(shape) for shape in shapes(draw(Chart("c", "t", "share", losses))))


def test_marks_have_words_and_a_line() -> None:
    """Decided ones are bold, borderline ones are not."""
    found = {
        mark.text: mark.bold for mark in draw(CHART).marks() if isinstance(mark, Text) and "avalanche" in mark.text
    }
    assert found == {"avalanche point": True, "avalanche point (borderline)": False}


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 250))
def test_no_line_of_a_mark_crosses_the_text_of_another(places: set[int], width: int) -> None:
    """Marks of neighbours go into lanes: texts never overlap, and no line runs through a text below its own."""
    flags = [(15.0 * place, 15.0 * place + width) for place in sorted(places)]
    lanes = charts.lanes_of(flags)
    for (one, lane), (other, above) in itertools.permutations(zip(flags, lanes, strict=True), 2):
        if lane == above and one < other:
            assert one[1] < other[0]
        if above > lane:  # the other's line passes this one's lane
            assert not one[0] < other[0] <= one[1]


def test_the_legend_names_what_is_drawn_and_nothing_else() -> None:
    """Tones of bars that have a value, and intervals where there are some."""
    assert texts(draw(CHART))[:5] == ["critical", "high", "moderate", "low", "95 % interval"]
    bare = Chart("c", "t", "u", (Bar("a", Cell("1", 1.0)),))
    assert "95 % interval" not in texts(draw(bare))


# -- curves


def test_a_curve_keeps_distances() -> None:
    """Noise levels are placed by their number, not by their rank."""
    one, two, three = (shape.marks[0] for shape in shapes(draw(curve((0.0, 1.0), (0.05, 0.9), (0.2, 0.5)))))
    assert isinstance(one, Line) and isinstance(two, Line) and isinstance(three, Line)
    (a, b, c) = (line.points[0][0] for line in (one, two, three))
    assert (c - a) / (b - a) == pytest.approx(4)


def test_a_curve_over_decades_keeps_zero_on_its_axis() -> None:
    """Noise levels 0, 1e-4 and 0.1 are told apart."""
    found = shapes(draw(curve((0.0, 0.5), (1e-4, 0.5), (1e-3, 0.5), (0.1, 0.5))))
    places = [mark.x for shape in found for mark in shape.marks if isinstance(mark, Dot)]
    assert all(right - left > 40 for left, right in pairwise(places))


def test_a_limit_is_a_line_across_the_plot() -> None:
    """At its value, which the axis then holds."""
    (line,) = (m for m in draw(curve((0.1, 0.1), (0.2, 0.2), limit=0.5)).marks() if isinstance(m, Line) and m.dashed)
    drawing = draw(curve((0.1, 0.1), (0.2, 0.2), limit=0.5))
    assert value_at(drawing, line.points[0][1]) == pytest.approx(0.5, abs=0.01) and line.colour == "critical"
    assert not any(isinstance(m, Line) and m.dashed for m in draw(curve((0.1, 0.1), (0.2, 0.2))).marks())


def test_marked_points_have_names_that_do_not_overlap() -> None:
    """Formats of one width stand above each other; what is only predicted is hollow."""
    marked = tuple((4.0, Bar(f"format {i}", Cell("", 0.01 + i / 1e4), undecided=i > 1)) for i in range(4))
    drawing = draw(curve((3.0, 0.1), (8.0, 0.001), marked=marked))
    names = [mark for mark in drawing.marks() if isinstance(mark, Text) and mark.text.startswith("format")]
    assert len(names) == 4 and all(abs(a.y - b.y) >= 11 for a, b in itertools.combinations(names, 2))
    assert [mark.hollow for mark in drawing.marks() if isinstance(mark, Dot)].count(True) == 2


# -- heat map


def cells(drawing: Drawing) -> list[Shape]:
    return [shape for shape in shapes(drawing) if shape.row]


def test_colour_follows_the_logarithm() -> None:
    """Equal ratios are equal steps; zero and less have the lowest colour; what has no number has none."""
    row = tuple(Cell(f"{v:g}", v) for v in (1e-4, 1e-2, 1.0, 0.0, -1.0))
    scale = scale_of(heat((*row, None)))
    assert [scale.step(cell) for cell in (*row, None)] == [0, 4, 8, 0, 0, None]
    assert (scale.least, scale.most) == ("0.0001", "1")
    assert scale_of(heat((None,))).step(Cell("nan", math.nan)) is None


def test_every_site_is_a_cell_in_its_row() -> None:
    """Operators below each other, layers to the right; a dot marks what was injected; tips have number and note."""
    found = cells(draw(MAP))
    assert [shape.row for shape in found] == [1, 1, 2, 2, 3, 3]
    assert found[0].tip == "layer 0, linear\n0.5* nats\na note" and found[4].tip == "layer 0, bmm\nno such site"
    assert [any(isinstance(mark, Dot) for mark in shape.marks) for shape in found] == [True] + [False] * 4 + [True]
    assert fills(found[0])[0].fill == "heat-8" and fills(found[3]) == []


def test_the_strip_stands_over_the_columns_of_its_layers() -> None:
    """Each layer's dot is over its cells; places that are no layers follow with their names."""
    strip = tuple(Bar(f"layer {i}", Cell("", 0.1**i), 0.1**i / 2, 0.2**i) for i in (1, 2))
    drawing = draw(heat(*MAP.cells, strip=(*strip, Bar("lm_head", Cell("", 90.0), 80.0, 100.0))))
    dots = [mark.x for shape in shapes(drawing) if not shape.row for mark in shape.marks if isinstance(mark, Dot)]
    columns = [box.x + box.width / 2 for shape in cells(drawing)[:2] for box in fills(shape)]
    assert dots[:2] == pytest.approx(columns) and dots[2] > dots[1] + 30
    assert "lm_head" in texts(drawing) and "By layer" in texts(drawing)


def test_every_step_of_the_ramp_can_be_read() -> None:
    """Ink and paper differ by at least 4.5 : 1 in both themes, and lightness only goes one way."""
    for theme in (0, 1):
        lights = []
        for step in range(palette.STEPS):
            paper, ink = (palette.COLOURS[f"heat-{kind}{step}"][theme] for kind in ("", "ink-"))
            low, high = sorted((palette.luminance(paper), palette.luminance(ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5
            lights.append(palette.luminance(paper))
        signs = {math.copysign(1, b - a) for a, b in pairwise(lights)}
        assert len(signs) == 1 and abs(lights[-1] - lights[0]) > 0.6


def test_luminance_is_wcag_s() -> None:
    """Against known values: white, black, and the grey that is 4.54 : 1 on white."""
    assert palette.luminance("#ffffff") == pytest.approx(1) and palette.luminance("#000000") == 0
    assert 1.05 / (palette.luminance("#767676") + 0.05) == pytest.approx(4.54, abs=0.005)


# -- room


def crowded(layers: int) -> tuple[Drawable, ...]:
    bars = tuple(
        Bar(f"L{n}-{n + 2}", Cell("", 0.01 * n, "high"), 0.01 * n - 0.2, 0.01 * n + 0.1, "avalanche" * (n % 25 == 9))
        for n in range(layers)
    )
    rows = tuple(tuple(Cell("x", 10.0 ** (-(n * 9 + c) % 6)) for c in range(9)) for n in range(layers))
    strip = tuple(Bar(f"layer {n}", Cell("", 10.0 ** (-n % 5)), 1e-6, 2.0) for n in range(layers))
    return Chart("c", "t", "share", bars), heat(*rows, strip=(*strip, Bar("lm_head", Cell("", 1.0))))


@pytest.mark.parametrize("layers", [1, 5, 28, 60, 130])
@pytest.mark.parametrize("kind", [0, 1], ids=["chart", "map"])
def test_labels_neither_overlap_nor_leave_the_drawing(layers: int, kind: int) -> None:
    """Readable with few layers and with many; where there are too many, some labels are left out."""
    drawing = draw(crowded(layers)[kind])
    assert drawing.width <= WIDTH + 90
    flat = [mark for mark in drawing.marks() if isinstance(mark, Text) and not mark.turn]
    for mark in flat:
        width = text_width(mark.text, mark.size)
        left = mark.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * width
        assert left >= -1 and left + width <= drawing.width + 1 and 0 <= mark.y <= drawing.height
    for _, line in itertools.groupby(sorted(flat, key=lambda m: (m.y, m.x)), key=lambda mark: mark.y):
        row = [mark for mark in line if mark.anchor == "middle"]
        for one, two in pairwise(row):
            assert one.x + text_width(one.text, one.size) / 2 <= two.x - text_width(two.text, two.size) / 2 + 0.5
    turned = sorted(mark.x for mark in drawing.marks() if isinstance(mark, Text) and mark.turn == TURN)
    assert all(b - a >= NARROW - 0.01 for a, b in pairwise(turned))


@pytest.mark.parametrize(
    "block",
    [
        heat(),
        heat((None, None), (None, None)),
        Chart("c", "t", "u", ()),
        Chart("c", "t", "u", (Bar("a", Cell("failed", None, "unsure"), 0.1, 0.2, "mark"),)),
        Curve("k", "t", "x", "y", ()),
        Curve("k", "t", "x", "y", ((0.0, Bar("a", Cell("", None), None, None)),)),
    ],
    ids=["no rows", "no sites", "no bars", "no value", "no points", "none"],
)
def test_what_is_empty_says_so_and_does_not_crash(block: Drawable) -> None:
    """The forms ask first, and draw nothing."""
    assert not drawable(block)
    assert draw(block).height > 0


@pytest.mark.parametrize(
    "block",
    [
        heat((Cell("0", 0.0, starred=True), Cell("0", 0.0))),
        heat((Cell("nan", math.nan), Cell("inf", math.inf), Cell("1", 1.0))),
        heat((Cell("tiny", 1e-60), Cell("0", 0.0), Cell("huge", 1e60))),
        Chart("c", "t", "u", (Bar("a", Cell("0", 0.0, "tone unheard of"), math.nan, math.inf),)),
        Chart("c", "t", "u", (Bar("a", Cell("1", 1e-300)), Bar("b", Cell("1", 1e280)))),
    ],
    ids=["zeros", "nan", "extremes", "odd ends", "far apart"],
)
def test_odd_values_are_drawn(block: Drawable) -> None:
    """Every place is a number."""
    assert drawable(block)
    for mark in draw(block, title=True).marks():
        places = mark.points[0] if isinstance(mark, Line) else (mark.x, mark.y)
        assert all(math.isfinite(place) for place in places)


def test_a_title_moves_everything_down() -> None:
    """For a figure that stands alone."""
    plain, titled = draw(CHART), draw(CHART, title=True)
    assert titled.height == plain.height + 28 and texts(titled) == [CHART.title, *texts(plain)]
    assert "L0-2 20 % avalanche point" in spoken(CHART)
