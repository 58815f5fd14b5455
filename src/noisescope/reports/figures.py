"""Charts, curves and heat maps of a document as matplotlib figures, sized for the text column of an A4 page.

Drawing only: every number comes from the document. pyplot is not used and no setting outlives a call, so a notebook
that draws its own figures is not disturbed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import ScaledTranslation

from noisescope.atomic_write import replacing
from noisescope.reports.document import TONES, Bar, Chart, Curve, Document, HeatMap
from noisescope.reports.text_layout import INK, QUIET, foreign, printable

Drawable: TypeAlias = Chart | Curve | HeatMap

WIDTH = 7.0  # inches: the 178 mm between the margins of an A4 page
DPI = 200
# Okabe and Ito's colours, which people with any form of colour blindness can tell apart; no tone is blue.
COLOURS = {
    "critical": "#D55E00", "high": "#E69F00", "moderate": "#F0E442", "low": "#009E73", "unsure": "#999999",
    "": "#0072B2",
}  # fmt: skip
PALE = "#E3E3E3"
_HATCHED: dict[str, Any] = {"facecolor": "#F4F4F4", "edgecolor": "#BBBBBB", "hatch": "//////", "linewidth": 0}
_SETTINGS: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 8.0, "axes.labelsize": 8.0, "figure.titlesize": 9.5, "figure.titleweight": "bold",
    "xtick.labelsize": 7.0, "ytick.labelsize": 7.0, "legend.fontsize": 7.0,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": QUIET,
    "hatch.linewidth": 0.6,
    "text.usetex": False, "text.parse_math": False,  # a $ in a module's name is a $
    "svg.fonttype": "none",  # text stays text: it can be searched, and edited for a paper
    "svg.hashsalt": "noisescope",  # the same document gives the same bytes
}  # fmt: skip
# A font with a sign for every character of Unicode, in one weight: for names that DejaVu can't spell.
_FOREIGN: dict[Any, Any] = {
    "font.family": ["DejaVu Sans", "Last Resort High-Efficiency"],
    "figure.titleweight": "normal",
}


def figure_of(block: Drawable, *, title: bool = True) -> Figure:
    """One block drawn; without its title where the page around it has one."""
    spelled = printable(json.dumps(dataclasses.asdict(block), ensure_ascii=False))
    with _settings(_FOREIGN if foreign(spelled) else {}):
        figure = Figure(figsize=(WIDTH, height_of(block)), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        if isinstance(block, HeatMap):
            _heat_map(figure, axes, block)
        elif not (_chart(figure, axes, block) if isinstance(block, Chart) else _curve(axes, block)):
            axes.text(0.5, 0.5, "no values", ha="center", va="center", color=QUIET, transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
        if title:
            figure.suptitle(short(block.title, 90), x=0.008, ha="left")  # above the legend, wherever that ends
    return figure


def height_of(block: Drawable) -> float:
    """The height of a block's figure in inches; labels that stand upright ask for more."""
    if isinstance(block, Curve):
        return 2.5
    labels, _, flat = ticks(block.rows if isinstance(block, HeatMap) else [bar.label for bar in block.bars])
    upright = 0 if flat else max(0.0, 0.06 * max(map(len, labels)) - 0.45)
    return upright + (0.95 + 0.22 * len(block.columns) if isinstance(block, HeatMap) else 2.5)


def save_figures(document: Document, folder: Path) -> list[Path]:
    """Write every chart, curve and heat map as KEY.png and KEY.svg; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for block in (block for section in document.sections for block in section.blocks if isinstance(block, Drawable)):
        figure = figure_of(block)
        for form in ("png", "svg"):
            paths.append(folder / f"{block.key}.{form}")
            with replacing(paths[-1]) as file:
                save(figure, file, form)
    return paths


def save(figure: Figure, target: Path | IO[bytes], form: str) -> None:
    """Into a path or an open file, with nothing in it that differs between two times of drawing."""
    metadata = {"svg": {"Date": None}, "png": {"Software": None}}[form]
    with _settings({}):
        figure.savefig(target, format=form, dpi=DPI, metadata=metadata)


def _settings(more: dict[Any, Any]) -> AbstractContextManager[None]:
    return matplotlib.rc_context({**_SETTINGS, **more})


# -- bars and curves


def _chart(figure: Figure, axes: Axes, chart: Chart) -> int:
    """Draws, and says how many values there were."""
    bars = chart.bars
    places = [place for place, bar in enumerate(bars) if finite(bar.cell.value) is not None]
    values = [bars[place].cell.value or 0.0 for place in places]
    colours = [COLOURS.get(bars[place].cell.tone, COLOURS[""]) for place in places]
    # On a log scale a bar has no foot, so there the points stand alone. A loss may be below 0, a divergence not.
    logarithmic = spans(values, 100) and all(bar.low is None or bar.low >= 0 for bar in bars)
    if logarithmic:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    elif values:
        axes.bar(places, values, color=colours, edgecolor=INK, linewidth=0.4, width=0.72)
        axes.axhline(0, color=INK, linewidth=0.6)
    axes.scatter(places, values, s=18 if logarithmic else 9, color=colours, edgecolors=INK, linewidths=0.5, zorder=5)
    missing = sorted(set(range(len(bars))) - set(places))
    foot = axes.get_xaxis_transform()
    axes.scatter(missing, [0.03] * len(missing), marker="x", s=14, color=QUIET, linewidths=0.9, transform=foot)
    intervals = _whiskers(axes, [(place, bars[place]) for place in places])
    axes.set_xlim(-0.6, max(len(bars) - 0.4, 0.6))
    axes.set_ylabel(short(chart.unit))
    axes.grid(axis="y", color=PALE, linewidth=0.5)
    label_ticks(axes, [bar.label for bar in bars])
    shown = {bars[place].cell.tone for place in places} - {""}
    tones = [
        Patch(facecolor=COLOURS[tone], edgecolor=INK, linewidth=0.4, label=tone) for tone in TONES if tone in shown
    ]
    gaps = [symbol("x", "no value", color=QUIET)] if missing else []
    legend(axes, [*tones, *intervals, *gaps, *_marks(figure, axes, bars)])
    return len(places)


def _marks(figure: Figure, axes: Axes, bars: Sequence[Bar]) -> list[Line2D]:
    """A triangle and the bar's label over each marked bar, hollow for what is undecided. The legend's entries."""
    entries: dict[str, Line2D] = {}
    upright = len(bars) > 20
    for place, bar in enumerate(bars):
        value = finite(bar.cell.value)
        if bar.mark and value is not None:
            face = "white" if bar.undecided else INK
            highest = max(value, finite(bar.high) or 0.0, 0.0)
            raised = axes.transData + ScaledTranslation(0, 6 / 72, figure.dpi_scale_trans)
            axes.plot(place, highest, "v", color=INK, markerfacecolor=face, markersize=5, transform=raised, zorder=6)
            axes.annotate(
                short(bar.label), (place, highest), (0, 11), textcoords="offset points", ha="center", va="bottom",
                fontsize=7, rotation=90 if upright else 0, annotation_clip=False,
            )  # fmt: skip
            entries[bar.mark] = symbol("v", short(bar.mark), color=INK, markerfacecolor=face)
    if entries:  # room for the labels
        scale = axes.yaxis.get_transform()
        bottom, top = scale.transform(np.array(axes.get_ylim()))
        axes.set_ylim(top=float(scale.inverted().transform(top + (0.32 if upright else 0.12) * (top - bottom))))
    return list(entries.values())


def _curve(axes: Axes, curve: Curve) -> int:
    """Draws, and says how many values there were."""
    points = [(x, bar) for x, bar in curve.points if finite(bar.cell.value) is not None]
    across = [x for x, _ in points]
    positive = [x for x in across if x > 0]
    if spans(positive, 100):
        axes.set_xscale("symlog", linthresh=min(positive))  # symlog: noise level 0 belongs on the axis
        plain_numbers(axes.xaxis)
    values = [bar.cell.value or 0.0 for _, bar in points]
    axes.plot(across, values, color=COLOURS[""], marker="o", markersize=4, linewidth=1.4, zorder=5)
    entries = _whiskers(axes, points)
    if curve.limit is not None:
        colour = COLOURS["critical"]
        entries.append(axes.axhline(curve.limit, color=colour, linewidth=1.0, linestyle="--", label="limit"))
    legend(axes, entries)
    axes.set_xlabel(short(curve.across, 80))
    axes.set_ylabel(short(curve.unit))
    axes.grid(color=PALE, linewidth=0.5)
    return len(points)


def _whiskers(axes: Axes, points: Sequence[tuple[float, Bar]]) -> list[Line2D]:
    """The 95 % interval of each point: capped where its end is known, dotted to the rim where it is open.

    The legend's entry, if there was an interval.
    """
    for is_open, line in ((False, "-"), (True, ":")):
        rims = axes.get_ylim()  # the open ones come last, when the rest has stretched the axis
        for x, bar in points:
            ends = (finite(bar.low), finite(bar.high))
            for end, rim in zip(ends, rims, strict=True):
                if (end is None) == is_open and ends != (None, None):
                    tips = [bar.cell.value or 0.0, rim if end is None else end]
                    cap: dict[str, Any] = {} if is_open else {"marker": "_", "markevery": [1], "markersize": 4}
                    axes.plot([x, x], tips, line, color=INK, linewidth=0.9, zorder=4, gid="interval", **cap)
    drawn = any((finite(bar.low), finite(bar.high)) != (None, None) for _, bar in points)
    return [symbol("|", "95 % interval", color=INK)] if drawn else []


# -- heat map


def _heat_map(figure: Figure, axes: Axes, block: HeatMap) -> None:
    """Layers run to the right, as data flows; operators stand below each other."""
    values = np.full((len(block.columns), len(block.rows)), np.nan)
    stars: list[tuple[int, int]] = []
    for x, row in enumerate(block.cells):
        for y, cell in enumerate(row):
            if cell is not None and finite(cell.value) is not None:
                values[y, x] = cell.value
                stars += [(y, x)] if cell.starred else []
    missing = np.isnan(values)
    axes.patch.set(**_HATCHED)  # the ground: it shows wherever a cell is missing
    handles: list[Artist] = []
    if not missing.all():
        shown = np.ma.masked_array(values, missing)
        positive = values[values > 0].tolist()
        norm = Normalize(min(0.0, shown.min()), shown.max() or 1.0)
        if spans(positive, 10):
            norm = LogNorm(min(positive), max(positive))
            if shown.min() <= 0:  # 0 has no place on a log scale: black
                handles.append(Patch(facecolor="black", label="0 or less" if shown.min() < 0 else "0"))
                shown = np.ma.masked_array(np.where(values > 0, values, min(positive) / 10), missing)
        colours = matplotlib.colormaps["viridis"].with_extremes(under="black")
        mesh = axes.pcolormesh(shown, cmap=colours, norm=norm, edgecolors="white", linewidth=0.4)
        bar = figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.05, aspect=18)
        bar.set_label(short(block.unit, 18))
        bar.outline.set_visible(False)
        plain_numbers(bar.ax.yaxis)
        bright = np.asarray(norm(shown)) > 0.6
        size = min(22.0, (50 * 5.6 / len(block.rows)) ** 2)  # square points: a star stays inside its cell
        for ink in ("white", "black"):
            spots = [spot for spot in stars if bright[spot] == (ink == "black")]
            across, down = [x + 0.5 for _, x in spots], [y + 0.5 for y, _ in spots]
            axes.scatter(across, down, marker=(6, 2, 0), s=size, color=ink, linewidths=0.8, gid="stars")
    axes.set_xlim(0, max(len(block.rows), 1))
    axes.set_ylim(max(len(block.columns), 1), 0)
    axes.set_yticks([y + 0.5 for y in range(len(block.columns))], [short(name) for name in block.columns])
    label_ticks(axes, block.rows, offset=0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    words = short(block.legend, 80) or "marked with * in the table"
    handles += [Patch(**_HATCHED, label="no value")] if bool(missing.any()) else []
    legend(axes, [*([symbol((6, 2, 0), words, color=INK)] if stars else []), *handles])


# -- labels under an axis, a legend above it, numbers as the tables write them


def ticks(names: Sequence[str]) -> tuple[list[str], str, bool]:
    """Labels under an axis, the first word if all share one ("layer 0", "layer 1"), and whether they can lie flat."""
    labels = [short(name) for name in names]
    first = labels[0].partition(" ")[0] + " " if len(labels) > 1 else ""
    if len(first) > 1 and all(label.startswith(first) and label != first for label in labels):
        labels = [label.removeprefix(first) for label in labels]
    else:
        first = ""
    return labels, first.strip(), (0.04 + 0.06 * max(map(len, labels), default=0)) * len(labels) < WIDTH - 1.2


def label_ticks(axes: Axes, names: Sequence[str], *, offset: float = 0.0) -> None:
    labels, shared, flat = ticks(names)
    room = (WIDTH - 1.2) / max(len(labels), 1)  # inches for each
    step = math.ceil(0.095 / room)  # an upright label needs 0.095 inches
    places = [place + offset for place in range(0, len(labels), step)]
    axes.set_xticks(places, labels[::step], rotation=0 if flat else 90, size=7.0 if flat or room > 0.13 else 6.0)
    axes.set_xlabel(shared)


def short(name: str, limit: int = 28) -> str:
    """A name that leaves room for the figure; the table beside it has the whole."""
    name = printable(name)
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[1 - limit // 2 :]}"


def legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """Above the axes, where no bar can be hidden by it: one line if it fits."""
    sizes = [0.27 + 0.053 * len(str(handle.get_label())) for handle in handles]  # inches
    if handles:
        columns = len(handles) if sum(sizes) < WIDTH - 0.8 else max(1, int((WIDTH - 1) / max(sizes)))
        axes.legend(
            handles=list(handles), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False,
            borderaxespad=0.3, borderpad=0, handlelength=1.2, handletextpad=0.5, columnspacing=1.4,
        )  # fmt: skip


def symbol(marker: str | tuple[int, int, float], words: str, **colours: str) -> Line2D:
    return Line2D([], [], linestyle="", marker=marker, markersize=5, label=words, **colours)  # type: ignore[arg-type]


def plain_numbers(axis: Axis) -> None:
    """0.001 and 1e-05, as in the tables."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def spans(values: Sequence[float], ratio: float) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= ratio


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
