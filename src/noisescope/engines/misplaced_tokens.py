"""Checks token values against the rows they should come from: shifted by a position, missing, or zero-filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHIFTS = (0, 1, -1, 2, -2)
_CLEARLY = 0.5  # a shift must make the median gap at least so many times smaller
LEAST = 1e-3  # nats: smaller gaps are no misalignment


@dataclass(frozen=True)
class TokenValues:
    """How an engine's token values differ from its own distributions: value t belongs to row t - shift."""

    shift: int = 0
    missing: int = 0  # NaN, or exactly 0 where the distribution says otherwise
    zeros: bool = False  # whether the missing ones were given as 0


def find_misplaced(values: Tensor, expected: Tensor) -> TokenValues:
    """`expected` [T - 1] are the values that the engine's own distributions give the tokens."""
    values, expected = values.double(), expected.double()
    zeros = (values == 0) & (expected < -LEAST)
    missing = values.isnan() | zeros
    gaps = {shift: _gap(values, expected, missing, shift) for shift in _SHIFTS}
    best = min(gaps, key=lambda shift: gaps[shift])
    shift = best if gaps[0] > LEAST and gaps[best] < _CLEARLY * gaps[0] else 0
    return TokenValues(shift, int(missing.sum()), bool(zeros.any()))


def _gap(values: Tensor, expected: Tensor, missing: Tensor, shift: int) -> float:
    moved = torch.roll(expected, shift)
    inside = ~missing & moved.isfinite() & values.isfinite()
    edge = abs(shift)
    inside[: edge if shift > 0 else 0] = False
    inside[len(inside) - (edge if shift < 0 else 0) :] = False
    return float((values - moved)[inside].abs().mean()) if bool(inside.any()) else torch.inf


def mend_tokens(values: Tensor, found: TokenValues) -> Tensor:
    """The values moved to their correct positions; NaN where there is none."""
    mended = torch.where((values == 0) & found.zeros, torch.nan, values.double()).roll(-found.shift)
    if found.shift > 0:
        mended[-found.shift :] = torch.nan
    mended[: max(0, -found.shift)] = torch.nan
    return mended
