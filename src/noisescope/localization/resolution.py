"""How small an error of each class of modules was judged: the bounds that were used, against the size of outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST = 0.05  # of an output's rms: a call whose bounds are wider on average is not judged


@dataclass(frozen=True)
class Resolution:
    """One class of modules, or one function, in one dtype.

    The bound of a call is how far its elements may be off, on average, relative to the rms of its output: what is off
    by more shows. 0 is a single bit.
    """

    name: str
    dtype: str
    calls: int
    smallest: float  # bound of a call
    largest: float
    driven: float | None = None  # relative error inside the operator, where it was driven with made-up inputs
    not_judged: int = 0  # calls whose bounds were too wide

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class ResolutionTable:
    """Collects the bounds of an audit."""

    _bounds: dict[tuple[str, str], list[tuple[float, bool]]] = field(default_factory=dict)  # and whether it was judged
    _driven: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, name: str, dtype: object, bound: float, *, equal: bool = False) -> bool:
        """Whether a call with this bound is judged; one whose bits are `equal` to the host's is, whatever the bound."""
        judged = equal or bound <= MOST
        self._bounds.setdefault((name, _short(dtype)), []).append((bound, judged))
        return judged

    def add_driven(self, name: str, dtype: object, error: float) -> None:
        key = name, _short(dtype)
        self._driven[key] = max(error, self._driven.get(key, 0.0))

    def rows(self) -> tuple[Resolution, ...]:
        """The coarsest first."""
        found = []
        for (name, dtype), bounds in self._bounds.items():
            judged = [bound for bound, was in bounds if was]
            shown = judged or [bound for bound, _ in bounds]
            driven, coarse = self._driven.get((name, dtype)), len(bounds) - len(judged)
            found.append(Resolution(name, dtype, len(judged), min(shown), max(shown), driven, coarse))
        return tuple(sorted(found, key=lambda row: (-row.largest, row.name, row.dtype)))


def too_coarse(bound: float) -> str:
    """Why a call is not judged."""
    return f"rounding may explain {percent_of(bound)} of its output, so a smaller fault would not be detected"


def in_one_line(rows: Iterable[Resolution]) -> str:
    """The coarsest class, for a terminal; empty where nothing was judged by bounds."""
    judged = [row for row in rows if row.calls]
    if not judged:
        return ""
    worst = max(judged, key=lambda row: row.largest)
    exact = sum(row.largest == 0 for row in judged)
    said = f"{exact} of {len(judged)} kinds of calls are checked bit for bit"
    said += (
        f"; in the others, errors below {percent_of(worst.largest)} of the output can hide in rounding"
        if worst.largest
        else ""
    )
    said += f" (worst: {worst.name} in {worst.dtype})" if worst.largest else ""
    driven = [row.driven for row in judged if row.driven is not None]
    return said + (f"; inside 16-bit operators, errors below {percent_of(max(driven))} can hide" if driven else "")


def percent_of(share: float) -> str:
    """A small share, to two digits: "0.84 %"."""
    return f"{100 * share:.2g} %"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
