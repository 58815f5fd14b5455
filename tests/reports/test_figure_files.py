"""Charts as files: SVG with its text, PNG by matplotlib, the same bytes each time, nothing left behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.colors import to_hex

from noisescope.reports import figure_files
from noisescope.reports.charts import draw
from noisescope.reports.document import Bar, Cell, Chart, Columns, Curve, Document, HeatMap, Panel, Section
from noisescope.reports.figure_files import figure_of, save_figures, save_png
from noisescope.reports.palette import on_paper

BARS = (
    Bar("L0-2", Cell("20 %", 0.2, "critical"), -0.01, 0.42, "avalanche point"),
    Bar("L1-3", Cell("0 %", 0.0, "low"), -0.19, 0.16),
)
CHART = Chart("windows-chart", "Accuracy lost by window", "share of the accuracy", BARS)
CURVE = Curve("curve", "Accuracy under noise", "noise level", "accuracy",
              tuple((x, Bar(f"{x:g}", Cell(f"{y}", y), y - 0.1, y)) for x, y in ((0.0, 0.9), (0.1, 0.4))))  # fmt: skip
MAP = HeatMap("map", "Divergence", "nats", ("layer 0",), ("linear",), ((Cell("1", 1.0),),), (("",),), "injected")
EMPTY = Chart("empty", "Nothing", "u", ())


def document(*blocks: Chart | Curve | HeatMap) -> Document:
    return Document("t", (), (Section("a", "A", (Columns((Panel("", blocks),)), EMPTY)),))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_figures(document(CHART, CURVE, MAP), tmp_path_factory.mktemp("figures") / "new")


def test_every_figure_is_written_twice(saved: list[Path]) -> None:
    """One PNG at 200 dpi and one SVG for each chart, curve and heat map, named by its key; nothing for an empty one."""
    keys = ("windows-chart", "curve", "map")
    assert [path.name for path in saved] == [f"{key}.{form}" for key in keys for form in ("png", "svg")]
    for path, block in zip(saved[::2], (CHART, CURVE, MAP), strict=True):
        content = path.read_bytes()
        width = int.from_bytes(content[16:20])
        assert content.startswith(b"\x89PNG") and width == pytest.approx(draw(block).width * 200 / 96, abs=2)


def test_svg_holds_the_labels_as_text_and_the_colours_of_paper(saved: list[Path]) -> None:
    """Titles, units, windows, layers and operators can be searched, and edited for a paper; no theme is needed."""
    texts = {path.stem: "|".join(ElementTree.parse(path).getroot().itertext()) for path in saved[1::2]}
    wanted = {
        "windows-chart": [CHART.title, CHART.unit, "L0-2", "L1-3", "avalanche point"],
        "curve": [CURVE.title, CURVE.unit, CURVE.across],
        "map": [MAP.title, MAP.unit, "linear"],
    }
    for key, words in wanted.items():
        assert [word for word in words if word not in texts[key]] == []
    chart = saved[1].read_text(encoding="utf-8")
    assert "var(" not in chart and on_paper("critical") in chart


def test_the_same_document_gives_the_same_files(saved: list[Path], tmp_path: Path) -> None:
    """No date, no random names."""
    again = save_figures(document(CHART, CURVE, MAP), tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in saved]


def test_the_png_has_the_marks_of_the_drawing() -> None:
    """Bars in the tones' colours, and every text."""
    (axes,) = figure_of(CHART).axes
    assert on_paper("critical") in {to_hex(patch.get_facecolor()) for patch in axes.patches}
    assert {"L0-2", "avalanche point", CHART.title} <= {text.get_text() for text in axes.texts}


def test_nothing_is_left_behind() -> None:
    """No pyplot, no torch, no changed setting: a notebook's own figures look as before."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import io, matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "from noisescope.reports.document import *\n"
        "from noisescope.reports.figure_files import figure_of, save_png\n"
        f"save_png(figure_of({CHART!r}), io.BytesIO())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(figure_files.__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=environment, check=True)


def test_settings_of_the_user_do_not_spoil_it() -> None:
    """A matplotlibrc with TeX, another font and huge text gives the same figure."""
    theirs = {"text.usetex": True, "font.family": ["serif"], "font.size": 30, "axes.facecolor": "red"}
    pictures = []
    for settings in ({}, theirs):
        with matplotlib.rc_context(settings), io.BytesIO() as stream:
            save_png(figure_of(CHART), stream)
            pictures.append(stream.getvalue())
    assert pictures[0] == pictures[1]


def test_odd_names_are_drawn_as_text(tmp_path: Path) -> None:
    """TeX, markup, Chinese, controls and endless names are neither run nor lost, and no warning is given."""
    names = ["$x_1$ \\frac{", "<b>&amp;", "中文 🤖", "a\x00b\ud800", "model.layers." + "name" * 40]
    bars = tuple(Bar(name, Cell(name, 1.0, "low"), 0.5, 2.0, name) for name in names)
    rows = tuple((Cell(name, 1.0),) for name in names)
    blocks = (
        Chart("c", names[2], names[0], bars),
        HeatMap("m", names[0], names[2], tuple(names), (names[4],), rows, (("",),) * 5, names[1]),
    )
    paths = save_figures(document(*blocks), tmp_path)
    chart = "".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert all(word in chart for word in ("$x_1$", "中文 🤖", "a\\x00b\\ud800", "<b>&amp;", "model.l"))
