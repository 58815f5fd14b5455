"""The result of a cause function, and the significance test that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scipy import special

from noisescope.comparison.logprob_pairs import Pair, Pairs

ALARM = 0.01  # chance that a healthy pair of files shows any of the tested causes
_TESTS = 5
ONE_TEST = ALARM / _TESTS


@dataclass(frozen=True)
class Found:
    """A cause: what was observed, where to look, and the corrected pairs."""

    name: str
    statement: str
    next_step: str
    mended: tuple[Pair, ...]
    tokens: int  # that show it
    whole: bool = False  # it may be all of the gap: correcting it removes only the part known to be its own


Cause = Callable[[Pairs], Found | None]


def significant(t: float, sequences: int) -> bool:
    """Whether Student's t over that many sequences is significant at the level of one test."""
    return bool(2 * special.stdtr(max(sequences - 1, 1), -abs(t)) < ONE_TEST)
