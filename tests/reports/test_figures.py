"""Figures show the document's numbers and nothing else: labels as text, intervals, marks, a log colour scale."""

from __future__ import annotations

import functools
import io
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize, to_hex
from matplotlib.figure import Figure

from noisescope.reports import figures
from noisescope.reports.document import Bar, Cell, Chart, Curve, Document, HeatMap, Section
from noisescope.reports.figures import COLOURS, figure_of, save, save_figures

OPERATORS = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual")
BARS = (
    Bar("L0-2", Cell("20 %", 0.2, "critical"), -0.01, 0.42, "avalanche point"),
    Bar("L1-3", Cell("0 %", 0.0, "low"), -0.19, 0.16),
    Bar("L2-4", Cell("5 %", 0.05, "moderate"), None, None, "avalanche point (borderline)", undecided=True),
    Bar("L3-5", Cell("12 %", 0.12, "high"), 0.1, None),
    Bar("L4-6", Cell("not measurable", None, "unsure")),
)
CHART = Chart("windows-chart", "Accuracy lost by window", "share of the accuracy", BARS)
CURVE = Curve(
    "curve",
    "Accuracy under noise",
    "noise level",
    "accuracy",
    tuple((x, Bar(f"{x:g}", Cell(f"{y}", y), y - 0.1, y + 0.05)) for x, y in ((0.0, 0.9), (0.05, 0.8), (0.1, 0.4))),
)


def heat(*rows: tuple[Cell | None, ...], unit: str = "nats per token") -> HeatMap:
    names = tuple(f"layer {number}" for number in range(len(rows)))
    columns = OPERATORS[: len(rows[0])] if rows else ()
    return HeatMap("map", "Divergence", unit, names, columns, rows, (("",) * len(columns),) * len(rows), "injected")


MAP = heat(
    (Cell("0.5", 0.5, starred=True), Cell("1e-05", 1e-5), None),
    (Cell("0", 0.0), Cell("", None), Cell("0.003", 0.003, starred=True)),
)


@functools.cache
def crowded(layers: int) -> tuple[Chart, HeatMap]:
    """As many windows as layers, 9 operators, values over six decades."""
    bars = tuple(
        Bar(
            f"L{n}-{n + 2}",
            Cell("", 0.01 * n, "high"),
            0.01 * n - 0.2,
            0.01 * n + 0.1,
            "avalanche point" * (n % 25 == 9),
        )
        for n in range(layers)
    )
    rows = tuple(
        tuple(Cell("x", 10.0 ** (-(n * 9 + c) % 6), starred=(n + c) % 5 == 0) for c in range(9)) for n in range(layers)
    )
    return Chart("c", "Accuracy lost by window", "share", bars), heat(*rows)


def rendered(figure: Figure) -> Any:
    """The renderer after everything was laid out."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def lines(figure: Figure, name: str = "interval") -> list[Any]:
    return [line for line in figure.axes[0].lines if line.get_gid() == name]


def legend(figure: Figure) -> list[str]:
    found = figure.axes[0].get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    document = Document("t", (), (Section("a", "A", (CHART, CURVE)), Section("b", "B", (MAP,))))
    return save_figures(document, tmp_path_factory.mktemp("figures") / "new")


def test_every_figure_is_written_twice(saved: list[Path]) -> None:
    """One PNG at 200 dpi and one SVG for each chart, curve and heat map, named by its key."""
    assert [path.name for path in saved] == [
        f"{key}.{form}" for key in ("windows-chart", "curve", "map") for form in ("png", "svg")
    ]
    for path in saved[::2]:
        content = path.read_bytes()
        width = int.from_bytes(content[16:20])
        assert content.startswith(b"\x89PNG") and width == figures.WIDTH * 200


def test_svg_holds_the_labels_as_text(saved: list[Path]) -> None:
    """Titles, units, windows, layers and operators can be searched, and edited for a paper."""
    texts = {path.stem: "|".join(ElementTree.parse(path).getroot().itertext()) for path in saved[1::2]}
    wanted = {
        "windows-chart": [CHART.title, CHART.unit, *(bar.label for bar in BARS), "avalanche point (borderline)"],
        "curve": [CURVE.title, CURVE.unit, CURVE.across],
        "map": [MAP.title, MAP.unit, *MAP.columns, "layer", "injected"],
    }
    for key, words in wanted.items():
        assert [word for word in words if word not in texts[key]] == []


def test_the_same_document_gives_the_same_files(saved: list[Path], tmp_path: Path) -> None:
    """No date, no random names."""
    again = save_figures(Document("t", (), (Section("a", "A", (CHART, CURVE, MAP)),)), tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in saved]


def test_nothing_is_left_behind() -> None:
    """No pyplot, no torch, no changed setting: a notebook's own figures look as before."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import io, matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "from noisescope.reports.document import *\n"
        "from noisescope.reports.figures import figure_of, save\n"
        f"save(figure_of({CHART!r}), io.BytesIO(), 'png')\n"
        f"save(figure_of({MAP!r}), io.StringIO(), 'svg')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(figures.__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=environment, check=True)


def test_settings_of_the_user_do_not_spoil_it() -> None:
    """A matplotlibrc with TeX, another font and huge text gives the same figure."""
    theirs = {
        "text.usetex": True,
        "font.family": ["serif"],
        "font.size": 30,
        "axes.labelsize": 40,
        "xtick.color": "red",
    }
    pictures = []
    for settings in ({}, theirs):
        with matplotlib.rc_context(settings), io.BytesIO() as stream:
            save(figure_of(CHART), stream, "png")
            pictures.append(stream.getvalue())
    assert pictures[0] == pictures[1]


# ---- bars and curves ------------------------------------------------------------------------------------------------


def test_bars_have_the_values_and_colours_of_the_document() -> None:
    """No number is computed: a bar's height is the cell's value, its colour the tone's."""
    axes = figure_of(CHART).axes[0]
    bars = axes.containers[0]
    assert [bar.get_height() for bar in bars] == [0.2, 0.0, 0.05, 0.12]
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [
        COLOURS[tone] for tone in ("critical", "low", "moderate", "high")
    ]
    assert axes.get_ylabel() == "share of the accuracy"
    assert legend(figure_of(CHART))[:6] == ["critical", "high", "moderate", "low", "95 % interval", "no value"]


def test_intervals_are_whiskers_to_their_ends() -> None:
    """Each known end is a capped line from the value to exactly that end, inside the axes."""
    figure = figure_of(CHART)
    ends = [(line.get_xdata()[0], *line.get_ydata()) for line in lines(figure) if line.get_linestyle() == "-"]
    assert ends == [(0, 0.2, -0.01), (0, 0.2, 0.42), (1, 0.0, -0.19), (1, 0.0, 0.16), (3, 0.12, 0.1)]
    assert all(line.get_marker() == "_" for line in lines(figure) if line.get_linestyle() == "-")
    bottom, top = figure.axes[0].get_ylim()
    assert bottom <= -0.19 and top >= 0.42


def test_an_open_end_is_dotted_to_the_rim() -> None:
    """An interval that could not be closed above doesn't look like one that ends at the value."""
    dotted = [line for line in lines(figure_of(CHART)) if line.get_linestyle() == ":"]
    assert [line.get_xdata()[0] for line in dotted] == [3]
    assert dotted[0].get_ydata()[1] >= 0.42


def test_marks_differ_by_symbol_and_words() -> None:
    """Avalanche points have a triangle, hollow where borderline, the window's name over it, and a legend."""
    figure = figure_of(CHART)
    triangles = [line for line in figure.axes[0].lines if line.get_marker() == "v"]
    assert [line.get_xdata()[0] for line in triangles] == [0, 2]
    assert len({to_hex(line.get_markerfacecolor()) for line in triangles}) == 2
    assert [note.get_text() for note in figure.axes[0].texts] == ["L0-2", "L2-4"]
    assert legend(figure)[-2:] == ["avalanche point", "avalanche point (borderline)"]


def test_divergences_over_decades_are_points_on_a_log_scale() -> None:
    """Predicted KL spans decades; a bar on a linear axis would hide all but one. A 0 as lower end is no obstacle."""
    bars = tuple(Bar(f"L{n}", Cell("", 10.0**-n), 0.0, 20.0**-n) for n in range(1, 6))
    axes = figure_of(Chart("c", "t", "nats", bars)).axes[0]
    assert axes.get_yscale() == "log" and not axes.containers
    losses = tuple(Bar(f"L{n}", Cell("", 10.0**-n), -0.1, 0.2) for n in range(1, 6))
    assert figure_of(Chart("c", "t", "share", losses)).axes[0].get_yscale() == "linear"


def test_a_curve_has_its_points_and_intervals() -> None:
    """Noise levels across, values up, both named, an interval at each."""
    figure = figure_of(CURVE)
    curve = next(line for line in figure.axes[0].lines if line.get_gid() is None)
    assert list(curve.get_xdata()) == [0.0, 0.05, 0.1] and list(curve.get_ydata()) == [0.9, 0.8, 0.4]
    assert len(lines(figure)) == 6
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("noise level", "accuracy")


def test_a_curve_over_decades_keeps_zero_on_its_axis() -> None:
    """Noise levels 0, 1e-4 and 0.1 are told apart."""
    points = tuple((x, Bar(f"{x:g}", Cell("", 0.5), None, None)) for x in (0.0, 1e-4, 0.1))
    axes = figure_of(Curve("c", "t", "x", "y", points)).axes[0]
    places = [axes.transData.transform((x, 0.5))[0] for x in (0.0, 1e-4, 0.1)]
    assert all(right - left > 50 for left, right in pairwise(places))


# ---- heat map -------------------------------------------------------------------------------------------------------


def mesh_of(figure: Figure) -> Any:
    return figure.axes[0].collections[0]


def test_the_heat_map_has_a_log_scale_with_its_unit() -> None:
    """Values over decades: logarithmic colours between the smallest and the largest, the bar named by the unit."""
    figure = figure_of(MAP)
    norm = mesh_of(figure).norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == (1e-5, 0.5)
    assert figure.axes[1].get_ylabel() == "nats per token"
    assert mesh_of(figure).get_cmap().name in ("viridis", "cividis")


def test_the_heat_map_is_linear_within_a_decade() -> None:
    """Where values are alike, a log scale would blow up their differences."""
    norm = mesh_of(figure_of(heat((Cell("2", 2.0), Cell("3", 3.0))))).norm
    assert type(norm) is Normalize
    assert (norm.vmin, norm.vmax) == (0.0, 3.0)


def test_missing_cells_show_the_hatched_ground() -> None:
    """No site and no value: masked in the mesh, so that the hatch shows, and explained."""
    figure = figure_of(MAP)
    masked = np.ma.getmaskarray(mesh_of(figure).get_array()).reshape(3, 2)
    assert masked.tolist() == [[False, False], [False, True], [True, False]]
    assert figure.axes[0].patch.get_hatch()
    assert "no value" in legend(figure)
    assert "no value" not in legend(figure_of(heat((Cell("1", 1.0),))))


def test_zero_is_not_the_smallest_value() -> None:
    """On a log scale 0 has its own colour, which no value has, and an entry in the legend."""
    figure = figure_of(MAP)
    colours = mesh_of(figure).to_rgba(mesh_of(figure).get_array()).reshape(3, 2, 4)
    assert to_hex(colours[0, 1]) == "#000000"
    assert to_hex(colours[1, 0]) != "#000000"
    assert "0" in legend(figure)
    assert "0 or less" in legend(figure_of(heat((Cell("", -1.0), Cell("", 1e-3), Cell("", 1.0)))))


def test_injected_cells_have_a_star() -> None:
    """A star on each starred cell, and nowhere else."""
    stars = [c for c in figure_of(MAP).axes[0].collections if c.get_gid() == "stars"]
    places = sorted(tuple(place) for group in stars for place in group.get_offsets().tolist())
    assert places == [(0.5, 0.5), (1.5, 2.5)]
    assert "injected" in legend(figure_of(MAP))


@pytest.mark.parametrize(
    "block",
    [
        heat(),
        heat((None, None), (None, None)),
        heat((Cell("0", 0.0, starred=True), Cell("0", 0.0))),
        heat((Cell("nan", math.nan), Cell("inf", math.inf), Cell("1", 1.0))),
        heat((Cell("tiny", 1e-60), Cell("0", 0.0), Cell("huge", 1e60))),
        Chart("c", "t", "u", ()),
        Chart("c", "t", "u", (Bar("a", Cell("failed", None, "unsure"), 0.1, 0.2, "mark"),)),
        Chart("c", "t", "u", (Bar("a", Cell("0", 0.0, "tone unheard of"), math.nan, math.inf),)),
        Curve("k", "t", "x", "y", ()),
        Curve("k", "t", "x", "y", ((0.0, Bar("a", Cell("", None), None, None)),)),
    ],
    ids=["no rows", "no sites", "zeros", "nan", "extremes", "no bars", "no value", "odd ends", "no points", "none"],
)
def test_empty_and_odd_values_are_drawn(block: figures.Drawable) -> None:
    """Nothing crashes or warns, and the figure is still there."""
    rendered(figure_of(block))


# ---- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [5, 28, 60, 130])
@pytest.mark.parametrize("kind", [0, 1], ids=["chart", "map"])
def test_labels_neither_overlap_nor_leave_the_figure(layers: int, kind: int) -> None:
    """Readable with few layers, with 28 and with 60; with more, some labels are left out."""
    block = crowded(layers)[kind]
    figure = figure_of(block)
    renderer = rendered(figure)
    drawn = figure.get_tightbbox(renderer)  # inches
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= figures.WIDTH and drawn.y1 <= figures.height_of(block)
    labels = [tick.label1.get_window_extent(renderer) for tick in figure.axes[0].xaxis.get_major_ticks()]
    assert len(labels) >= min(layers, 40)
    assert all(left.x1 <= right.x0 + 0.5 for left, right in pairwise(labels))
    for mark in figure.axes[0].texts:  # the names over avalanche points stay below the legend
        assert mark.get_window_extent(renderer).y1 <= figure.axes[0].get_legend().get_window_extent(renderer).y0 + 3


def test_odd_names_are_drawn_as_text(tmp_path: Path) -> None:
    """TeX, markup, Chinese, controls and endless names are neither run nor lost, and no warning is given."""
    names = ["$x_1$ \\frac{", "<b>&amp;", "中文 🤖", "a\x00b\ud800", "model.layers." + "name" * 40]
    bars = tuple(Bar(name, Cell(name, 1.0, "low"), 0.5, 2.0, name) for name in names)
    rows = tuple((Cell(name, 1.0),) for name in names)
    blocks = (
        Chart("c", names[2], names[0], bars),
        HeatMap("m", names[0], names[2], tuple(names), (names[4],), rows, (("",),) * 5, names[1]),
    )
    paths = save_figures(Document("t", (), (Section("s", "s", blocks),)), tmp_path)
    for path in paths[1::2]:
        text = "".join(ElementTree.parse(path).getroot().itertext())
        assert all(word in text for word in ("$x_1$", "中文 🤖", "a\\x00b\\ud800", "<b>&amp;", "model.layers."))
