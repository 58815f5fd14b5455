"""Bits of an output that never change though they should: a stuck bit, a short output path.

The null: in n healthy rows a bit is 1 about as often as in the reference, rounded to the same dtype. If the reference
holds m ones among its n and the output none, the ones of both fell on one side by chance with probability

    C(n, m) / C(2n, m)        (Fisher's exact test of two samples)

at most: output and reference share their values, so they are alike more often than two samples are. Exact results have
zeros where a healthy error leaves fair coins, so it is never taken to be below 2^-n. A channel that hardly varies falls
into few cells of its format, where errors are the same: numbers that occur twice count once.

One thing sets healthy bits to 0, never to 1: sums that cancel are multiples of a spacing coarser than their own. Below
the spacing of the largest partial sum there can be (`Reference.grain`) a 0 says nothing, and the row does not count.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from noisescope.locators.floors import Reference, number_format

CHANCE = 8e-11  # of one look, as for means: for 10^7 looks (bits of the channels of all operators) 0.001 false alarms
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ELEMENTS = 1 << 16  # looked at of the output as a whole
_PIECE = 1 << 18  # elements that are looked at at a time: what is made of them stays in a processor's cache


def stuck_channels(y: Tensor, reference: Reference, *, below_one: bool = False) -> tuple[bool, list[int]]:
    """Whether a bit is stuck in the whole output [R, C], and the channels in which one is.

    `below_one` for probabilities: many are 1 for ever, and channels may well be, so only the whole is looked at.
    """
    tensors = (y, reference.values, torch.zeros_like(reference.values) if reference.grain is None else reference.grain)
    some = slice(None, None, max(1, y.numel() // _MOST_ELEMENTS))
    whole = bool(_stuck(*_bits(*(t.flatten()[some, None] for t in tensors), below_one=below_one))[0])
    found: list[int] = []
    width = max(1, _PIECE // max(1, len(y)))
    for start in range(0, 0 if below_one else y.shape[1], width):
        stuck = _stuck(*_bits(*(t[:, start : start + width] for t in tensors), below_one=below_one))
        found += (start + np.flatnonzero(stuck)).tolist()
    return whole, found


def _bits(y: Tensor, values: Tensor, grain: Tensor, *, below_one: bool) -> tuple[np.ndarray, ...]:
    """What `_stuck` looks at: bits given, bits expected, whether they are of use, and the lowest that may well be 1."""
    form, size = number_format(y.dtype), values.abs()
    given, expected = (t.contiguous().view(_INTEGERS[y.dtype.itemsize]).numpy() for t in (y, values.to(y.dtype)))
    usable = (size > 2.0 ** (form.least + form.bits)) & (size < (0.9 if below_one else form.largest))
    lowest = (grain / form.ulp(values)).log2_().ceil_().nan_to_num_(0.0).clamp_(0, 8 * given.itemsize - 1)
    return given, expected, usable.numpy(), lowest.numpy().astype(given.dtype)


def looks(width: int, dtype: torch.dtype) -> int:
    """How often the test looks at an output of so many channels: each bit at 0 and at 1."""
    return 16 * dtype.itemsize * (width + 1)


def _stuck(given: np.ndarray, expected: np.ndarray, usable: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """Columns with a stuck bit; a 0 counts from the bit `lowest` on."""
    stuck = np.zeros(given.shape[1], dtype=bool)
    if _by_chance(np.ones(len(given)), 0) >= CHANCE:  # too few rows to tell anything
        return stuck
    above = np.left_shift(given.dtype.type(-1), lowest)
    never_0 = np.bitwise_and.reduce(given, 0, where=usable) & ~np.bitwise_and.reduce(expected, 0, where=usable)
    never_1 = np.bitwise_or.reduce(expected & above, 0, where=usable)
    never_1 &= ~np.bitwise_or.reduce(given & above, 0, where=usable)
    for held, value in ((never_0, 1), (never_1, 0)):
        for column in np.flatnonzero(held):
            for bit in (bit for bit in range(8 * given.itemsize) if held[column] >> bit & 1):
                rows = usable[:, column] & ((lowest[:, column] <= bit) | bool(value))
                stuck[column] |= _by_chance(np.unique(expected[rows, column]) >> bit & 1, value) < CHANCE
    return stuck


def _by_chance(expected: np.ndarray, value: int) -> float:
    """How likely n healthy bits are all `value` when m of the expected ones are not; fair coins at the least."""
    n, m = len(expected), int((expected != value).sum())
    two_samples = np.exp(gammaln(n + 1) - gammaln(n - m + 1) - gammaln(2 * n + 1) + gammaln(2 * n - m + 1))
    return max(float(two_samples), 0.5**n)
