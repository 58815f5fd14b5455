"""How small an error could be detected for each class of modules: the tolerances used, relative to output size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST = 0.05  # of an output's rms: a call whose bounds are wider on average is not judged


@dataclass(frozen=True)
class Resolution:
    """One class of modules, or one function, in one dtype.

    The bound of a call is the average tolerance of its elements relative to the rms of its output: larger errors are
    detected. 0 is a single bit.
    """

    name: str
    dtype: str
    calls: int
    smallest: float  # bound of a call
    largest: float
    driven: float | None = None  # relative error inside the operator, where it was driven with synthetic inputs
    not_judged: int = 0  # calls whose bounds were too wide

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class ResolutionTable:
    """Collects the tolerances of an audit."""

    _bounds: dict[tuple[str, str], list[tuple[float, bool]]] = field(default_factory=dict)  # and whether it was judged
    _driven: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, name: str, dtype: object, bound: float, *, equal: bool = False) -> bool:
        """Whether a call with this tolerance is judged; one whose bits `equal` the host's always is."""
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
    """The coarsest class, for a terminal; empty if nothing was judged by tolerances."""
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
    """A share, to two digits: "0.84 %", "100 %"."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
