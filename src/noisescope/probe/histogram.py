"""A histogram of |x| per channel with bins of growing size: quantiles in memory that does not grow with the data.

A bin is what the exponent and the first two bits of the mantissa of a float32 say, so it is found by a shift: four bins
an octave from 2^-24 to 2^16, one below (with the zeros) and one above. A quantile is interpolated inside its bin; it is
off by at most the bin's width, a quarter, and by a few percent for smooth data.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST, HIGHEST = -24, 16  # exponents of 2
BINS = (HIGHEST - LOWEST) * 4 + 2
_FIRST = (127 + LOWEST) * 4  # the shifted bits of 2^LOWEST: float32 stores exponent + 127


class LogHistogram:
    """Counts [C, BINS] of the magnitudes of each channel."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.counts = torch.zeros(channels, BINS, dtype=torch.int64, device=device)

    def add(self, rows: Tensor) -> None:
        """Take in rows [R, C]."""
        if rows.shape[0] == 0:
            return
        bits = rows.detach().abs().float().contiguous().view(torch.int32)
        place = (bits >> 21).sub_(_FIRST - 1).clamp_(0, BINS - 1)
        place += torch.arange(rows.shape[1], device=rows.device, dtype=torch.int32) * BINS
        self.counts += torch.bincount(place.flatten(), minlength=self.counts.numel()).view_as(self.counts)

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of |x| in each channel [C]."""
        return _quantile(self.counts.double(), q)

    def share_below(self, size: float) -> float:
        """The share of all values with |x| < size, over all channels."""
        counts = self.counts.sum(0).double().cpu()
        total = float(counts.sum())
        edges = _edges(torch.arange(BINS + 1, dtype=torch.float64))
        whole = int((edges <= size).sum()) - 1  # bins that lie below it as a whole
        if size <= 0 or not total or whole >= BINS:
            return 0.0 if size <= 0 or not total else 1.0
        part = (size - float(edges[whole])) / float(edges[whole + 1] - edges[whole]) if whole > 0 else 0.0
        return float(counts[:whole].sum() + counts[whole] * part) / total


def _edges(position: Tensor) -> Tensor:
    """The size at a position in bins: bin i lies between positions i and i + 1, linear in between."""
    octave, quarter = torch.div(position - 1, 4, rounding_mode="floor"), (position - 1) % 4
    return torch.where(position < 1, 0.0, (octave + LOWEST).exp2() * (1 + quarter / 4))


def _quantile(counts: Tensor, q: float) -> Tensor:
    total = counts.sum(1, keepdim=True)
    cumulative = counts.cumsum(1)
    target = (q * total).clamp_min(1e-9)
    at = torch.searchsorted(cumulative, target).clamp_(max=BINS - 1)
    before = cumulative.gather(1, at) - counts.gather(1, at)
    fraction = ((target - before) / counts.gather(1, at).clamp_min(1)).clamp_(0, 1)
    return torch.where(at == 0, 0.0, _edges(at + fraction))[:, 0]
