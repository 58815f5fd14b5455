"""A verdict of locate for people: a document with a picture of what was judged, and the same as plain lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from noisescope.findings.finding import counted
from noisescope.localization.coverage import BACKWARD, Coverage
from noisescope.localization.resolution import in_one_line, percent_of
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.reports import document
from noisescope.reports.document import (
    Block,
    Bullets,
    Cell,
    Details,
    Document,
    Paragraph,
    Section,
    StatusGrid,
    Table,
)
from noisescope.reports.html import to_html
from noisescope.reports.markdown import to_markdown
from noisescope.sites import FUSED, OPERATORS, Place, Site, place_order

TITLE = "noisescope locate"
MOST_SUSPECTS = 5
MOST_NUMBERS = 8  # channels or rows that are listed
_TONES = {"healthy": "low", "faulty": "critical", "undecided": "unsure"}
_LEGEND = (
    ("low", "🟦", "judged, no fault"),
    ("critical", "🟥", "suspect"),
    ("moderate", "🟨", "judged in part"),
    ("unsure", "⬜", "not judged"),
)
ULP = (
    "ulp: unit in the last place, the spacing of numbers in the output's dtype (relative to the number about 1e-7 in "
    "float32, 0.001 in float16, 0.008 in bfloat16). element: one wrong number; mean: a shift of all numbers of an "
    "output; gain: a relative change of all of them. Smaller faults could not be detected"
)
RMS = "sizes by relations are relative to the rms of an output; any: a single bit shows"


def as_text(verdict: Verdict, suffix: str, facts: Iterable[tuple[str, str]] = ()) -> str:
    """The verdict as .md or .html."""
    made = verdict_document(verdict, facts)
    return to_html(made) if suffix.lower() == ".html" else to_markdown(made)


def verdict_document(verdict: Verdict, facts: Iterable[tuple[str, str]] = ()) -> Document:
    """Verdict and suspects first, the picture, then what ran, what did not, and what could have been seen.

    `facts` are pairs of name and text, such as the model and the device.
    """
    level = Cell(verdict.verdict, tone=_TONES[verdict.verdict])
    said = verdict.headline.removeprefix(f"{verdict.verdict}: ")
    first: list[Block] = [document.Verdict(level, said, name="Verdict")]
    if verdict.suspects:
        named = (Paragraph("; ".join(lines), f"{lead}.") for lead, *lines in _suspects(verdict))
        first.append(Bullets(tuple(named), numbered=True))
    pictures = tuple(picture for picture in (grid(verdict), grid(verdict, BACKWARD)) if picture.rows)
    pages = [Section("picture", "Blocks and operators", pictures)] if pictures else []
    pages += [
        Section(key, title, (_bullets(lines), *([_resolution(verdict)] if key == "resolution" else [])))
        for key, title, lines in _sections(verdict)
        if lines
    ]
    facts = (*facts, ("Method", _method(verdict)))
    return Document(TITLE, facts, (Section("summary", "Summary", tuple(first)), *pages))


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """The same text, for a terminal."""
    yield verdict.headline
    for number, (lead, *lines) in enumerate(_suspects(verdict), 1):
        yield f"{number}. {lead}" if number <= MOST_SUSPECTS else f"   {lead}"
        yield from (f"   {line}" for line in lines)
    yield f"method: {_method(verdict)}"
    for _, title, lines in _sections(verdict):
        if lines:
            yield f"{title.lower()}:"
            yield from (f"  {line}" for line in lines)


def _bullets(lines: Sequence[str]) -> Bullets:
    return Bullets(tuple(map(Paragraph, lines)))


def _method(verdict: Verdict) -> str:
    return f"{verdict.method}, {counted(verdict.checked, 'check')}, {verdict.forwards_in_words}"


def _sections(verdict: Verdict) -> Iterator[tuple[str, str, list[str]]]:
    """(key, title, lines)"""
    coverage = verdict.coverage
    yield "ran", "What ran", [*_ran(coverage), *([] if verdict.verdict == "faulty" else _excluded(coverage))]
    yield "not-run", "Not run", list(coverage.not_run)
    is_said = not coverage.measured or coverage.shares in verdict.headline
    yield "judged", "Judged", [] if is_said else [coverage.shares]
    not_judged = list(coverage.left_out)
    if coverage.backward is not None:
        not_judged += [f"backward of {each}" for each in coverage.backward.not_judged]
    yield "not-judged", "Not judged", not_judged
    yield "state", "State", [coverage.state] if coverage.state else []
    yield "limits", "Detection limits", list(_limits(verdict.smallest_visible))
    line = in_one_line(verdict.coverage.resolution)
    yield "resolution", "Resolution", [line] if line else []
    yield "notes", "Notes", list(verdict.notes)


def _ran(coverage: Coverage) -> list[str]:
    """Each prefill with the decode steps that follow it."""
    found: list[str] = []
    for phase in coverage.phases:
        if phase.kind == "decode" and found:
            found[-1] += f", then {counted(phase.steps, 'decode step')}"
        else:
            found.append(str(phase))
    return found


def _excluded(coverage: Coverage) -> Iterator[str]:
    if coverage.phases:
        rate = math.ceil(1000 * coverage.excluded_rate) / 10  # rounded up: it excludes no less
        yield (
            f"a fault above the detection limits that hits more than {rate:g} % of the forwards is excluded with 95 % "
            "confidence"
        )


# -- suspects


def _suspects(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Lines of each: where and what; then the evidence, and which rows and channels."""
    for suspect in verdict.suspects[:MOST_SUSPECTS]:
        sure = f", confidence {suspect.confidence:.2f}"
        of_class = f" (of the class {suspect.class_confidence:.2f})" if suspect.class_confidence else ""
        where = [words for words in (_also(suspect), _rows(suspect), _channels(suspect)) if words]
        yield f"{suspect.site}: {suspect.fault_class}{sure}{of_class}", suspect.evidence, *where
    if len(verdict.suspects) > MOST_SUSPECTS:
        yield (f"and {len(verdict.suspects) - MOST_SUSPECTS} more (the JSON form lists all)",)


def _also(suspect: Suspect) -> str:
    return f"the same at {_listed(suspect.also, 3)}" if suspect.also else ""


def _rows(suspect: Suspect) -> str:
    if suspect.row_words or not suspect.rows:
        return suspect.row_words
    return f"rows (sequence, token): {_listed(suspect.rows)}"


def _channels(suspect: Suspect) -> str:
    if suspect.period:
        return f"every {suspect.period} channels"
    return f"channels {_listed(suspect.channels)}" if suspect.channels else ""


def _listed(values: Sequence[object], most: int = MOST_NUMBERS) -> str:
    more = len(values) - most
    return ", ".join(map(str, values[:most])) + (f" and {more} more" if more > 0 else "")


# -- detection limits


def _limits(visible: Mapping[str, Any]) -> Iterator[str]:
    for name, seen in visible.items():
        yield f"{name}: {_seen(seen)}"
    kinds = [seen for seen in visible.values() if isinstance(seen, Mapping)]
    if any("element_ulp" in seen for seen in kinds):
        yield ULP
    if any(isinstance(value, Mapping) for seen in kinds for value in seen.values()):
        yield RMS


def _seen(seen: object) -> str:
    if not isinstance(seen, Mapping):
        return str(seen)
    if {"element_ulp", "mean_ulp", "gain"} <= set(seen):
        element, mean = (
            _size(value) + (" ulp" if value is not None else "") for value in (seen["element_ulp"], seen["mean_ulp"])
        )
        sites = f" ({counted(seen['sites'], 'site')})" if "sites" in seen else ""
        return f"element {element}, mean {mean}, gain {_size(seen['gain'])}{sites}"
    known = ((str(key).replace("_", " "), value) for key, value in seen.items() if value not in ([], ()))
    return ", ".join(f"{name} {_size(value)}" for name, value in known)


def _size(value: object) -> str:
    """A number; of relations the size of a class of faults, relative to the rms, where 0 is a single bit."""
    if isinstance(value, Mapping):
        size = value["size"]
        return "not visible" if size is None else "any" if size == 0 else f"{size:.2g}"
    if value is None:
        return "not visible"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _resolution(verdict: Verdict) -> Details:
    """What each class of modules was judged to, as a table that is opened on demand."""
    rows = tuple(
        (
            Cell(row.name),
            Cell(row.dtype),
            Cell(str(row.calls), row.calls),
            *map(_share, (row.smallest, row.largest)),
            Cell("") if row.driven is None else _share(row.driven),
            Cell(str(row.not_judged), row.not_judged),
        )
        for row in verdict.coverage.resolution
    )
    head = ("class", "dtype", "calls judged", "finest bound", "coarsest bound", "inside, driven", "calls not judged")
    words = f"{counted(len(rows), 'row')}: mean bound of a call's elements, relative to its output's rms"
    return Details(words, (Table("resolution", head, rows),))


def _share(value: float) -> Cell:
    return Cell("any bit" if value == 0 else percent_of(value), value)


# -- the picture


def grid(verdict: Verdict, phase: str = "forward") -> StatusGrid:
    """Places x operators: judged, suspect, or not judged; the backward has a picture of its own."""
    suffix = f", {BACKWARD}" if phase == BACKWARD else ""
    blamed: dict[tuple[Place, str], list[tuple[Site, Suspect]]] = {}
    for suspect in verdict.suspects:
        for site in (suspect.site, *suspect.also):
            if (site.phase == BACKWARD) == (phase == BACKWARD):
                blamed.setdefault((site.place, site.operator), []).append((site, suspect))
    judged = {
        (cell.place, cell.operator.removesuffix(suffix)): (cell.judged, cell.total)
        for cell in verdict.coverage.cells
        if cell.operator.endswith(f", {BACKWARD}") == bool(suffix)
    }
    known = set(judged) | set(blamed)
    places = sorted({place for place, _ in known}, key=place_order)
    order = (*OPERATORS, FUSED)
    names = {operator for _, operator in known}
    operators = [name for name in order if name in names] + sorted(names - set(order))
    cells, notes = [], []
    for place in places:
        row = [_state(blamed.get((place, name)), judged.get((place, name))) for name in operators]
        cells.append(tuple(cell for cell, _ in row))
        notes.append(tuple(note for _, note in row))
    rows = tuple(f"block {place}" if isinstance(place, int) else place for place in places)
    used = {cell.tone for row in cells for cell in row if cell}
    legend = tuple(state for state in _LEGEND if state[0] in used)
    key, title = (f"judged-{BACKWARD}", "What was judged, backward") if suffix else ("judged", "What was judged")
    return StatusGrid(key, title, rows, tuple(operators), tuple(cells), tuple(notes), legend)


def _state(blamed: Sequence[tuple[Site, Suspect]] | None, shares: tuple[int, int] | None) -> tuple[Cell | None, str]:
    """A cell, and its words for the hover."""
    if blamed:
        said = "\n".join(f"{site}: {suspect.fault_class}" for site, suspect in blamed)
        return Cell(blamed[0][1].fault_class, tone="critical"), said
    if shares is None:
        return None, ""
    judged, total = shares
    tone = "low" if judged >= total else "moderate" if judged else "unsure"
    return Cell(f"{judged} of {total}", tone=tone), f"{judged} of {total} judged"
