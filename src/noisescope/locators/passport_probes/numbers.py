"""Number formats, exact inputs and ulps: what every probe of the passport builds on.

References live on the host as numpy float64 (or wider). Subnormal numbers are written and read as bit patterns: on a
CPU that flushes them, a cast would lose them before the operation under test saw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


@dataclass(frozen=True)
class Format:
    """A floating-point format: precision counts the leading 1, smallest normal number 2^emin."""

    dtype: torch.dtype
    precision: int
    emin: int
    largest: float

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.emin)


def format_of(dtype: torch.dtype) -> Format:
    info = torch.finfo(dtype)
    return Format(dtype, 1 - round(math.log2(info.eps)), round(math.log2(info.smallest_normal)), float(info.max))


def scattered(shape: tuple[int, ...], seed: int, bits: int) -> Array:
    """Uniform numbers in [-1, 1), multiples of 2^(1 - bits), the same on every machine: SplitMix64 of the index."""
    start = (seed << 32) & (2**64 - 1)
    z = np.arange(start, start + math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    whole = (z >> np.uint64(64 - bits)).astype(np.float64)  # 0 ... 2^bits - 1, exact
    return (np.ldexp(whole, 1 - bits) - 1.0).reshape(shape)


def bits_of(tensor: torch.Tensor) -> Array:
    """The bit patterns of a tensor as integers."""
    host = tensor.detach().cpu().contiguous()
    return np.asarray(host.view(INTEGERS[host.element_size()]).numpy())


def power_of_two(form: Format, exponent: int) -> torch.Tensor:
    """2^exponent on the host as a tensor of one number, written as bits; below emin it is subnormal."""
    field = form.precision - 1
    if exponent >= form.emin:
        pattern = (exponent - form.emin + 1) << field
    else:
        pattern = 1 << (field - (form.emin - exponent))
    return torch.tensor([pattern], dtype=INTEGERS[form.dtype.itemsize], device="cpu").view(form.dtype)


def values(tensor: torch.Tensor) -> Array:
    """A device tensor as float64 on the host: exact for all but subnormal numbers on a host that flushes them."""
    return np.asarray(tensor.detach().cpu().to(torch.float64).numpy())


def in_ulps(error: Array, reference: Array, form: Format, floor: float = 0.0) -> Array:
    """Errors in units in the last place of the reference (of `floor` where the reference is smaller)."""
    magnitude = np.maximum(np.abs(reference), max(floor, form.smallest_normal))
    exponent = np.frexp(magnitude)[1] - 1
    return np.asarray(error / np.ldexp(np.ones_like(error), exponent - (form.precision - 1)))


def host_product(x: Array, w: Array) -> Array:
    """x [..., M, K] by w [..., K, N] in float64, in plain loops: no library of products, no threads, one order."""
    return np.asarray(np.einsum("...mk,...kn->...mn", x, w))


def item(value: Any, how: str, **details: Any) -> dict[str, Any]:
    """One line of the passport: the value, how it was found, and what else was seen."""
    return {"value": value, "how": how, **details}


def nonsense(what: str, how: str, **details: Any) -> dict[str, Any]:
    """The line of a probe whose answer no healthy arithmetic gives: no value, but what was seen."""
    return item(None, how, nonsense=what, **details)


REFUSALS = (RuntimeError, TypeError, ValueError)  # what torch raises for an operation that a device or dtype lacks


def reason(error: Exception) -> str:
    """The first line of an error: the rest of torch's texts is a list of backends."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a probe found, or why the operation can't be had on this device and dtype."""
    try:
        return probe()
    except REFUSALS as error:
        return {"value": None, "skipped": reason(error)}


def rounded(number: float) -> float | None:
    """Three digits, for people and for files; None where there is no finite number."""
    return float(f"{number:.3g}") if math.isfinite(number) else None
