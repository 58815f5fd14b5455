"""Compares every site of two records, and finds those that diverge: by more than the error of their inputs explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from noisescope.comparison.measures import (
    LEAST_FOR_GAIN,
    Array,
    ErrorSums,
    Measures,
    Sketch,
    common_gain,
    from_sketches,
)
from noisescope.comparison.records import Batch, Record, site_key
from noisescope.comparison.rows import BlockError, SiteRow, site_row
from noisescope.errors import InvalidInput
from noisescope.findings import GAIN_ROUND_OFF, ROUND_OFF
from noisescope.sites import FUSED, Place, Site
from noisescope.text_escaping import last_part

_MOST_NAMED = 8  # sites in a note


@dataclass(frozen=True)
class MeasuredSites:
    """Every site that both records have, in the order of the first."""

    found: tuple[tuple[Site, Measures], ...]
    sums: dict[Site, ErrorSums]  # of sites with whole tensors on both sides
    uncompared: tuple[Site, ...]  # lacking on one side, of another shape, or whole here and sketched there
    sites: int  # of either record


def measure_sites(a: Record, b: Record, notes: list[str]) -> MeasuredSites:
    """Measures from full tensors if both sides have them, else from sketches; skipped sites are added to `notes`."""
    theirs = {site_key(site): number for number, site in enumerate(b.sites)}
    left, right = sketches_of(a), sketches_of(b)
    numbers = a.numbers()
    found: list[tuple[Site, Measures]] = []
    by_site: dict[Site, ErrorSums] = {}
    uncompared = [*_lacking(a, b), *_lacking(b, a)]
    for number, site in enumerate(a.sites):
        other = theirs.get(site_key(site))
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
        sizes = (f"{last_part(side.path)} has {len(side.sites)}" for side in (a, b))
        notes.append(f"{len(found)} sites are compared; {', '.join(sizes)}")
    if not found:
        raise InvalidInput("the records share sites, but no tensors of the same shape: were the inputs different?")
    if uncompared:
        named = ", ".join(map(str, uncompared[:_MOST_NAMED])) + (" ..." if len(uncompared) > _MOST_NAMED else "")
        notes.append(
            f"{len(uncompared)} sites were not compared, because one side lacks them or has a different shape: {named}"
        )
    if left is not None and right is not None and numbers < LEAST_FOR_GAIN:
        notes.append(
            f"sketches of {numbers} numbers can't detect a gain ({LEAST_FOR_GAIN} are needed): record with "
            f"--samples 4 or more"
        )
    return MeasuredSites(tuple(found), by_site, tuple(uncompared), len(a.sites) + len(_alone(b, a)))


def _alone(a: Record, b: Record) -> list[Site]:
    """Sites that a has and b has not."""
    theirs = set(map(site_key, b.sites))
    return [site for site in a.sites if site_key(site) not in theirs]


def _lacking(a: Record, b: Record) -> list[Site]:
    """Sites of a that b should have. Fused attention calls are none if b decomposes attention throughout.

    Calls of fused attention are none where b takes attention apart throughout. A dump of another tool has modules
    that no record has (whole MLPs, tables of angles); what noisescope records of a model, it records every time.
    """
    if a.sketch is None and b.sketch is not None:
        return []
    taken_apart = all(site.operator != FUSED for site in b.sites)
    return [site for site in _alone(a, b) if not (taken_apart and site.operator == FUSED)]


def sketches_of(record: Record) -> list[Sketch] | None:
    """The sketch of each site; None where there are none (another tool's dump)."""
    numbers, norms = record.sketches(), record.sizes()
    return None if numbers is None or norms is None else list(zip(numbers, norms, strict=True))


def _summed(a: Record, b: Record, number: int, other: int) -> ErrorSums | None:
    """Sums over whole tensors; None where one side has only a sketch, or another shape."""
    if a.count != b.count:
        return None
    sums = ErrorSums()
    for batch in a.batches:
        if (pair := _pair(a, b, number, other, batch)) is None:
            return None
        sums.add(batch.first, *pair)
    for batch in a.batches:
        if pair := _pair(a, b, number, other, batch):
            sums.add_percent(*pair[:2])
    return sums


def _pair(a: Record, b: Record, number: int, other: int, batch: Batch) -> tuple[Array, Array, str] | None:
    """A batch's tensors on both sides in float64, and the dtype they had."""
    mine, its = a.whole(number, batch.first, batch.count), b.whole(other, batch.first, batch.count)
    if mine is None or its is None or mine.values.shape != its.values.shape:
        return None
    return np.asarray(mine.values, dtype=np.float64), np.asarray(its.values, dtype=np.float64), mine.dtype


@dataclass
class _InputError:
    """The largest of one measure at the place before and at this place so far; not below round-off."""

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


def coarser_dtype(one: str, other: str) -> str:
    """The one with the larger round-off."""
    return max((one, other), key=lambda dtype: round_off(dtype)[0])


def judge_sites(measured: Iterable[tuple[Site, Measures]], dtype: str) -> Iterator[SiteRow]:
    """Each site against the error of its inputs: the largest of the place before it, and of its own place so far.

    Sites of the place before have the same operators, so what those amplify in a healthy model is known from there. A
    site where nothing finite is left on either side does not diverge, and shows nothing of its inputs' error.

    The error is examined twice: by its size, and for a gain, which round-off does not have, however much accumulates.
    """
    size, gain = round_off(dtype)
    sizes, gains = _InputError(size), _InputError(gain)
    place: Place | None = None
    for site, found in measured:
        if site.place != place:
            place = site.place
            sizes.next_place()
            gains.next_place()
        yield site_row(site, found, expected=sizes.expected, expected_gain=gains.expected)
        sizes.add(found.size)
        gains.add(found.gain)


def block_errors(rows: Iterable[SiteRow]) -> Iterator[BlockError]:
    """The error that has accumulated in each block's output, and the block's factor."""
    last: float | None = None
    for row in rows:
        if row.operator == "residual":
            growth = row.relative_l2 / last if row.relative_l2 is not None and last else None
            yield BlockError(row.place, row.relative_l2, growth)
            last = row.relative_l2
