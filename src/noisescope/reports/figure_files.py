"""The charts of a document as files: SVG as the page has it, and PNG, which matplotlib draws from the same marks.

pyplot is not used and no setting outlives a call, so a notebook that draws its own figures is not disturbed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from noisescope.atomic_write import replacing, write_file
from noisescope.reports.charts import DRAWABLE, Drawable, draw, drawable
from noisescope.reports.document import Document
from noisescope.reports.drawing import Dot, Line, Mark, Rect, Text
from noisescope.reports.palette import on_paper
from noisescope.reports.svg import svg_file
from noisescope.reports.text_layout import foreign, printable

DPI = 200
POINT = 0.75  # points in a pixel
_SETTINGS: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9.0, "text.usetex": False, "text.parse_math": False,  # a $ in a module's name is a $
    "svg.fonttype": "none", "svg.hashsalt": "noisescope",  # the same document gives the same bytes
}  # fmt: skip
# A font with a sign for every character of Unicode, in one weight: for names that DejaVu can't spell.
_FOREIGN = {"font.family": ["DejaVu Sans", "Last Resort High-Efficiency"]}


def figure_of(block: Drawable, *, title: bool = True) -> Figure:
    """One block as a matplotlib figure."""
    drawing = draw(block, title=title)
    spelled = "".join(printable(mark.text) for mark in drawing.marks() if isinstance(mark, Text))
    strange = bool(foreign(spelled))
    with _settings(_FOREIGN if strange else {}):
        figure = Figure(figsize=(drawing.width / 96, drawing.height / 96))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
        axes.set_axis_off()
        for order, mark in enumerate(drawing.marks()):
            _add(axes, mark, order, bold=not strange)
    return figure


def _add(axes: Axes, mark: Mark, order: int, *, bold: bool) -> None:
    if isinstance(mark, Rect):
        place = (mark.x, mark.y), mark.width, mark.height
        axes.add_patch(Rectangle(*place, facecolor=on_paper(mark.fill), linewidth=0, zorder=order))
    elif isinstance(mark, Line):
        xs, ys = zip(*mark.points, strict=True)
        style = (0, (3, 3)) if mark.dashed else "-"
        axes.plot(xs, ys, color=on_paper(mark.colour), linewidth=mark.width * POINT, linestyle=style, zorder=order)
    elif isinstance(mark, Dot):
        face = on_paper("card" if mark.hollow else mark.colour)
        edge = on_paper(mark.colour)
        axes.add_patch(Circle((mark.x, mark.y), mark.radius, facecolor=face, edgecolor=edge, zorder=order))
    else:
        axes.text(
            mark.x, mark.y, printable(mark.text), color=on_paper(mark.colour), fontsize=mark.size * POINT,
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor], va="baseline", rotation=mark.turn,
            rotation_mode="anchor", weight="bold" if mark.bold and bold else "normal", zorder=order,
        )  # fmt: skip


def save_figures(document: Document, folder: Path) -> list[Path]:
    """Write every chart, curve and heat map as KEY.png and KEY.svg; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for block in document.blocks():
        if isinstance(block, DRAWABLE) and drawable(block):
            paths.append(folder / f"{block.key}.png")
            with replacing(paths[-1]) as file:
                save_png(figure_of(block), file)
            paths.append(write_file(folder / f"{block.key}.svg", svg_file(draw(block, title=True))))
    return list(dict.fromkeys(paths))


def save_png(figure: Figure, target: Path | IO[bytes]) -> None:
    """Into a path or an open file, with nothing in it that differs between two times of drawing."""
    with _settings({}):
        figure.savefig(target, format="png", dpi=DPI, metadata={"Software": None})


def _settings(more: dict[Any, Any]) -> AbstractContextManager[None]:
    return matplotlib.rc_context({**_SETTINGS, **more})
