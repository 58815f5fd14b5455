"""Every site of two records side by side, and whether it parts: differs by more than what came in explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noisescope.comparison.measures import (
    LEAST_FOR_GAIN,
    Array,
    Measures,
    Sketch,
    Sums,
    common_gain,
    from_sketches,
    plain,
)
from noisescope.comparison.records import Batch, Record, name_of
from noisescope.errors import InvalidInput
from noisescope.findings import GAIN_ROUND_OFF, LIMITS, ROUND_OFF, band
from noisescope.sites import Place, Site

_MOST_NAMED = 8  # sites in a note
_FUSED = "attention"  # the operator of a fused call


@dataclass(frozen=True)
class Row:
    """One site on both sides."""

    site: Site
    measures: Measures
    expected: float  # relative L2 that comes in, or that round-off makes: what a healthy site may have, up to a factor
    expected_gain: float  # the same of the gain's size

    @property
    def parts(self) -> bool:
        return self.too_far or self.too_large

    @property
    def too_far(self) -> bool:
        return (self.measures.relative_l2 or 0.0) > LIMITS["parting_factor"] * self.expected

    @property
    def too_large(self) -> bool:
        """Or too small: by a gain, which errors at random don't have, however large they have grown."""
        return abs(self.measures.gain or 0.0) > LIMITS["parting_factor"] * self.expected_gain

    def to_dict(self) -> dict[str, Any]:
        found = self.measures
        return {
            "place": self.site.place,
            "operator": self.site.operator,
            "module": self.site.module,
            **found.to_dict(),
            "bands": {
                "mae": band("mae", found.mae),
                "mape": band("mape", found.mape),
                "pearson": band("pearson", found.pearson),
            },
            "expected": self.expected,
            "expected_gain": self.expected_gain,
            "parts": self.parts,
            "critical": found.nonfinite > 0,
            "detail": "full" if found.elements else "sketch",
        }


@dataclass(frozen=True)
class Measured:
    """Every site that both records have, in the order of the first."""

    found: tuple[tuple[Site, Measures], ...]
    sums: dict[Site, Sums]  # of sites with whole tensors on both sides
    uncompared: tuple[Site, ...]  # lacking on one side, of another shape, or whole here and sketched there
    sites: int  # of either record


def measured(a: Record, b: Record, notes: list[str]) -> Measured:
    """Measures from whole tensors where both sides have them, else from sketches."""
    theirs = {name_of(site): number for number, site in enumerate(b.sites)}
    left, right = sketched(a), sketched(b)
    numbers = a.numbers()
    found: list[tuple[Site, Measures]] = []
    by_site: dict[Site, Sums] = {}
    uncompared = [*_lacking(a, b), *_lacking(b, a)]
    for number, site in enumerate(a.sites):
        other = theirs.get(name_of(site))
        if other is None:
            continue
        sums = _summed(a, b, number, other)
        pair = None if left is None or right is None else (left[number], right[other])
        if sums is not None:
            by_site[site] = sums
            whole = sums.measures()
            gain = None if pair is None or not whole.measurable else common_gain(*pair)
            found.append((site, replace(whole, gain=gain)))
        elif pair is not None:
            found.append((site, from_sketches(*pair, numbers)))
        else:
            uncompared.append(site)
    if _alone(a, b) or _alone(b, a):
        notes.append(f"{len(found)} sites are compared; {a.path} has {len(a.sites)}, {b.path} has {len(b.sites)}")
    if not found:
        raise InvalidInput("the records share sites, but no tensor of the same shape: were other inputs given?")
    if uncompared:
        named = ", ".join(map(str, uncompared[:_MOST_NAMED])) + (" ..." if len(uncompared) > _MOST_NAMED else "")
        notes.append(f"{len(uncompared)} sites are not compared, as one side lacks them or has another shape: {named}")
    if left is not None and right is not None and numbers < LEAST_FOR_GAIN:
        notes.append(
            f"a gain can't be told from sketches of {numbers} numbers, {LEAST_FOR_GAIN} are needed: record more "
            "--samples, 4 of them or more"
        )
    return Measured(tuple(found), by_site, tuple(uncompared), len(a.sites) + len(_alone(b, a)))


def _alone(a: Record, b: Record) -> list[Site]:
    """Sites that a has and b has not."""
    theirs = set(map(name_of, b.sites))
    return [site for site in a.sites if name_of(site) not in theirs]


def _lacking(a: Record, b: Record) -> list[Site]:
    """Sites of a that b ought to have.

    Calls of fused attention are none where b takes attention apart throughout. A dump of another tool has modules
    that no record has (whole MLPs, tables of angles); what noisescope records of a model, it records every time.
    """
    if a.sketch is None and b.sketch is not None:
        return []
    taken_apart = all(site.operator != _FUSED for site in b.sites)
    return [site for site in _alone(a, b) if not (taken_apart and site.operator == _FUSED)]


def sketched(record: Record) -> list[Sketch] | None:
    """The sketch of each site; None where there are none (another tool's dump)."""
    numbers, norms = record.sketches(), record.sizes()
    return None if numbers is None or norms is None else list(zip(numbers, norms, strict=True))


def _summed(a: Record, b: Record, number: int, other: int) -> Sums | None:
    """Sums over whole tensors; None where one side has only a sketch, or another shape."""
    if a.count != b.count:
        return None
    sums = Sums()
    for batch in a.batches:
        pair = _pair(a, b, number, other, batch)
        if pair is None:
            return None
        sums.add(batch.first, *pair)
    for left, right, _ in filter(None, (_pair(a, b, number, other, batch) for batch in a.batches)):
        sums.add_percent(left, right)
    return sums


def _pair(a: Record, b: Record, number: int, other: int, batch: Batch) -> tuple[Array, Array, str] | None:
    """A batch's tensors on both sides in float64, and the dtype they had."""
    mine, its = a.whole(number, batch.first, batch.count), b.whole(other, batch.first, batch.count)
    if mine is None or its is None or mine.values.shape != its.values.shape:
        return None
    return np.asarray(mine.values, dtype=np.float64), np.asarray(its.values, dtype=np.float64), mine.dtype


@dataclass
class _CameIn:
    """The largest of one figure at the place before and at this place so far; not under what round-off makes."""

    floor: float
    before: float = 0.0
    here: float = 0.0

    @property
    def expected(self) -> float:
        return max(self.floor, self.before, self.here)

    def next_place(self) -> None:
        self.before, self.here = self.here, 0.0

    def add(self, value: float | None) -> None:
        size = abs(value or 0.0)
        self.here = max(self.here, size if math.isfinite(size) else 1.0)


def round_off(dtype: str) -> tuple[float, float]:
    """The relative L2, and the gain, that the round-off of one operator may make."""
    known = dtype if dtype in ROUND_OFF else "float32"
    return ROUND_OFF[known], GAIN_ROUND_OFF[known]


def judged(measured: Iterable[tuple[Site, Measures]], dtype: str) -> Iterator[Row]:
    """Each site against what came in: the largest error of the place before it, and of its own place so far.

    Sites of the place before have the same operators, so what those amplify in a healthy model is known from there. A
    site where nothing finite is left on either side does not part, and tells nothing of what came in.

    The error is looked at twice: by its size, and for a gain, which round-off does not have, however far it piled up.
    """
    size, gain = round_off(dtype)
    sizes, gains = _CameIn(size), _CameIn(gain)
    place: Place | None = None
    for site, found in measured:
        if site.place != place:
            place = site.place
            sizes.next_place()
            gains.next_place()
        yield Row(site, found, sizes.expected, gains.expected)
        sizes.add(found.relative_l2)
        gains.add(found.gain)


def piled_up(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The error that has piled up in each block's output, and the block's factor."""
    last: float | None = None
    for row in rows:
        if row.site.operator != "residual":
            continue
        size = plain(row.measures.relative_l2)
        growth = size / last if size is not None and last else None
        yield {"layer": row.site.place, "relative_l2": size, "growth": growth}
        last = size
