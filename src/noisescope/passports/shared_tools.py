"""Shared tools of the passport probes: formats, exact inputs, ulps, roundings, and the operations under test.

References live on the host as numpy float64 (or wider). Subnormal numbers are written and read as bit patterns: on a
CPU that flushes them, a cast would lose them before the operation under test saw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Array = np.ndarray[Any, np.dtype[Any]]
Operation = Callable[..., torch.Tensor]

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
    """x [..., M, K] by w [..., K, N] in float64, in plain loops: no BLAS, no threads, a fixed order."""
    return np.asarray(np.einsum("...mk,...kn->...mn", x, w))


def item(value: Any, how: str, **details: Any) -> dict[str, Any]:
    """One line of the passport: the value, how it was found, and what else was seen."""
    return {"value": value, "how": how, **details}


def nonsense(what: str, how: str, **details: Any) -> dict[str, Any]:
    """The line of a probe whose result no healthy arithmetic gives: no value, but what was observed."""
    return item(None, how, nonsense=what, **details)


REFUSALS = (RuntimeError, TypeError, ValueError)  # what torch raises for an operation that a device or dtype lacks


def reason(error: Exception) -> str:
    """The first line of an error: the rest of torch's messages lists backends."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a probe, or why the operation is not available on this device and dtype."""
    try:
        return probe()
    except REFUSALS as error:
        return {"value": None, "skipped": reason(error)}


def rounded(number: float) -> float | None:
    """Three digits, for people and for files; None if the number is not finite."""
    return float(f"{number:.3g}") if math.isfinite(number) else None


# -- operations under test


@dataclass(frozen=True)
class Product:
    """One way to multiply x [M, K] by w [K, N] on a device, fed from the host."""

    call: Operation
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    out_dtype: torch.dtype | None = None  # None: the dtype of the operands

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    def place(self, x: Array) -> torch.Tensor:
        """Host numbers that the dtype holds exactly, on the device."""
        return torch.from_numpy(x).to(self.dtype).to(self.device)

    def raw(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.call(x.to(self.device), w.to(self.device)).cpu()

    def __call__(self, x: Array, w: Array) -> Array:
        return values(self.call(self.place(x), self.place(w)))


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] by w [K, N] as a model does it: the weight is stored as [N, K]."""
    return F.linear(x, w.t().contiguous())


def scaled_product(x: torch.Tensor, w: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """An 8-bit product with scales of 1; w must be column-major. Results are bfloat16."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    columns = w.t().contiguous().t()
    return torch._scaled_mm(x, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


@dataclass(frozen=True)
class Operations:
    """All operations that a passport calls. Replace some of them to emulate a device."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    products: Mapping[str, Operation] = field(default_factory=lambda: {"matmul": torch.matmul, "linear": linear})
    scaled: Mapping[str, Operation] = field(
        default_factory=lambda: {name: partial(scaled_product, fast=name == "fast") for name in ("exact", "fast")}
    )
    elementwise: Mapping[str, Operation] = field(
        default_factory=lambda: {
            "add": torch.add,
            "mul": torch.mul,
            "cast": cast,
            "maximum": torch.maximum,
            "minimum": torch.minimum,
            "relu": torch.relu,
            "exp": torch.exp,
        }
    )
    functions: Mapping[str, Operation] = field(
        default_factory=lambda: {
            "exp": torch.exp,
            "log": torch.log,
            "rsqrt": torch.rsqrt,
            "sqrt": torch.sqrt,
            "div": torch.div,
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
            "silu": F.silu,
            "gelu_erf": F.gelu,
            "gelu_tanh": partial(F.gelu, approximate="tanh"),
            "softmax": partial(torch.softmax, dim=-1),
            "sin": torch.sin,
            "cos": torch.cos,
        }
    )
    attention: Operation = F.scaled_dot_product_attention  # q, k, v [B, H, T, D]


# -- roundings

# Which way a result is rounded shows in sums whose exact value lies between two neighbours. In quarters of an ulp a sum
# is B + s, with B a multiple of 8 in the middle of its binade (1.5 x a power of two, so the spacing is the same on both
# sides) and s = +-1, 2, 3 (below, on and above the tie to an even number) and +-5, 6, 7 (the same above an odd number).
# B has both signs, which tells "toward zero" from "down".
QUARTERS = np.array([sign * s for sign in (1, -1) for s in (1, 2, 3, 5, 6, 7)], dtype=np.float64)
# [24]: the small term of each row, and the sign of the big one
SMALL = np.concatenate([QUARTERS, QUARTERS])
BIG_SIGN = np.concatenate([np.ones(12), -np.ones(12)])

NEAREST_EVEN = "nearest, ties to even"
STOCHASTIC = "stochastic"
UNCLEAR = "unclear"


_OUTWARD = SMALL * BIG_SIGN  # s as seen from zero: positive lengthens the sum
# What each rounding makes of B + s, as a difference from B in quarters: mode -> [24].
DIRECTIONS: dict[str, Array] = {
    NEAREST_EVEN: 4 * np.round(SMALL / 4),  # B / 4 is even, so the parity of s / 4 is that of the sum
    "nearest, ties away from zero": 4 * np.floor(_OUTWARD / 4 + 0.5) * BIG_SIGN,
    "toward zero": 4 * np.floor(_OUTWARD / 4) * BIG_SIGN,
    "away from zero": 4 * np.ceil(_OUTWARD / 4) * BIG_SIGN,
    "up": 4 * np.ceil(SMALL / 4),
    "down": 4 * np.floor(SMALL / 4),
    # Tensor cores align the terms to the largest and cut each before they are added, with a few bits to spare.
    "toward zero, one bit to spare": 4 * np.floor(2 * np.trunc(SMALL / 2) * BIG_SIGN / 4) * BIG_SIGN,
    "each term cut toward zero before the sum": 4 * np.trunc(SMALL / 4),
    "not rounded here": SMALL,
}


def name_rounding(observed: Array) -> str:
    """The rounding that explains observed [24, repeats], each B + s rounded, less B, in quarters of an ulp."""
    if not np.isfinite(observed).all():
        return UNCLEAR
    for name, expected in DIRECTIONS.items():
        if (observed == expected[:, None]).all():
            return name
    low, high = 4 * np.floor(SMALL / 4)[:, None], 4 * np.ceil(SMALL / 4)[:, None]
    varies = (observed != observed[:, :1]).any()
    if varies and ((observed == low) | (observed == high)).all():
        return STOCHASTIC
    return UNCLEAR
