"""Numbers as bits, in whatever dtype a tensor has: float64, float32, bfloat16, float16, float8 (E4M3, E5M2).

Bit 0 is the lowest bit of the mantissa, the highest bit is the sign. Everything runs on the tensor's device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noisescope.errors import InvalidInput

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def width(dtype: torch.dtype) -> int:
    """Bits of a number."""
    return 8 * dtype.itemsize


def mantissa_bits(dtype: torch.dtype) -> int:
    """Stored bits of the mantissa: 23 in float32, 7 in bfloat16, 10 in float16, 3 in float8_e4m3fn."""
    return -int(math.log2(torch.finfo(dtype).eps))


def to_bits(x: Tensor) -> Tensor:
    """The same memory read as integers."""
    return x.view(_INTEGERS[x.dtype.itemsize])


def _constant(value: int, dtype: torch.dtype) -> int:
    """An unsigned pattern as a number that the integer dtype can hold."""
    top = 1 << (8 * dtype.itemsize)
    value %= top
    return value - top if dtype != torch.uint8 and value >= top // 2 else value


def checked_bit(bit: int, dtype: torch.dtype) -> int:
    """A bit that the dtype has."""
    if bit >= width(dtype):
        name = str(dtype).removeprefix("torch.")
        raise InvalidInput(
            f"bit {bit} does not exist in {name}: its bits are 0 (lowest mantissa bit) to {width(dtype) - 1} "
            f"(sign), and the exponent starts at {mantissa_bits(dtype)}"
        )
    return bit


def stick_bit(x: Tensor, bit: int, value: int) -> Tensor:
    """x with one bit stuck at 0 or 1."""
    pattern = to_bits(x)
    one = 1 << checked_bit(bit, x.dtype)
    if value:
        return (pattern | _constant(one, pattern.dtype)).view(x.dtype)
    return (pattern & _constant(~one, pattern.dtype)).view(x.dtype)


def flip_bits(x: Tensor, bit: int | Tensor) -> Tensor:
    """x with one bit inverted in every element; `bit` may name another bit for each."""
    pattern = to_bits(x)
    if isinstance(bit, Tensor):
        one = torch.bitwise_left_shift(torch.ones_like(pattern), bit.to(pattern.dtype))
        return (pattern ^ one).view(x.dtype)
    return (pattern ^ _constant(1 << checked_bit(bit, x.dtype), pattern.dtype)).view(x.dtype)


def cut_mantissa(x: Tensor, cut: int) -> Tensor:
    """x with its lowest `cut` mantissa bits cleared, which rounds toward zero; at most the whole mantissa.

    NaN stays NaN.
    """
    cut = min(cut, mantissa_bits(x.dtype))
    pattern = to_bits(x)
    short = (pattern & _constant(-1 << cut, pattern.dtype)).view(x.dtype)
    return torch.where(x.isnan(), x, short)


def round_mantissa(x: Tensor, keep: int) -> Tensor:
    """float64 x rounded to `keep` mantissa bits, to nearest, ties to even; the exponent's range stays float64's."""
    cut = 52 - keep
    if cut <= 0:
        return x.clone()
    pattern = to_bits(x)
    odd = (pattern >> cut) & 1  # the last bit kept: a tie goes up only where it is set
    short = (pattern + ((1 << (cut - 1)) - 1) + odd) & (-1 << cut)  # a carry runs into the exponent, as it must
    return torch.where(x.isfinite(), short.view(x.dtype), x)


def round_towards(x: Tensor, dtype: torch.dtype, mode: str) -> Tensor:
    """float64 x in a narrower dtype, rounded "toward_zero", "down" or "up" instead of to nearest.

    The nearest number is one of the two that enclose x (torch rounds twice on the way to 16 bits, which changes which
    one, and not that): step back from it where it lies on the wrong side.
    """
    near = x.to(dtype)
    seen = near.to(x.dtype)
    if mode == "toward_zero":
        wrong, shrink = seen.abs() > x.abs(), torch.ones_like(x, dtype=torch.bool)
    elif mode == "down":
        wrong, shrink = seen > x, x > 0
    else:
        wrong, shrink = seen < x, x < 0
    # Sign and magnitude: one less is the next number toward zero (from Inf the largest finite one), one more the next
    # away from it (from -0, to which a tiny negative x was rounded, the smallest negative number).
    pattern = to_bits(near)
    step = torch.where(shrink, pattern - 1, pattern + 1)
    return torch.where(wrong, step.view(dtype), near)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors differ in any bit (NaN equals itself, 0 and -0 differ)."""
    return to_bits(a.contiguous()) != to_bits(b.contiguous())
