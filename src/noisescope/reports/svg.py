"""A drawing as SVG: inside a page, whose theme gives the colours, or as a file of its own."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup, escape

from noisescope.reports.drawing import SIZE, Dot, Drawing, Line, Mark, Rect, Shape, Text
from noisescope.reports.palette import COLOURS, on_paper
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
