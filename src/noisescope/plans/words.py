"""Numbers in the sentences of plans."""

from __future__ import annotations

from noisescope.stats import Estimate


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(estimate: Estimate, form: str, times: float = 1) -> str:
    """An interval in words; an end without bound is "..."."""
    low, high = ("..." if end is None else f"{times * end:{form}}" for end in (estimate.low, estimate.high))
    return f"[{low}, {high}]"


def times_better(gain: float) -> str:
    """What divides an error, in words: 0.04 is "25 x worse", and 0 means that there was none before."""
    if not gain:
        return "nothing to gain"
    return f"{gain:.3g} x better" if gain >= 1 else f"{1 / gain:.3g} x worse"
