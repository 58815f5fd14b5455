"""A locator's verdict: healthy, faulty or undecided; where; the kind of fault; the confidence; the detection limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noisescope.errors import unknown
from noisescope.localization.coverage import Cell, Coverage, percent
from noisescope.sites import Site
from noisescope.tables import Sheet, Table, Tabular

VERDICTS = ("healthy", "faulty", "undecided")
_COLUMNS = (
    "place", "operator", "module", "tensor", "phase", "occurrence", "fault_class", "class_confidence", "confidence",
    "score", "channels", "period", "rows", "row_words", "also", "evidence",
)  # fmt: skip
_TONES = {"healthy": "low", "faulty": "critical", "undecided": "moderate"}

# What a fault does to the numbers, as far as a locator can tell one from another.
CLASSES = (
    "noise",  # differs from run to run
    "spike",  # a few elements are far off
    "dead zone",  # small values become 0
    "flush to zero",  # subnormals become 0
    "saturation",  # large values are cut
    "bias",  # a constant is added
    "gain",  # multiplied by a constant
    "stuck bit",
    "dead lane",  # output channels that are 0 or constant
    "dead input lane",  # a part of the inner dimension is not summed
    "swapped channels",
    "truncation",  # output mantissa cut short
    "rounding mode",
    "accumulation",  # sums kept in too few bits
    "function table",  # exp, rsqrt, sigmoid approximated badly
    "stale data",  # values of an earlier call, or of another row
    "nan to zero",
    "block scale",  # a shared exponent or block scale is wrong
    "tile",  # a rectangle of rows and channels
    "tail",  # the last rows or channels
    "batch",  # some sequences of a batch, such as all after the first
    "rows",  # some tokens
    "mask",  # attention sees keys that it should not, or not those that it should
    "position",  # keys, values or angles of another position
    "unknown",
)


@dataclass(frozen=True)
class Suspect:
    """One place under suspicion, and those beside it with the same fault.

    channels: indices of the last dimension, () for all; `period` is a lane stride
    rows: (sequence, token) of wrong rows, () for more than half of them, or where rows are no tokens; `row_words` says
        which rows in words, also where there are more
    """

    site: Site
    fault_class: str
    confidence: float  # 0 to 1, that something is wrong here
    evidence: str  # one sentence with its numbers
    score: float  # what suspects are ranked by within one locator
    channels: tuple[int, ...] = ()
    period: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    class_confidence: float = 0.0  # 0 to 1, that the class is right, given that something is wrong
    rows: tuple[tuple[int, int], ...] = ()
    row_words: str = ""
    also: tuple[Site, ...] = ()  # other places with the same fault, such as one kernel's in every layer

    def __post_init__(self) -> None:
        if self.fault_class not in CLASSES:
            raise unknown("fault class", self.fault_class, CLASSES)

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.site.place,
            "operator": self.site.operator,
            "module": self.site.module,
            "tensor": self.site.tensor,
            "phase": self.site.phase,
            "occurrence": self.site.occurrence,
            "channels": list(self.channels),
            "period": self.period,
            "rows": [list(row) for row in self.rows],
            "row_words": self.row_words,
            "fault_class": self.fault_class,
            "class_confidence": self.class_confidence,
            "confidence": self.confidence,
            "evidence": self.evidence,
            "score": self.score,
            "also": [str(site) for site in self.also],
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class Verdict(Tabular):
    """A locator's complete answer; suspects are ranked, the likeliest first."""

    verdict: str
    method: str
    suspects: tuple[Suspect, ...] = ()
    smallest_visible: Mapping[str, Any] = field(default_factory=dict)  # what this run could have seen, by kind
    forwards: float = 0.0  # forward-equivalents on the device
    checked: int = 0  # sites or relations tested: the multiplicity behind the threshold
    notes: tuple[str, ...] = ()
    unseen: tuple[Site, ...] = ()  # operators that could not be judged: with them, no verdict is "healthy"
    coverage: Coverage = field(default_factory=Coverage)  # what ran and what was judged

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise unknown("verdict", self.verdict, VERDICTS)

    @property
    def headline(self) -> str:
        """The verdict with its coverage, in one sentence: "healthy" never covers what was not checked."""
        coverage = self.coverage
        if self.verdict == "faulty":
            return f"faulty: {self._blamed()}"
        if self.verdict == "healthy" and not coverage.measured:
            return f"healthy: no fault in {self.checked} checks ({self.method}); this method does not measure coverage"
        if self.verdict == "healthy" and coverage.enough:
            return f"healthy: no fault in {coverage.ran}; {coverage.shares} judged{coverage.exceptions}"
        if coverage.measured and not coverage.enough and coverage.smallest_share > 0 and not self.suspects:
            judged = percent(coverage.smallest_share)
            return f"no fault in the {judged} that was judged ({coverage.shares}), in {coverage.ran}"
        return f"undecided: {self._open()}"

    def _blamed(self) -> str:
        if not self.suspects:
            return "something computes wrongly, but no single place stands out"
        first, *others = self.suspects
        places = {(each.place, each.operator, each.module, each.tensor) for each in (first.site, *first.also)}
        also = f" and {len(places) - 1} more place{'s' * (len(places) > 2)}" if len(places) > 1 else ""
        more = f"; {len(others)} more suspect{'s' * (len(others) > 1)}" if others else ""
        return f"{first.site}{also}: {first.fault_class}{more}"

    def _open(self) -> str:
        """Why nothing could be decided."""
        if self.unseen:
            more = f" and {len(self.unseen) - 1} more" if len(self.unseen) > 1 else ""
            return f"{self.unseen[0]}{more} could not be judged"
        if self.suspects and self.suspects[0].fault_class == "unknown":
            return f"possible, but not certain: {self.suspects[0].site}: {self.suspects[0].evidence}"
        if self.suspects:
            return f"possible, but not certain: {self._blamed()}"
        if self.coverage.measured and not self.coverage.enough:
            return f"{self.coverage.shares} could be checked, in {self.coverage.ran}"
        if self.coverage.never_decoded:
            return f"the model can't decode: {self.coverage.in_part[0]}"
        return self.notes[0] if self.notes else "the evidence is not sufficient"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "method": self.method,
            "suspects": [suspect.to_dict() for suspect in self.suspects],
            "smallest_visible": dict(self.smallest_visible),
            "forwards": self.forwards,
            "checked": self.checked,
            "notes": list(self.notes),
            "unseen": [str(site) for site in self.unseen],
            "coverage": self.coverage.to_dict(),
        }

    @property
    def forwards_in_words(self) -> str:
        number = f"{self.forwards:.1f}".removesuffix(".0")
        return f"{number} forward{'s' * (number != '1')}"

    def sheet(self) -> Sheet:
        found = [suspect.to_dict() for suspect in self.suspects]
        suspects = Table(_COLUMNS, tuple(tuple(row[name] for name in _COLUMNS) for row in found))
        heads = {"place": "place", "operator": "operator", "module": "module", "fault_class": "kind of fault"}
        heads |= {"confidence": "confidence", "evidence": "evidence"}
        not_run = f"Not run: {'; '.join(self.coverage.not_run)}" if self.coverage.not_run else ""
        left = () if self.verdict == "healthy" else self.coverage.left_out  # a healthy model's headline names it
        not_judged = f"Not judged: {'; '.join(left)}" if left else ""
        lines = (f"{self.method}, {self.forwards_in_words}, {self.checked:,} checks.", not_run, not_judged, *self.notes)
        tables = {"suspects": suspects, "coverage": Table.of(Cell, self.coverage.cells)}
        return Sheet(self.headline, tables, heads, tuple(filter(None, lines)), tone=_TONES[self.verdict])


def ranked(suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """The highest score first; ties in model order."""
    return tuple(sorted(suspects, key=lambda suspect: -suspect.score))
