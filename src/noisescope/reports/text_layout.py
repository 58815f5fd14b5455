"""Text before it is drawn: what a font can spell, where lines break, how wide the columns of a table are."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import matplotlib
from matplotlib.ft2font import FT2Font

from noisescope.reports.palette import on_paper
from noisescope.text_escaping import one_line

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
LAST_RESORT = FONTS / "LastResortHE-Regular.ttf"  # a sign for every character; matplotlib brings it since 3.11
INK, QUIET = on_paper("text"), on_paper("muted")
PAD, RISE = 1.5, 0.8  # mm beside and above the text of a table's cell
LONG = 32  # characters: a longer word may be broken in a table before the text shrinks
# What stays on one line if it can: an interval in brackets, a number with its %, "n = 20".
_ATOM = re.compile(r"[^\s\[]*\[[^\[\]]{0,40}\]\S*|[-+.\de]+ %\S*|\S+ = \S+|\S+")
_BREAKS = (r"(?= )", r"(?<=[./\\:,=-])", r"(?<=_)", r"(?<=\S)")  # where it breaks if it can't: best first


def printable(text: str) -> str:
    """One line of characters that PDF and our fonts can hold; what no font has becomes a replacement sign."""
    line = one_line(text)
    return line if LAST_RESORT.exists() else "".join("\ufffd" if char in foreign(line) else char for char in line)


def foreign(text: str) -> set[str]:
    """The characters that DejaVu Sans has no sign for: Chinese, most emoji."""
    return {char for char in text if ord(char) not in _dejavu()}


@functools.cache
def _dejavu() -> frozenset[int]:
    """What both the regular and the bold font can spell."""
    regular, bold = (FT2Font(str(FONTS / name)).get_charmap() for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"))
    return frozenset(regular) & frozenset(bold)


@dataclass(frozen=True)
class Run:
    """Text in one style; `ground` is the colour behind it."""

    text: str
    bold: bool = False
    colour: str = INK
    ground: str = ""


Line: TypeAlias = list[Run]
Content: TypeAlias = Sequence[Run]  # of a table's cell, before it is broken into lines


def leading(size: float) -> float:
    """The height in mm of a line of text of this size in points."""
    return size * 25.4 / 72 * 1.32


@dataclass(frozen=True)
class Grid:
    """Of a table: the size of its text, its columns' widths without padding, where flush ones end (None: left)."""

    size: float
    widths: Sequence[float]
    edges: Sequence[float | None]

    @property
    def width(self) -> float:
        return sum(self.widths) + 2 * PAD * len(self.widths)

    def height(self, cells: Sequence[Sequence[Line]]) -> float:
        """Of a row, from the lines of its cells."""
        return max(map(len, cells)) * leading(self.size) + 2 * RISE


@dataclass(frozen=True)
class Ruler:
    """Measures and breaks text. `advances` has the width of each (character, bold) in mm at 1 point."""

    advances: Mapping[tuple[str, bool], float]

    def measure(self, line: Iterable[Run], size: float = 1.0) -> float:
        return size * sum(self.advances[char, run.bold] for run in line for char in run.text)

    def wrap(self, runs: Iterable[Run], width: float, size: float) -> list[Line]:
        """Lines no wider than `width`. A word that is too wide breaks after a dot or the like, at worst anywhere."""
        lines: list[Line] = [[]]
        used = 0.0
        for run in runs:
            atoms = (replace(run, text=f" {atom}") for atom in _ATOM.findall(printable(run.text)))
            for piece in (piece for atom in atoms for piece in self._pieces(atom, width, size)):
                if lines[-1] and used + self.measure([piece], size) > width + 1e-6:
                    lines.append([])
                    used = 0.0
                line = lines[-1]
                piece = piece if line else replace(piece, text=piece.text.lstrip())
                if line and replace(line[-1], text=piece.text) == piece:
                    line[-1] = replace(piece, text=line[-1].text + piece.text)
                else:
                    line.append(piece)
                used += self.measure([piece], size)
        return lines

    def _pieces(self, run: Run, width: float, size: float, breaks: Sequence[str] = _BREAKS) -> Iterable[Run]:
        """What may stand alone on a line; the space before it falls away there."""
        if not breaks or self.measure([replace(run, text=run.text.lstrip())], size) <= width:
            yield run
            return
        for part in filter(None, re.split(breaks[0], run.text)):
            yield from self._pieces(replace(run, text=part), width, size, breaks[1:])

    def fit(self, rows: Sequence[Sequence[Content]], room: float, sizes: Sequence[float]) -> tuple[float, list[float]]:
        """The size of a table's text and the widths of its columns in mm, together at most `room`.

        The first size at which every row is one line, if that is 7 points or more; else the first at which no number
        or short word is broken; else the last.
        """
        cleaned = [[[replace(run, text=printable(run.text)) for run in cell] for cell in row] for row in rows]
        columns = list(zip(*cleaned, strict=True))
        space = self.measure([Run(" ")])
        wants = [max(self.measure(cell) + space * (len(cell) - 1) for cell in column) for column in columns]
        needs = [max(self._need(run) for cell in column for run in cell) for column in columns]
        single = (size for size in sizes if size >= 7 and size * sum(wants) <= room)
        size = next(single, None) or next((size for size in sizes if size * sum(needs) <= room), sizes[-1])
        wants, needs = [size * want for want in wants], [size * need for need in needs]
        if sum(wants) <= room:
            return size, [want + min((room - sum(wants)) / len(wants), 5) for want in wants]
        if sum(needs) > room:
            return size, [need * room / sum(needs) for need in needs]
        amounts = [math.sqrt(sum(self.measure(cell) for cell in column)) for column in columns]
        low, high = 0.0, room  # bisected: each gets a width that goes with its amount of text, between need and want
        for _ in range(40):
            share = (low + high) / 2
            limits = zip(needs, wants, amounts, strict=True)
            total = sum(max(need, min(want, share * amount)) for need, want, amount in limits)
            low, high = (share, high) if total <= room else (low, share)
        limits = zip(needs, wants, amounts, strict=True)
        return size, [max(need, min(want, low * amount)) for need, want, amount in limits]

    def _need(self, run: Run) -> float:
        """The widest thing in it that should not be broken, at 1 point."""
        atoms = _ATOM.findall(run.text)
        return max((self.measure([replace(run, text=atom)]) * min(1, LONG / len(atom)) for atom in atoms), default=0.0)

    def column(self, cells: Sequence[Content], width: float, size: float) -> list[list[Line]]:
        """The lines of each cell. If one interval must stand under its value, all of them do."""
        whole = [self.wrap(cell, width, size) for cell in cells]
        if all(len(lines) == 1 for lines, cell in zip(whole, cells, strict=True) if len(cell) > 1):
            return whole
        return [[line for run in cell for line in self.wrap([run], width, size)] for cell in cells]
