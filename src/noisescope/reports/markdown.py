"""A document as Markdown, the plainest form. Charts are left out, for the table beside each holds the same numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from noisescope.reports.document import (
    Block,
    Bullets,
    Cell,
    Columns,
    Command,
    Details,
    Document,
    HeatMap,
    HeatTable,
    Paragraph,
    StatusGrid,
    Table,
    Verdict,
    numeric_columns,
)
from noisescope.text_escaping import markdown, one_line

SHADES = "▁▂▃▄▅▆▇█"


def to_markdown(document: Document) -> str:
    lines = [f"# {markdown(document.title)}", ""]
    lines += [f"**{markdown(name)}**: {markdown(text)}  " for name, text in document.facts]
    lines += _spaced([Command(document.command)] if document.command else [])
    for section in document.sections:
        drawn = list(_spaced(section.blocks)) or ["", "The charts are in the HTML and PDF reports."]
        lines += ["", f"## {markdown(section.title)}", *drawn]
    return "\n".join(lines).rstrip() + "\n"


def _spaced(blocks: Iterable[Block]) -> Iterable[str]:
    for block in blocks:
        if drawn := list(_block(block)):
            yield from ["", *drawn]


def _block(block: Block) -> Iterable[str]:
    if isinstance(block, Verdict):
        word = markdown(f"{block.name}: {block.level.text}")
        yield f"**{word}**" + (f" - {markdown(block.meaning)}" if block.meaning else "")
        mark = "- " if len(block.reasons) > 1 else ""
        yield from ["", *(f"{mark}{markdown(why, starts_line=True)}" for why in block.reasons)] if block.reasons else []
    elif isinstance(block, Paragraph):
        yield _paragraph(block)
    elif isinstance(block, Bullets):
        yield from (f"{f'{i}.' if block.numbered else '-'} {_paragraph(item)}" for i, item in enumerate(block.items, 1))
    elif isinstance(block, Table):
        yield from [f"### {markdown(block.caption)}", ""] if block.caption else []
        yield from table(block.head, ((cell.text for cell in row) for row in block.rows), numeric_columns(block))
    elif isinstance(block, HeatMap):
        yield from _text_map(block)
    elif isinstance(block, HeatTable):
        yield from _block(block.heat.as_table())
    elif isinstance(block, StatusGrid):
        yield from _block(block.as_table())
        yield from ["", markdown(", ".join(f"{sign} {words}" for _, sign, words in block.legend), starts_line=True)]
    else:
        yield from _nested(block)


def _nested(block: Block) -> Iterable[str]:
    if isinstance(block, Command):
        yield from [markdown(block.words, starts_line=True), ""] if block.words else []
        yield from ["```", one_line(block.text).replace("`", "'"), "```"]
    elif isinstance(block, Details):
        yield f"<details><summary>{html.escape(one_line(block.title))}</summary>"
        yield from [*_spaced(block.blocks), "", "</details>"]
    elif isinstance(block, Columns):
        for number, panel in enumerate(block.panels):
            yield from [*([""] if number else []), f"### {markdown(panel.title)}"] if panel.title else []
            yield from _spaced(panel.blocks)


def _text_map(heat: HeatMap) -> Iterable[str]:
    """The map as a picture of letters: a column for each layer, a row for each operator, taller is more."""
    values = [cell.value for row in heat.cells for cell in row if cell and cell.value and cell.value > 0]
    if not values:
        return
    low, high = math.log10(min(values)), math.log10(max(values))

    def shade(cell: Cell | None) -> str:
        if cell is None or cell.value is None:
            return "·"
        share = 1.0 if high == low else (math.log10(max(cell.value, min(values))) - low) / (high - low)
        return SHADES[min(len(SHADES) - 1, int(len(SHADES) * share))]

    names = [one_line(name)[:16].replace("`", "'") for name in heat.columns]
    width, places = max(6, *map(len, names)), range(len(heat.rows))
    tens = "".join(str(place // 10) if place % 10 == 0 else " " for place in places)
    yield from ["```", f"{'layer':<{width}} {tens.rstrip()}"]
    yield f"{'':<{width}} {''.join(str(place % 10) for place in places)}"
    for at, name in enumerate(names):
        yield f"{name:<{width}} {''.join(shade(row[at]) for row in heat.cells)}".rstrip()
    scale = f"{heat.title}, {min(values):.2g} to {max(values):.2g} {heat.unit} (log scale); · marks no such site."
    yield from ["```", "", markdown(scale, starts_line=True)]


def _paragraph(paragraph: Paragraph) -> str:
    words = f"{paragraph.text} ({paragraph.note})" if paragraph.note else paragraph.text
    lead = f"[{paragraph.tag.text}] {paragraph.lead}" if paragraph.tag.text else paragraph.lead
    return f"**{markdown(lead)}** {markdown(words)}" if lead else markdown(words, starts_line=True)


def table(head: Iterable[str], body: Iterable[Iterable[str]], right: Sequence[bool] = ()) -> list[str]:
    """`right` says which columns are set to the right."""
    head = [markdown(name) for name in head]
    rules = ("---:|" if at < len(right) and right[at] else "---|" for at in range(len(head)))
    lines = ["| " + " | ".join(head) + " |", "|" + "".join(rules)]
    return lines + ["| " + " | ".join(map(markdown, row)) + " |" for row in body]
