"""Drawings as SVG, inside a page whose theme gives the colours or as files, and as PNG files made by matplotlib.

pyplot is not used and no setting outlives a call, so a notebook that draws its own figures is not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from noisescope.atomic_write import replacing, write_file
from noisescope.reports.charts import DRAWABLE, Drawable, draw, drawable
from noisescope.reports.document import Document
from noisescope.reports.drawing import SIZE, Dot, Drawing, Line, Mark, Rect, Shape, Text
from noisescope.reports.palette import COLOURS, on_paper
from noisescope.reports.text_layout import foreign, printable
from noisescope.text_escaping import visible

NARROWEST = 520.0  # pixels: on a phone a drawing scrolls rather than become too small to read
LARGEST = 1.7  # times its own size: a chart of one bar need not fill the page
_FONT = "'DejaVu Sans', Verdana, sans-serif"


def inline_svg(drawing: Drawing) -> Markup:
    """For a page: shapes have tooltips, numbers and names for screen readers."""
    size = f'width="{_n(drawing.width)}" height="{_n(drawing.height)}"'
    view = f'viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"'
    body = "\n".join(_item(item) for item in drawing.items)
    least = f"min-width:{_n(min(0.8 * drawing.width, NARROWEST))}px"
    style = f'style="{least};max-width:min(100%,{_n(LARGEST * drawing.width)}px)"'
    return Markup(f'<svg {size} {view} {style} role="group" aria-label="{_words(drawing.label)}">\n{body}\n</svg>')


def svg_file(drawing: Drawing) -> str:
    """For a paper or a slide: light colours, text that stays text."""
    size = f'width="{_n(drawing.width)}" height="{_n(drawing.height)}"'
    view = f'viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"'
    body = "\n".join(_mark(mark, on_paper) for mark in drawing.marks())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="{_FONT}" font-size="{SIZE:g}">\n'
        f'<title>{_words(drawing.label)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _item(item: Mark | Shape) -> str:
    if not isinstance(item, Shape):
        return _mark(item)
    value = "" if item.value is None else f' data-value="{float(item.value)!r}"'
    spoken = _words(item.tip.replace("\n", "; "))
    marks = "".join(_mark(mark) for mark in item.marks)
    head = f'<g class="shape" data-row="{item.row}" role="img" aria-label="{spoken}"{value}>'
    return f"{head}<title>{_words(item.tip)}</title>{marks}</g>"


def _themed(role: str) -> str:
    return f"var(--{role if role in COLOURS else 'none'})"


def _mark(mark: Mark, paint: Callable[[str], str] = _themed) -> str:
    if isinstance(mark, Rect):
        place = f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}"'
        return f'<rect class="hit" {place}/>' if mark.hit else f'<rect {place} rx="1.5" fill="{paint(mark.fill)}"/>'
    if isinstance(mark, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
        dash = ' stroke-dasharray="3 3"' if mark.dashed else ""
        stroke = f'stroke="{paint(mark.colour)}" stroke-width="{_n(mark.width)}"'
        return f'<polyline points="{points}" fill="none" {stroke}{dash}/>'
    if isinstance(mark, Dot):
        look = f'fill="{paint("card" if mark.hollow else mark.colour)}" stroke="{paint(mark.colour)}"'
        return f'<circle cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}" {look}/>'
    return _text(mark, paint(mark.colour))


def _text(mark: Text, colour: str) -> str:
    place = f'x="{_n(mark.x)}" y="{_n(mark.y)}"'
    if mark.turn:
        place += f' transform="rotate({_n(-mark.turn)} {_n(mark.x)} {_n(mark.y)})"'
    look = f'text-anchor="{mark.anchor}" fill="{colour}"'
    look += f' font-size="{_n(mark.size)}"' if mark.size != SIZE else ""
    look += ' font-weight="600"' if mark.bold else ""
    return f"<text {place} {look}>{_words(mark.text)}</text>"


def _words(text: str) -> str:
    return str(escape(visible(text, keep="\n")))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


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
