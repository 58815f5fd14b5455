"""Tensor helpers for all locators: copies to the host, equality, sizes, rows, channels and lanes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

_KEY = 64  # elements used to distinguish rows before they are compared
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of the numbers they show


def elements_at_a_time() -> int:
    """Chunk size for large tensors, so that intermediate results stay in the processor caches."""
    return max(1 << 18, (1 << 17) * torch.get_num_threads())


def on_host(x: Tensor) -> Tensor:
    return x.detach().to("cpu")


def host_memory() -> int:
    """Bytes of host memory; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return 0


def host_rows(x: Tensor) -> Tensor:
    """Rows [R, C] on the host, in their own dtype."""
    return on_host(x).reshape(-1, x.shape[-1])


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of a tensor as integers: equal NaNs are equal, and -0 is not 0."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(INTEGERS[x.dtype.itemsize])


def rms(x: Tensor) -> float:
    """Of all elements; those that are not finite count as 0."""
    return float(torch.where(x.isfinite(), x, 0.0).square().mean().sqrt()) if x.numel() else 0.0


def differing(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors have different values (NaN equals itself, 0 equals -0)."""
    return (got != expected) & ~(got.isnan() & expected.isnan())


def same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (torch.equal(a, b) or not bool(differing(a, b).any()))


def distinct_rows(x: Tensor, *others: Tensor, among: Sequence[int] | None = None) -> list[int]:
    """Indices of distinct rows (of x and all others together): duplicates repeat the same errors."""
    every = [bits_of(tensor).numpy() for tensor in (x, *others)]
    seen: dict[bytes, list[int]] = {}
    for row in range(len(x)) if among is None else among:
        alike = seen.setdefault(every[0][row, :_KEY].tobytes(), [])
        if not any(all((t[row] == t[other]).all() for t in every) for other in alike):
            alike.append(row)
    return sorted(row for alike in seen.values() for row in alike)


def rows_apart(values: Tensor, *, among: Sequence[int], share: float) -> list[int]:
    """Of these rows, those that differ from each other by more than a share of the rms, in some of 64 columns."""
    some = values[list(among)][:, :: max(1, values.shape[1] // 64)]
    limit, near = share * rms(some), torch.zeros(len(some), dtype=torch.bool)
    kept = []
    for at, row in enumerate(among):
        if not near[at]:
            kept.append(row)
            near |= (some - some[at]).abs().amax(1) <= limit
    return kept


def any_row_bits(bits: Tensor) -> Tensor:
    """The bits that are 1 in any row of [R, C]."""
    return torch.from_numpy(np.bitwise_or.reduce(bits.numpy(), axis=0))


def channels_with(bad: Tensor) -> tuple[int, ...]:
    """Channels with bad elements; () if more than half of all have some."""
    found = bad.reshape(-1, bad.shape[-1]).any(0).nonzero().flatten().tolist()
    return tuple(found) if len(found) * 2 <= bad.shape[-1] else ()


def lane_period(channels: Iterable[int], width: int, *, least: float) -> int | None:
    """The stride of a lane: at least three channels, a share of `least` of all that lie one stride apart."""
    found = sorted(channels)
    if len(found) < 3:
        return None
    step = math.gcd(*(b - a for a, b in itertools.pairwise(found)))
    expected = (width - found[0] % step + step - 1) // step if step else 0
    return step if step > 1 and len(found) >= least * expected else None
