"""Avalanche points: layer ranges where errors grow far beyond what their neighbours show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from noisescope.errors import InvalidInput
from noisescope.findings.thresholds import LIMITS


@dataclass(frozen=True)
class Window:
    """Layers start to end, both included, and what the model lost with noise in all of them."""

    start: int
    end: int
    degradation: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidInput(f"a window needs a first and a last layer, both inclusive; got {self.start}-{self.end}")

    def shares_layers_with(self, other: Window) -> bool:
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True)
class PointAvalanche:
    """The worst window of a hot region, by point values alone.

    `neighbours` are the degradations it was compared with,
    `common` the first and last layer that all hits of the region share: with windows of 3, one hot layer lifts three.
    """

    start: int
    end: int
    degradation: float
    severity: Literal["CRITICAL", "HIGH"]
    neighbours: tuple[float, ...]
    common: tuple[int, int]


def avalanche_points(windows: Iterable[Window], *, threshold: float | None = None) -> list[PointAvalanche]:
    """Windows that lose more than 15 % and more than 1.5 times what the nearest windows on both sides lose.

    A neighbour shares no layer with the window: one hot layer lifts all overlapping windows alike, so against those
    nothing would ever stand out. At an edge there is one neighbour; without any nothing can stand out. Windows without
    a measured degradation are passed over. Overlapping hits are one region, named by its largest window (the first
    among equals). A hot region wider than a window raises the neighbours too and is no point; its windows still have
    their bands.
    """
    limit = LIMITS["avalanche_degradation"] if threshold is None else threshold
    measured = [w for w in windows if w.degradation is not None and not math.isnan(w.degradation)]
    beside = {w: [_loss(other) for other in neighbours(w, measured)] for w in measured}
    factor = LIMITS["avalanche_neighbour_factor"]
    hits = [w for w in measured if _loss(w) > limit and beside[w] and _loss(w) > factor * max(beside[w])]
    points = []
    while hits:
        worst = min(hits, key=lambda w: (-_loss(w), w.start))
        region = [w for w in hits if w.shares_layers_with(worst)]
        hits = [w for w in hits if w not in region]
        common = max(w.start for w in region), min(w.end for w in region)
        points.append(
            PointAvalanche(
                worst.start,
                worst.end,
                _loss(worst),
                "CRITICAL" if _loss(worst) > LIMITS["avalanche_critical"] else "HIGH",
                tuple(beside[worst]),
                common if common[0] <= common[1] else (worst.start, worst.end),
            )
        )
    return sorted(points, key=lambda point: point.start)


def _loss(window: Window) -> float:
    assert window.degradation is not None
    return window.degradation


def neighbours(window: Window, others: list[Window]) -> list[Window]:
    """The nearest window that ends before this one starts, and the nearest that starts after it ends."""
    before = max((w for w in others if w.end < window.start), key=lambda w: (w.end, w.start), default=None)
    after = min((w for w in others if w.start > window.end), key=lambda w: (w.start, w.end), default=None)
    return [w for w in (before, after) if w is not None]
