"""A document as Markdown. Charts are left out: the table beside each holds the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.reports.document import Block, Bullets, Document, HeatMap, Paragraph, StatusGrid, Table, Verdict


def to_markdown(document: Document) -> str:
    lines = [f"# {document.title}", ""]
    lines += [f"**{name}**: {escape(text)}  " for name, text in document.facts]
    for section in document.sections:
        lines += ["", f"## {section.title}"]
        for block in section.blocks:
            if drawn := list(_block(block)):
                lines += ["", *drawn]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> Iterable[str]:
    if isinstance(block, Verdict):
        yield f"**{block.name}: {block.level.text}**" + (f" - {escape(block.meaning)}" if block.meaning else "")
        yield from ["", *(f"- {escape(reason)}" for reason in block.reasons)] if block.reasons else []
    elif isinstance(block, Paragraph):
        yield _paragraph(block)
    elif isinstance(block, Bullets):
        yield from (f"{f'{i}.' if block.numbered else '-'} {_paragraph(item)}" for i, item in enumerate(block.items, 1))
    elif isinstance(block, Table):
        yield from [f"### {block.caption}", ""] if block.caption else []
        yield from table(block.head, ((cell.text for cell in row) for row in block.rows))
    elif isinstance(block, StatusGrid):
        yield from _block(block.as_table())
        yield from ["", ", ".join(f"{sign} {words}" for _, sign, words in block.legend)]
    elif isinstance(block, HeatMap):
        yield from [f"### {block.title} ({'; '.join(heat_words(block))})", ""]
        rows = zip(block.rows, block.cells, strict=True)
        yield from table(["", *block.columns], ([name, *(c.text if c else "" for c in cells)] for name, cells in rows))


def heat_words(block: HeatMap) -> list[str]:
    """The unit of a heat map, and what a star in it means."""
    return [word for word in (block.unit, block.legend and f"* {block.legend}") if word]


def _paragraph(paragraph: Paragraph) -> str:
    return (f"**{escape(paragraph.lead)}** " if paragraph.lead else "") + escape(paragraph.text)


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(escape(text) for text in row) + " |" for row in body]


def escape(text: str) -> str:
    """Text that can't break a table or become markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
