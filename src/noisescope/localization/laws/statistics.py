"""R24: what a healthy output never looks like, whatever was computed: stuck bits, dead channels, gaps, ties.

Only rows that come from different inputs count: a token that occurs twice gives the same row twice in the first block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from noisescope.localization.laws.law_result import LawResult, columns, rms
from noisescope.localization.roundoff_floors import INTEGERS, Format, as_judged, number_format

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
    """What was found in one output."""

    stuck: tuple[tuple[int, int], ...] = ()  # (bit, value) that hardly ever changes
    stuck_channels: tuple[int, ...] = ()  # where only some channels have it
    dead: tuple[int, ...] = ()  # channels that are constant
    gap: float = 0.0  # no number but 0 is smaller than this, and zeros fill the gap
    gap_share: float = 0.0
    gap_channels: tuple[int, ...] = ()
    limit: float = 0.0  # numbers pile up at this size
    ties: int = 0
    clear_ties: bool = False  # enough of them to be an alarm by themselves


def different_rows(x: Tensor) -> Tensor:
    """Indices of rows with different contents."""
    seen: dict[bytes, int] = {}
    view = x.contiguous().view(INTEGERS[x.dtype.itemsize]).numpy()
    for row in range(len(view)):
        seen.setdefault(view[row].tobytes(), row)
    return torch.tensor(list(seen.values()), dtype=torch.long)


def copies(outputs: list[Tensor]) -> Tensor:
    """Elements that say again what an earlier row of their channel said, of outputs [R, C].

    Rows may be alike (one token repeated) but for a few roundings. Where all outputs of an element are the same
    numbers, so are their rounding errors: a mean over them is no surer than one of them.
    """
    keys = torch.zeros_like(outputs[0], dtype=torch.int64)
    for values in outputs:
        keys = keys * _ODD + values.contiguous().view(torch.int64)  # a hash: it wraps
    ordered, order = keys.sort(dim=0, stable=True)
    again = torch.zeros_like(keys, dtype=torch.bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return torch.zeros_like(again).scatter_(0, order, again)


def look(y: Tensor) -> Statistics:
    """Statistics of an output [R, C] in its own dtype, rows all different, no bias added."""
    y = as_judged(y)
    values = y.double()
    usable = values.isfinite().all(-1)
    y, values = y[usable], values[usable]
    if len(y) < 2:
        return Statistics()
    form = number_format(y.dtype)
    dead = _dead(values, form)
    stuck, stuck_channels = _stuck_bits(y, values, dead)
    gap, share, gap_channels = _gap(values, dead, form)
    limit, ties, clear = _ties(values, form)
    return Statistics(stuck, stuck_channels, dead, gap, share, gap_channels, limit, ties, clear)


def result(found: Statistics, y: Tensor) -> LawResult:
    """Broken where something was found that never happens by chance."""
    told = []
    channels: tuple[int, ...] = ()
    if found.stuck:
        named = ", ".join(f"bit {bit} always {value}" for bit, value in found.stuck[:4])
        told.append(f"{named}{' ...' if len(found.stuck) > 4 else ''}")
        channels = found.stuck_channels
    if found.dead:
        told.append(f"{len(found.dead)} of {y.shape[-1]} channels constant")
        channels = channels or found.dead
    if found.gap:
        told.append(f"{found.gap_share:.1%} of numbers are 0 and no other is below {found.gap:.3g}")
        channels = channels or found.gap_channels
    if found.clear_ties:
        told.append(f"{found.ties} numbers tie at {found.limit:.4g}")
    size = found.gap / max(rms(y.double()), 1e-300)
    strength = math.inf if told else 0.0
    share = found.gap_share
    return LawResult("R24", strength, size, 0.0, share, channels, y.numel(), words="; ".join(told))


def _spread(values: Tensor) -> float:
    """How far the numbers of a typical channel lie apart."""
    return float(values.std(0).median())


def _dead(values: Tensor, form: Format) -> tuple[int, ...]:
    """Channels with one number in all rows, where fewer than half of the channels are so."""
    if len(values) < _DIFFERENT:
        return ()
    constant = (values == values[:1]).all(0)
    if bool(constant.any()):
        constant &= _spread(values) >= _STEPS * form.ulp(values[0])
    return tuple(constant.nonzero().flatten().tolist()) if int(constant.sum()) * 2 <= constant.numel() else ()


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
    pattern = y.contiguous().view(INTEGERS[y.dtype.itemsize])
    numbers = pattern[counted]
    sample = numbers[:: max(1, len(numbers) // _SAMPLE)]
    stuck: list[tuple[int, int]] = []
    lanes: dict[tuple[int, int], Tensor] = {}
    always, ever = _held(pattern, counted)
    for bit in range(number_format(y.dtype).bits - 1):
        for share_of in (sample, numbers):  # most bits are fair, and a few numbers say so
            ones = float((share_of >> bit & 1).double().mean()) if len(share_of) else 0.5
            if 1 - _CONSTANT < ones < _CONSTANT:
                break
        else:
            if int(_different((numbers >> (bit + 1))[:, None])) >= _CELLS:
                stuck.append((bit, round(ones)))
            continue
        for value, same in ((1, always >> bit & 1 != 0), (0, ever >> bit & 1 == 0)):
            found = same & alive
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
    return (tuple(lanes), columns(torch.stack(list(lanes.values())))) if lanes else ((), ())


def _held(pattern: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Bits that are set in all counted rows of a column, and those set in any."""
    ones = torch.where(counted, pattern, torch.full_like(pattern, -1)).numpy()
    zeros = torch.where(counted, pattern, torch.zeros_like(pattern)).numpy()
    return torch.from_numpy(np.bitwise_and.reduce(ones, 0)), torch.from_numpy(np.bitwise_or.reduce(zeros, 0))


def _different(cells: Tensor) -> Tensor:
    """How many different numbers each column holds."""
    ordered = cells.sort(0).values
    return (ordered[1:] != ordered[:-1]).sum(0) + 1


def _gap(values: Tensor, dead: tuple[int, ...], form: Format) -> tuple[float, float, tuple[int, ...]]:
    """Zeros where the density of numbers says there should be small ones."""
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
        # Density is highest round 0, so the gap (0, s) lacks about as many numbers as (s, 2 s) has.
        # Numbers under the normal range fill it; what is between them and 0 is the rounding of the format.
        if smallest >= 2.0**form.least and near >= 4 and 0.25 * near <= zeros <= 64 * near:
            return smallest, zeros / values.numel(), columns(zero)
    return 0.0, 0.0, ()


def _ties(values: Tensor, form: Format) -> tuple[float, int, bool]:
    """Numbers that are exactly as large as the largest, of one sign or both."""
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
            clear = ties >= 8 and int(at.any(0).sum()) >= 3 and ties > near
            best = (top, ties, clear)
    top, ties, clear = best
    spacing = float(form.ulp(torch.tensor([top], dtype=torch.float64)))
    normal = top >= 2.0**form.least
    return top, ties, clear and normal and _spread(values) >= _STEPS * spacing
