"""Which way a result is rounded, from sums whose exact value lies between two neighbours.

In quarters of an ulp a sum is B + s, with B a multiple of 8 in the middle of its binade (1.5 x a power of two, so the
spacing is the same on both sides) and s = +-1, 2, 3 (below, on and above the tie to an even number) and +-5, 6, 7
(the same above an odd number). B has both signs, which tells "toward zero" from "down".
"""

from __future__ import annotations

import numpy as np

from noisescope.locators.passport_probes.numbers import Array

QUARTERS = np.array([sign * s for sign in (1, -1) for s in (1, 2, 3, 5, 6, 7)], dtype=np.float64)
# [24]: the small term of each row, and the sign of the big one
SMALL = np.concatenate([QUARTERS, QUARTERS])
BIG_SIGN = np.concatenate([np.ones(12), -np.ones(12)])

NEAREST_EVEN = "nearest, ties to even"
STOCHASTIC = "stochastic"
UNCLEAR = "unclear"


def _directions() -> dict[str, Array]:
    """What each rounding makes of B + s, as a difference from B in quarters: mode -> [24]."""
    outward = SMALL * BIG_SIGN  # s as seen from zero: positive lengthens the sum
    return {
        NEAREST_EVEN: 4 * np.round(SMALL / 4),  # B / 4 is even, so the parity of s / 4 is that of the sum
        "nearest, ties away from zero": 4 * np.floor(outward / 4 + 0.5) * BIG_SIGN,
        "toward zero": 4 * np.floor(outward / 4) * BIG_SIGN,
        "away from zero": 4 * np.ceil(outward / 4) * BIG_SIGN,
        "up": 4 * np.ceil(SMALL / 4),
        "down": 4 * np.floor(SMALL / 4),
        # Tensor cores align the terms to the largest and cut each before they are added, with a few bits to spare.
        "toward zero, one bit to spare": 4 * np.floor(2 * np.trunc(SMALL / 2) * BIG_SIGN / 4) * BIG_SIGN,
        "each term cut toward zero before the sum": 4 * np.trunc(SMALL / 4),
        "not rounded here": SMALL,
    }


DIRECTIONS = _directions()


def name_rounding(observed: Array) -> str:
    """The rounding that explains observed [24, repeats], each B + s rounded, less B, in quarters of an ulp."""
    if not np.isfinite(observed).all():
        return UNCLEAR
    for name, expected in DIRECTIONS.items():
        if (observed == expected[:, None]).all():
            return name
    low, high = 4 * np.floor(SMALL / 4)[:, None], 4 * np.ceil(SMALL / 4)[:, None]
    varies = (observed != observed[:, :1]).any()
    if varies and ((observed == low) | (observed == high)).all():
        return STOCHASTIC
    return UNCLEAR
