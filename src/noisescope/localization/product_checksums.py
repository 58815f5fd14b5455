"""One pass over a linear's weight, part by part: as it is multiplied, and checksums of all rows of the product.

Checksums of a product: sum_n r_n y_n against x . sum_n r_n w_n, r = +-1, n over blocks of outputs (Freivalds 1977).
They check every row for the cost of N / 64 columns. A checksum has the error of its 64 elements together, so one wrong
element is detected from about 14 ulp on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.localization.roundoff_floors import (
    ROUNDING_STD,
    WORK_ROUNDOFF,
    Z_ELEMENT,
    Shortening,
    number_format,
)
from noisescope.model.host_copy import begin_copy

BLOCK = 64  # outputs under one checksum: a wrong element must show above the rounding of its 63 neighbours
COLUMNS = 256  # of an output that are computed at a time: the float64 copies they need stay in a processor's cache


def as_multiplied(x: Tensor, y: Tensor) -> Tensor:
    """Under autocast the operands are rounded to the output's dtype before they are multiplied."""
    return x.to(y.dtype) if x.dtype.itemsize > y.dtype.itemsize else x


def columns_on_host(weight: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A weight [N, K] on the host, as it is multiplied for y, some outputs at a time.

    From an accelerator the next part is copied while this one is processed; no more is held here.
    """
    step = COLUMNS * torch.get_num_threads()
    parts = [slice(start, start + step) for start in range(0, len(weight), step)]
    ahead = begin_copy(weight[parts[0]])
    for here, after in itertools.zip_longest(parts, parts[1:]):
        part = ahead.wait()
        if after is not None:
            ahead = begin_copy(weight[after])
        yield here, as_multiplied(part, y)


@dataclass(frozen=True)
class Checksums:
    """The error of each row's checksums, [R, N / 64], and the variance of a healthy one."""

    error: Tensor
    variance: Tensor

    @property
    def z(self) -> Tensor:
        """In standard deviations; inf if NaN, Inf or an overflow is among the terms."""
        z = self.error.abs() / self.variance.clamp_min(1e-300).sqrt()
        return torch.where(z.isnan() | self.variance.isinf(), torch.inf, z)

    def rows_off(self) -> Tensor:
        """Rows whose checksums fail, the worst first; those with NaN or Inf are recomputed and judged there."""
        worst = self.z.amax(1)
        off = (worst > Z_ELEMENT).nonzero().flatten()
        return off[worst[off].argsort(descending=True)]


def checksums(a: Tensor, w: Tensor, added: Tensor | None, y: Tensor, signs: Tensor, short: Shortening) -> Checksums:
    """Of y [R, N] = a w^T + added, for a [R, K], w [N, K] and random signs [N], all on the host."""
    check = Checker(a, added, y, signs, short)
    for here, part in columns_on_host(w, y):
        check.see(here, part.double(), part.float().square())
    return check.found()


class Checker:
    """The checksums of y [R, N] = a w^T + added, for a [R, K] and random signs [N], as parts of w [N, K] are seen.

    `short` is what the user lets the device shorten (roundoff_floors.shortened). The variance is that of one rounding
    of each output, of its sum (sum_spread with P^2 = S^2 + added^2), and of a rounding before the addend, which some
    kernels make. It is in float32, as it only scales a floor.
    """

    def __init__(self, a: Tensor, added: Tensor | None, y: Tensor, signs: Tensor, short: Shortening) -> None:
        self._a, self._added, self._y, self._signs, self._short = a.double(), added, y, signs, short
        self._squared = self._a.square().float()
        self._errors: list[Tensor] = []
        self._variances: list[Tensor] = []

    def see(self, here: slice, w: Tensor, squared: Tensor) -> None:
        """Process some outputs: their weights in float64, and the squares of these in float32."""
        y, sign, added, short = self._y[:, here], self._signs[here], self._added, self._short
        per_sum = (ROUNDING_STD * WORK_ROUNDOFF) ** 2 * (w.shape[-1] + 1)
        signed = torch.bmm(_blocks(sign[None])[0][:, None], _blocks_of_rows(w))[:, 0]  # r w summed over each block
        expected = self._a @ signed.T
        squares = self._squared @ _blocks_of_rows(squared).sum(1).T
        narrow = y.float()
        variance = _rounding_variance(narrow, y.dtype)
        sizes = _blocks(narrow.square()).sum(-1)
        variance += per_sum * (2 * squares + sizes) + short.spread**2 * squares + short.lean**2 * sizes
        out = y.double()
        if added is not None:
            expected = expected + _blocks((added[here] * sign)[None]).sum(-1)
            variance += _rounding_variance((out - added[here]).float(), y.dtype)
            variance += per_sum * _blocks(added[here].float().square()[None]).sum(-1)
        self._errors.append(_blocks(out * sign).sum(-1) - expected)
        self._variances.append(variance.double())

    def found(self) -> Checksums:
        return Checksums(torch.cat(self._errors, 1), torch.cat(self._variances, 1))


def _rounding_variance(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Of one rounding of each element, summed over blocks: `rounded_once` squared, over 3, in float32."""
    form = number_format(dtype)
    power = (y.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(2.0**form.least)
    return _blocks(power.mul_(form.u).add_(form.flushed).square_()).sum(-1).div_(3)


def _blocks(columns: Tensor) -> Tensor:
    """[R, N] -> [R, ceil(N / 64), 64], the last block filled up with 0."""
    missing = -columns.shape[1] % BLOCK
    filled = F.pad(columns, (0, missing)) if missing else columns
    return filled.view(len(columns), -1, BLOCK)


def _blocks_of_rows(rows: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / 64), 64, K]."""
    missing = -len(rows) % BLOCK
    filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    return filled.view(-1, BLOCK, rows.shape[1])
