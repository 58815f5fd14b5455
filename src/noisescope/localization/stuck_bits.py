"""Output bits that never change although they should: a stuck bit, a short output path.

The null: in n healthy rows a bit is 1 about as often as in the reference, rounded to the same dtype. If the reference
holds m ones among its n and the output none, the ones of both fell on one side by chance with probability

    C(n, m) / C(2n, m)        (Fisher's exact test of two samples)

at most: output and reference share their values, so they are alike more often than two samples are. Exact results have
zeros where a healthy error leaves fair coins, so it is never taken to be below 2^-n. A channel that hardly varies falls
into few cells of its format, where errors are the same: numbers that occur twice count once.

One thing sets healthy bits to 0, never to 1: sums that cancel are multiples of a spacing coarser than their own. Below
the spacing of the largest partial sum there can be (`Reference.grain`) a 0 says nothing, and the row does not count.
Where a bias is added (`Reference.offset`), a 1 says nothing there either: the bits of a coarser sum are the bias's own.
A number that may be off by all of itself may be 0: 1 + erf(x) is, for x far below 0, and so is gelu's output.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from noisescope.localization.roundoff_floors import Reference, number_format
from noisescope.localization.tensors import any_row_bits, bits_of, elements_at_a_time

CHANCE = 8e-11  # of one test, as for means: for 10^7 tests (bits of the channels of all operators) 0.001 false alarms
_MOST_ELEMENTS = 1 << 16  # examined of the output as a whole


def stuck_channels(y: Tensor, reference: Reference, *, below_one: bool = False) -> tuple[bool, list[int]]:
    """Whether a bit is stuck in the whole output [R, C], and the channels in which one is.

    `below_one` for probabilities: many are always 1, and whole channels may be, so only the whole is examined.
    """
    if not _enough(y.numel()):
        return False, []
    grain = torch.zeros_like(reference.values) if reference.grain is None else reference.grain
    grain = torch.where(reference.bound < reference.values.abs(), grain, torch.inf)
    tensors, offset = (y, reference.values, grain), reference.offset
    some = slice(None, None, max(1, y.numel() // _MOST_ELEMENTS))
    whole = bool(_stuck(*_bits(*(t.flatten()[some, None] for t in tensors), below_one=below_one), offset=offset))
    found: list[int] = []
    width = max(1, elements_at_a_time() // max(1, len(y)))
    enough = not below_one and _enough(len(y))
    for start in range(0, y.shape[1] if enough else 0, width):
        stuck = _stuck(*_bits(*(t[:, start : start + width] for t in tensors), below_one=below_one), offset=offset)
        found += [start + column for column in stuck]
    return whole, found


def _bits(y: Tensor, values: Tensor, grain: Tensor, *, below_one: bool) -> tuple[Tensor, ...]:
    """What `_stuck` examines: bits given, bits expected, whether they are of use, and the lowest that may well be 1."""
    form, size = number_format(y.dtype), values.abs()
    given, expected = bits_of(y), bits_of(values.to(y.dtype))
    usable = (size > 2.0 ** (form.least + form.bits)) & (size < (0.9 if below_one else form.largest))
    # log2, rounded up: the exponent of the quotient, and 1 where its mantissa is not 0. Of NaN it overflows to below 0.
    quotient = (grain / form.ulp(values)).float().view(torch.int32)
    lowest = quotient.add_(0x7FFFFF).bitwise_right_shift_(23).sub_(127).clamp_(0, 8 * y.dtype.itemsize - 1)
    return given, expected, usable, lowest.to(given.dtype)


def number_of_tests(width: int, dtype: torch.dtype) -> int:
    """Tests of an output of so many channels: each bit at 0 and at 1."""
    return 16 * dtype.itemsize * (width + 1)


def _stuck(given: Tensor, expected: Tensor, usable: Tensor, lowest: Tensor, *, offset: bool) -> list[int]:
    """Columns with a stuck bit; a 0, and with an offset a 1, counts from the bit `lowest` on."""
    above = torch.where(usable, torch.bitwise_left_shift(torch.full_like(given, -1), lowest), 0)  # 1 where a 0 counts
    counts = above if offset else -usable.to(given.dtype)  # 1 where a 1 counts
    never_0 = ~any_row_bits(~given & counts) & any_row_bits(~expected & counts)
    never_1 = any_row_bits(expected & above) & ~any_row_bits(given & above)
    stuck = []
    for column in (never_0 | never_1).nonzero().flatten().tolist():
        rows = usable[:, column]
        for never, value in ((int(never_0[column]), 1), (int(never_1[column]), 0)):
            for bit in (bit for bit in range(8 * given.itemsize) if never >> bit & 1):
                chosen = rows & ((lowest[:, column] <= bit) | (value == 1 and not offset))
                ones = np.unique(expected[chosen, column].numpy()) >> bit & 1
                if _by_chance(ones, value) < CHANCE:
                    stuck.append(column)
    return sorted(set(stuck))


def _enough(rows: int) -> bool:
    """Whether that many rows can show anything."""
    return _by_chance(np.ones(rows), 0) < CHANCE


def _by_chance(expected: np.ndarray, value: int) -> float:
    """How likely n healthy bits are all `value` when m of the expected ones are not; at least that of fair coins."""
    n, m = len(expected), int((expected != value).sum())
    two_samples = np.exp(gammaln(n + 1) - gammaln(n - m + 1) - gammaln(2 * n + 1) + gammaln(2 * n - m + 1))
    return max(float(two_samples), 0.5**n)
