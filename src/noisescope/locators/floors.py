"""What healthy arithmetic may be off by: a round-off model per element, derived and not fitted.

u is the unit round-off of a dtype (2^-24, 2^-11, 2^-8), ulp(v) the spacing of its numbers at v.

One correct rounding is off by at most ulp/2 and, spread over a binade, by 0.425 u |v| (std). A sum of K terms taken one
after the other is rounded at each step: std 0.425 u sqrt(sum of squares of the partial sums). That is at most

    0.425 u sqrt(K) sqrt(S^2 + y^2),   S^2 = sum (x_k w_k)^2

for terms of random sign (partial sums grow as S sqrt(k / K)), for one massive term at the start (all partial sums are
about S), and for terms of one sign (they grow as y k / K). Blocked sums, as devices make them, do better by 3 to 10. So
the model is an upper limit for any order of summation, and nothing in it is measured on the device under test, where a
fault could hide in it. (Higham and Mary 2019; Ipsen and Zhou 2020 for the probabilistic bounds.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING_STD = 0.425  # of one rounding to nearest, in u |v|: sqrt(E[1 / m^2] / 3), m log-uniform on [1, 2)
_EXPONENT = 0x7FF << 52  # of a float64
WIDE = torch.float32  # what devices sum 16-bit products in


@dataclass(frozen=True)
class Format:
    """The numbers of a dtype: precision in bits (with the hidden one), smallest normal exponent, largest number."""

    bits: int
    least: int
    largest: float

    @property
    def u(self) -> float:
        return 2.0**-self.bits

    def ulp(self, values: Tensor) -> Tensor:
        """Spacing of this format at float64 values; below the normal numbers it stays that of the smallest."""
        power = (values.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)  # 2^e <= |v| < 2^(e+1)
        return power.clamp(2.0**self.least, 2.0**1023) * 2.0 ** (1 - self.bits)


def number_format(dtype: torch.dtype) -> Format:
    info = torch.finfo(dtype)
    return Format(1 - round(math.log2(info.eps)), round(math.log2(info.smallest_normal)), info.max)


def work_roundoff(dtype: torch.dtype) -> float:
    """u of the arithmetic inside an operator: float32, or the dtype's own where that is finer."""
    return min(number_format(dtype).u, number_format(WIDE).u)


@dataclass(frozen=True)
class Reference:
    """What a healthy operator would give, [R, C], and how far a healthy device may be from it.

    bounds: limits of the errors that roundings and functions make, one tensor for each (they add up at worst)
    spread: standard deviation of the error of long sums; None where there are none
    systematic: mean error that a healthy function (exp, rsqrt) may have, beside that of rounding
    """

    values: Tensor
    bounds: tuple[Tensor, ...]
    spread: Tensor | None = None
    systematic: Tensor | None = None
    exact: bool = False  # equal bit by bit, or wrong

    def columns(self, start: int, stop: int) -> Reference:
        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:, start:stop]

        bounds = tuple(bound[:, start:stop] for bound in self.bounds)
        return Reference(self.values[:, start:stop], bounds, cut(self.spread), cut(self.systematic), self.exact)

    @property
    def bound(self) -> Tensor:
        return sum(self.bounds[1:], self.bounds[0]) if self.bounds else torch.zeros_like(self.values)

    @property
    def variance(self) -> Tensor:
        """An error uniform within +-b has variance b^2 / 3."""
        total = torch.zeros_like(self.values)
        for bound in self.bounds:
            total += bound.square() / 3
        return total if self.spread is None else total + self.spread.square()


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit of one rounding to the output's dtype.

    Numbers under float32's normal range (bfloat16 has the same) may be flushed to 0 by healthy devices: fast exp and
    fast division do. In float16, whose normal numbers end at 6e-5, that would be a fault.
    """
    form = number_format(dtype)
    flushed = 2.0**form.least if form.least <= -126 else 0.0
    return form.ulp(values) / 2 + flushed


def sum_spread(terms: int, squares: Tensor, values: Tensor, u: float) -> Tensor:
    """Standard deviation of the error of a sum of `terms` terms; `squares` is S^2."""
    return ROUNDING_STD * u * math.sqrt(terms + 1) * (squares.double() + values.square()).sqrt()


def operand_spread(squares: Tensor) -> Tensor | None:
    """What shortened operands add to float32 products, where the user has allowed them (TF32 and the like)."""
    allowed = torch.get_float32_matmul_precision()
    if allowed == "highest":
        return None
    u = 2.0**-11 if allowed == "high" else 2.0**-8
    return math.sqrt(2) * u * squares.double().sqrt()
