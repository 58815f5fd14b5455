"""Waiting times that a run may not observe fully: the median time to an event, with its interval.

Kaplan and Meier's product estimates the share S(t) without an event after t steps from waiting times of which some are
only known to be longer than what was watched. The interval resamples whole groups: waiting times of one prompt under
several seeds are not independent.

E. L. Kaplan, P. Meier (1958), "Nonparametric estimation from incomplete observations", JASA 53, 457-481.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from noisescope.errors import InvalidInput
from noisescope.estimate import UNBOUNDED, Estimate
from noisescope.stats.score_arrays import Array, checked_level

_RESAMPLES = 1000


def median_wait(steps: ArrayLike, happened: ArrayLike, level: float = 0.95) -> Estimate:
    """The number of steps after which half have met the event; n counts groups (rows).

    `steps` [groups, members] are waiting times, at least 1; where `happened` is False the event had not come by then.
    Value None with the note "unbounded": fewer than half met it while they were watched.

    >>> median_wait([[1], [2], [3], [9], [9]], [[True], [True], [True], [False], [False]]).value
    3.0
    """
    waits, events = np.asarray(steps, dtype=np.float64), np.asarray(happened, dtype=bool)
    if waits.ndim != 2 or waits.shape != events.shape or not waits.size or waits.min() < 1:
        raise InvalidInput(
            f"waiting times must be a table [groups, members] of steps of at least 1, with one flag each; got "
            f"{waits.shape} and {events.shape}"
        )
    groups = len(waits)
    value = _crossing(waits, events)
    if groups < 2:
        return _estimate(value, None, None, groups, checked_level(level))
    drawn = np.random.default_rng(0).integers(0, groups, (_RESAMPLES, groups))
    medians = np.sort([_crossing(waits[rows], events[rows]) for rows in drawn])
    tail = (1 - checked_level(level)) / 2
    low, high = (float(np.quantile(medians, share, method="nearest")) for share in (tail, 1 - tail))
    return _estimate(value, low, high, groups, level)


def _estimate(value: float, low: float | None, high: float | None, groups: int, level: float) -> Estimate:
    middle, left, right = (None if end is None or not np.isfinite(end) else end for end in (value, low, high))
    return Estimate(middle, left, right, groups, level, "" if np.isfinite(value) else UNBOUNDED, "Kaplan-Meier")


def _crossing(waits: Array, events: Array) -> float:
    """The first step at which the product falls to a half; inf where it does not."""
    times, at = np.unique(waits, return_inverse=True)
    met = np.bincount(at.ravel(), weights=events.ravel(), minlength=len(times))
    all_here = np.bincount(at.ravel(), minlength=len(times))
    at_risk = np.cumsum(all_here[::-1])[::-1]
    left = np.cumprod(1 - met / at_risk)
    below = np.flatnonzero(left <= 0.5 + 1e-12)
    return float(times[below[0]]) if len(below) else float("inf")
