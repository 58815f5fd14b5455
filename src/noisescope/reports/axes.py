"""What stands around a drawing: labels under an axis, a legend above it, numbers as the tables write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from noisescope.reports.typesetting import printable

WIDTH = 7.0  # inches: the 178 mm between the margins of an A4 page


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
