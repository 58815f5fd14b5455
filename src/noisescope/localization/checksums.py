"""Checksums of a product: sum_n r_n y_n against x . sum_n r_n w_n, r = +-1, n over blocks of outputs (Freivalds 1977).

They check every row for the price of N / 64 columns. A checksum's error is that of its 64 elements together, so one
wrong element is seen from about 14 ulp on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import ROUNDING_STD, WORK_ROUNDOFF, rounded_once

BLOCK = 64  # outputs under one checksum: a wrong element must show above the rounding of its 63 neighbours
COLUMNS = 256  # of an output that are computed at a time: the float64 copies they need stay in a processor's cache


@dataclass(frozen=True)
class Checksums:
    """How far the checksums of each row are off, [R, N / 64], and the variance of a healthy one."""

    error: Tensor
    variance: Tensor

    @property
    def z(self) -> Tensor:
        """In standard deviations; inf where NaN or Inf is among what was summed."""
        z = self.error.abs() / self.variance.clamp_min(1e-300).sqrt()
        return torch.where(z.isnan(), torch.inf, z)


def checksums(a: Tensor, w: Tensor, added: Tensor | None, y: Tensor, signs: Tensor, short: float) -> Checksums:
    """Of y [R, N] = a w^T + added, for a [R, K], w [N, K] and random signs [N], all on the host.

    `short` is what the user lets the device shorten (roundoff_floors.shortened). The variance is that of one rounding
    of each output, of its sum (sum_spread with P^2 = S^2 + added^2), and of a rounding before the addend, which some
    kernels make.
    """
    wide = a.double()
    squared = wide.square().float()
    per_sum = (ROUNDING_STD * WORK_ROUNDOFF) ** 2 * (a.shape[-1] + 1)
    errors, variances = [], []
    for start in range(0, len(w), COLUMNS):
        here = slice(start, start + COLUMNS)
        part, out, sign = w[here].double(), y[:, here].double(), signs[here]
        expected = wide @ _per_block((part * sign[:, None]).T.contiguous())
        squares = (squared @ _per_block(part.square().float().T.contiguous())).double()
        variance = _per_block(rounded_once(out, y.dtype).square() / 3)
        variance += per_sum * (2 * squares + _per_block(out.square())) + short**2 * squares
        if added is not None:
            expected = expected + _per_block((added[here] * sign)[None])
            variance += _per_block(rounded_once(out - added[here], y.dtype).square() / 3)
            variance += per_sum * _per_block(added[here].square()[None])
        errors.append(_per_block(out * sign) - expected)
        variances.append(variance)
    return Checksums(torch.cat(errors, 1), torch.cat(variances, 1))


def _per_block(columns: Tensor) -> Tensor:
    """Sums over blocks of columns, [R, N] -> [R, ceil(N / 64)]."""
    owner = torch.arange(columns.shape[1]) // BLOCK
    return columns.new_zeros(columns.shape[0], int(owner[-1]) + 1).index_add_(1, owner, columns)
