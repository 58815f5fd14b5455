"""What a healthy output never looks like, whatever was computed: stuck bits, dead channels, gaps, ties.

Only rows from different inputs count: a token that occurs twice gives the same row twice in the first block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import Format, as_judged, number_format
from noisescope.localization.tensors import any_row_bits, bits_of, channels_with, rms

_CELLS = 40  # different settings of the higher bits under which a bit must stay the same: 2^-39 by chance
_CONSTANT = 0.995
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # a multiplier that spreads bits (the golden ratio, as Knuth's hashes have it)
_SAMPLE = 1024
_DIFFERENT = 4  # rows that must differ before a constant channel says anything
# Spacings of the format that channels must spread over before equal numbers say anything: rows that are alike but for a
# few roundings (one token repeated), or numbers near the smallest, are equal for a good reason.
_STEPS = 8


@dataclass(frozen=True)
class Statistics:
    """The statistics found in one output."""

    stuck: tuple[tuple[int, int], ...] = ()  # (bit, value) that hardly ever changes
    stuck_channels: tuple[int, ...] = ()  # where only some channels have it
    dead: tuple[int, ...] = ()  # channels that are constant
    gap: float = 0.0  # no number but 0 is smaller than this, and zeros fill the gap
    gap_share: float = 0.0
    gap_channels: tuple[int, ...] = ()
    limit: float = 0.0  # numbers pile up at this size
    ties: int = 0
    clear_ties: bool = False  # enough of them to be an alarm by themselves
    rms: float = 0.0

    def words(self, width: int) -> str:
        """The findings that never happen by chance; "" if there are none."""
        found = []
        if self.stuck:
            named = ", ".join(f"bit {bit} always {value}" for bit, value in self.stuck[:4])
            found.append(f"{named}{' ...' if len(self.stuck) > 4 else ''}")
        if self.dead:
            found.append(f"{len(self.dead)} of {width} channels constant")
        if self.gap:
            found.append(f"{self.gap_share:.1%} of numbers are 0 and no other is below {self.gap:.3g}")
        if self.clear_ties:
            found.append(f"{self.ties} numbers tie at {self.limit:.4g}")
        return "; ".join(found)


def copies(outputs: list[Tensor]) -> Tensor:
    """Elements that repeat an earlier row of their channel, of outputs [R, C].

    Rows may be alike (one token repeated) but for a few roundings. Where all outputs of an element are the same
    numbers, so are their rounding errors: a mean over them is no more certain than one of them.
    """
    keys = torch.zeros_like(outputs[0], dtype=torch.int64)
    for values in outputs:
        keys = keys * _ODD + values.contiguous().view(torch.int64)  # a hash: it wraps
    ordered, order = keys.sort(dim=0, stable=True)
    again = torch.zeros_like(keys, dtype=torch.bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return torch.zeros_like(again).scatter_(0, order, again)


def measure(y: Tensor) -> Statistics:
    """Statistics of an output [R, C] in its own dtype, rows all different, no bias added."""
    y = as_judged(y)
    values = y.double()
    usable = values.isfinite().all(-1)
    y, values = y[usable], values[usable]
    if len(y) < 2:
        return Statistics()
    form = number_format(y.dtype)
    dead = _dead_channels(values, form)
    stuck, stuck_channels = _stuck_bits(y, values, dead)
    gap, share, gap_channels = _gap(values, dead, form)
    limit, ties, clear = _ties(values, form)
    return Statistics(stuck, stuck_channels, dead, gap, share, gap_channels, limit, ties, clear, rms(values))


def _spread(values: Tensor) -> float:
    """How far apart the numbers of a typical channel are."""
    return float(values.std(0).median())


def _dead_channels(values: Tensor, form: Format) -> tuple[int, ...]:
    """Channels with one number in all rows, if fewer than half of the channels are like that."""
    if len(values) < _DIFFERENT:
        return ()
    constant = (values == values[:1]).all(0)
    if bool(constant.any()):
        constant &= _spread(values) >= _STEPS * form.ulp(values[0])
    return channels_with(constant[None])


def _stuck_bits(
    y: Tensor, values: Tensor, dead: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Mantissa bits that are the same nearly everywhere, or in all rows of a channel.

    Numbers that lie close together share a bit for a good reason. So what counts is not how many there are, but how
    many different settings of the higher bits occur among them: a healthy bit is a fair coin in each.
    """
    alive = torch.ones(y.shape[-1], dtype=torch.bool)
    alive[list(dead)] = False
    counted = (values != 0) & alive
    pattern = bits_of(y)
    numbers = pattern[counted]
    sample = numbers[:: max(1, len(numbers) // _SAMPLE)]
    stuck: list[tuple[int, int]] = []
    lanes: dict[tuple[int, int], Tensor] = {}
    ever_0, ever_1 = (any_row_bits(torch.where(counted, bits, 0)) for bits in (~pattern, pattern))
    for bit in range(number_format(y.dtype).bits - 1):
        for share_of in (sample, numbers):  # most bits are fair, and a few numbers show it
            ones = float((share_of >> bit & 1).double().mean()) if len(share_of) else 0.5
            if 1 - _CONSTANT < ones < _CONSTANT:
                break
        else:
            if int(_different((numbers >> (bit + 1))[:, None])) >= _CELLS:
                stuck.append((bit, round(ones)))
            continue
        for value, other in ((1, ever_0), (0, ever_1)):
            found = (other >> bit & 1 == 0) & alive
            if len(y) >= _CELLS and bool(found.any()):
                found[found.clone()] = _different(pattern[:, found] >> (bit + 1)) >= _CELLS
                if bool(found.any()):
                    lanes[bit, value] = found
    if stuck:
        return tuple(stuck), ()
    if number_format(y.dtype).bits > 20:  # sums that cancel end in zeros: in a channel of float32 they may all do so
        bit = 0
        while lanes.pop((bit, 0), None) is not None:
            bit += 1
    return (tuple(lanes), channels_with(torch.stack(list(lanes.values())))) if lanes else ((), ())


def _different(cells: Tensor) -> Tensor:
    """How many different numbers each column holds."""
    ordered = cells.sort(0).values
    return (ordered[1:] != ordered[:-1]).sum(0) + 1


def _gap(values: Tensor, dead: tuple[int, ...], form: Format) -> tuple[float, float, tuple[int, ...]]:
    """Zeros where the density of numbers implies small ones."""
    zero = values == 0
    zero[:, list(dead)] = False
    zero &= ~(values == 0).all(-1, keepdim=True)
    zeros = int(zero.sum())
    if zeros < 8:
        return 0.0, 0.0, ()
    for here in (zero.any(0), ~torch.isin(torch.arange(values.shape[-1]), torch.tensor(dead, dtype=torch.long))):
        size = values[:, here].abs()
        size = size[size > 0]
        if not len(size):
            continue
        smallest = float(size.min())
        near = int((size <= 2 * smallest).sum())
        # Density is highest around 0, so the gap (0, s) lacks about as many numbers as (s, 2 s) has.
        # Numbers under the normal range fill it; what is between them and 0 is the rounding of the format.
        if smallest >= 2.0**form.least and near >= 4 and 0.25 * near <= zeros <= 64 * near:
            return smallest, zeros / values.numel(), channels_with(zero)
    return 0.0, 0.0, ()


def _ties(values: Tensor, form: Format) -> tuple[float, int, bool]:
    """Numbers that exactly equal the maximum, of one sign or both."""
    best = (0.0, 0, False)
    for side in (values, -values, values.abs()):
        top = float(side.max())
        if top <= 0:
            continue
        at = side == top
        near = int(((side < top) & (side > top * (1 - 1 / 16))).sum())
        ties = int(at.sum())
        if ties > best[1]:
            # A sixteenth below the top holds 8 numbers of bfloat16 or more: none may have more than they have together.
            best = (top, ties, ties >= 8 and int(at.any(0).sum()) >= 3 and ties > near)
    top, ties, clear = best
    spacing = float(form.ulp(torch.tensor([top], dtype=torch.float64)))
    return top, ties, clear and top >= 2.0**form.least and _spread(values) >= _STEPS * spacing
