"""What healthy arithmetic may be off by: a round-off model per element, derived and not fitted.

u is the unit round-off of a dtype (2^-24, 2^-11, 2^-8), ulp(v) the spacing of its numbers at v.

One correct rounding is off by at most ulp/2 and, spread over a binade, by 0.425 u |v| (std). A sum of K terms taken one
after the other is rounded at each step: std 0.425 u sqrt(sum of squares of the partial sums). That is at most

    0.425 u sqrt(K) sqrt(S^2 + P^2 + y^2),   S^2 = sum (x_k w_k)^2,   P^2 the mean square of the partial sums

for terms of random sign (partial sums grow as S sqrt(k / K)), for one massive term at the start (all partial sums are
about S), for terms of one sign (they grow as y k / K), and for parts that cancel each other (P, taken at a few places
in the order of the inner dimension). An addend from which a kernel starts is in every partial sum, so b^2 is added to
P^2. Blocked sums, as devices make them, do better by 2 to 10. So the model is an upper limit for any usual order of
summation, and nothing in it is measured on the device under test, where a fault could hide in it. (Higham and Mary
2019; Ipsen and Zhou 2020 for the probabilistic bounds.)
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUNDING_STD = 0.425  # of one rounding to nearest, in u |v|: sqrt(E[1 / m^2] / 3), m log-uniform on [1, 2)
SLACK = 2.0  # on the limits of roundings, which add up only at worst
Z_ELEMENT = 7.0  # standard deviations of a sum's error: 1.3e-12 a tail, 0.001 false alarms in 10^9 elements
Z_MEAN = 6.5  # of a mean over many elements: 8e-11 two-sided, 0.001 in 10^7 means (channels of all operators)
_EXPONENT = 0x7FF << 52  # of a float64
WORK_ROUNDOFF = 2.0**-24  # u of the arithmetic inside an operator: 16-bit products, norms and softmax are in float32


@dataclass(frozen=True)
class Format:
    """The numbers of a dtype: precision in bits (with the hidden one), smallest normal exponent, largest number."""

    bits: int
    least: int
    largest: float

    @property
    def u(self) -> float:
        return 2.0**-self.bits

    @property
    def flushed(self) -> float:
        """Below this healthy devices may give 0: fast exp and division do under float32's normal range (bfloat16 has
        the same). In float16, whose normal numbers end at 6e-5, that would be a fault."""
        return 2.0**self.least if self.least <= -126 else 0.0

    def ulp(self, values: Tensor) -> Tensor:
        """Spacing of this format at float64 values; below the normal numbers it stays that of the smallest."""
        power = (values.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)  # 2^e <= |v| < 2^(e+1)
        return power.clamp_(2.0**self.least, 2.0**1023).mul_(2.0 ** (1 - self.bits))


def number_format(dtype: torch.dtype) -> Format:
    """The numbers that a dtype's outputs are judged by: its own, and float32's for float64.

    A float64 model is no float64 computation: model code takes norms, softmax and angles in float32 whatever the dtype.
    Where it is one, the host has nothing wider, and could not tell the device's error from its own.
    """
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    return Format(1 - round(math.log2(info.eps)), round(math.log2(info.smallest_normal)), info.max)


def as_judged(y: Tensor) -> Tensor:
    """An output in the format it is judged by; one more rounding to float32 is within every limit."""
    return y.float() if y.dtype == torch.float64 else y


def narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The one with the coarser numbers: under autocast an operator rounds to it, on its way in or out."""
    return min(one, other, key=lambda dtype: number_format(dtype).bits)


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
    grain: Tensor | None = None  # spacing of the largest number that may have cancelled to a value: see `sum_grain`
    offset: bool = False  # something is added that is the same in all rows: bits below the grain may be its own
    exact: bool = False  # equal bit by bit, or wrong
    sums: bool = False  # errors of long sums are unlike from row to row; those of a function of few bits are not

    def __getitem__(self, where: Any) -> Reference:
        """Some rows, or rows and columns."""
        spread, systematic, grain = (
            None if tensor is None else tensor[where] for tensor in (self.spread, self.systematic, self.grain)
        )
        bounds = tuple(bound[where] for bound in self.bounds)
        return dataclasses.replace(
            self, values=self.values[where], bounds=bounds, spread=spread, systematic=systematic, grain=grain
        )

    @property
    def bound(self) -> Tensor:
        return sum(self.bounds[1:], self.bounds[0]) if self.bounds else torch.zeros_like(self.values)

    @property
    def variance(self) -> Tensor:
        """An error uniform within +-b has variance b^2 / 3."""
        total = self.bounds[0].square().mul_(1 / 3) if self.bounds else torch.zeros_like(self.values)
        for bound in self.bounds[1:]:
            total.addcmul_(bound, bound, value=1 / 3)
        return total if self.spread is None else total.addcmul_(self.spread, self.spread)


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit of one rounding to the output's dtype."""
    form = number_format(dtype)
    return form.ulp(values).mul_(0.5).add_(form.flushed)


def mean_bound(limit: Tensor, values: Tensor) -> float:
    """The mean of how far elements may be off, each by the rms of all at most, relative to that rms.

    NaN and infinity have no bound: the device must have them in the same places.
    """
    finite = values.isfinite()
    if not bool(finite.all()):
        limit, values = limit[finite], values[finite]
    size = float(values.double().square().mean().sqrt()) if values.numel() else 0.0
    if size == 0:
        return 0.0
    return float((limit.double() / size).nan_to_num(1.0).clamp_max(1.0).mean())


def sum_spread(terms: int, squares: Tensor, values: Tensor, u: float) -> Tensor:
    """Standard deviation of the error of a sum of `terms` terms; `squares` is S^2 + P^2."""
    return values.square().add_(squares).sqrt_().mul_(ROUNDING_STD * u * math.sqrt(terms + 1))


def sum_grain(terms: int, squares: Tensor, values: Tensor, u: float) -> Tensor:
    """Spacing of the largest partial sum that any order of summation can have: what cancels leaves zeros below it.

    Every partial sum is at most sum |x_k w_k| <= sqrt(K) S (Cauchy and Schwarz); numbers up to a have spacing 2 u a.
    """
    return values.square().add_(squares).sqrt_().mul_(2 * u * math.sqrt(terms + 1))


@dataclass(frozen=True)
class Shortening:
    """What torch may shorten in a product: a spread in units of S, and a mean share that products may be too small by.

    Operands of `bits` bits are rounded, or cut: each is then short by up to 2 u, on average by at most u (its mantissa
    near 1; 0.72 u for a log-uniform one), and a product by twice that. The spread of either is below sqrt(2) u.
    """

    spread: float = 0.0
    lean: float = 0.0


def shortened(dtype: torch.dtype, device: str) -> Shortening:
    """What torch may shorten in a product on this kind of device, as the user has allowed it.

    float32 operands cut to TF32 or bfloat16, and on CUDA, by default, parts of a long 16-bit sum that are rounded to 16
    bits before they are added up (split-K).
    """
    if dtype == torch.float32:
        u = 2.0 ** -operand_bits()
        return Shortening(math.sqrt(2) * u, 2 * u) if u > WORK_ROUNDOFF else Shortening()
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if device != "cuda" or dtype not in names:
        return Shortening()
    found = getattr(torch.backends.cuda.matmul, f"allow_{names[dtype]}_reduced_precision_reduction", False)
    reduced = any(found) if isinstance(found, tuple) else bool(found)
    return Shortening(ROUNDING_STD * number_format(dtype).u) if reduced else Shortening()


def truncated_attention(dtype: torch.dtype, device: str, width: int) -> tuple[float, float]:
    """How much too small fused float32 attention on CUDA may be: its weighted sums, and its scores, as shares.

    A float32 product is three of TF32 there, whose sums the tensor cores truncate. On an H200 the sums were short by up
    to 3.3 u of sum p |v|, scores by up to 7.8 u (heads of 8 to 128, 3 to 4,000 keys: benchmarks/attention_lean.py).
    """
    if dtype != torch.float32 or device != "cuda":
        return 0.0, 0.0
    return 5 * WORK_ROUNDOFF, 12 * WORK_ROUNDOFF * max(1.0, width / 128)


def operand_bits() -> int:
    """Bits of a float32 operand that the user's settings let a product keep: 24, 11 of TF32, or 8 of bfloat16."""
    try:
        return {"highest": 24, "high": 11, "medium": 8}[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by backend, in the newer way: then torch does not answer the older question
        found = {str(torch.backends.cuda.matmul.fp32_precision), str(vars(torch.backends).get("fp32_precision"))}
        return 8 if "bf16" in found else 11 if "tf32" in found else 24


def convolution_bits(device: str) -> int:
    """The same of a convolution: cuDNN takes TF32 unless it is forbidden."""
    if device != "cuda":
        return operand_bits()
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set in the newer way
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return 11 if allowed else 24


def product_roundoff(dtype: torch.dtype) -> float:
    """u of the arithmetic inside a product of numbers of this dtype; a cut operand is off by up to twice its own."""
    bits = operand_bits() if dtype == torch.float32 else 24
    return WORK_ROUNDOFF if bits == 24 else 2 * 2.0**-bits


def operand_spread(squares: Tensor) -> Tensor | None:
    """What shortened operands add to float32 products; None where the user has not allowed any."""
    bits = operand_bits()
    return None if bits == 24 else math.sqrt(2) * 2.0**-bits * squares.double().sqrt()


# What healthy round-off may do to a law that is not exact; built on the round-off model of roundoff_floors.py.
#
# A law compares outputs y_i of one operator, sum_i c_i y_i = 0. Each y_i is off by one rounding to its dtype (at most
# ulp / 2, variance ulp^2 / 12) and by the error of its sum of K terms (sum_spread), which needs S^2 = sum_k (x_k
# w_k)^2. Without weights S^2 comes from the module itself: for a random half m of the inner dimension
#
# E_m [f(m x) - f((1 - m) x)]^2 = sum_k (x_k w_k)^2,
#
# since that difference is the same sum with random signs. Nothing here is fitted to a model.


# Limit of mean (e / sigma)^2; a correct rounding gives 1, float32 sums less. Null as of judge.RMS_LIMIT, with more
# room, since S^2 is estimated from the module's own answers: normal errors of n = 32 elements pass it at 2e-11.
MEAN_SQUARE = 2.0


@dataclass(frozen=True)
class Floor:
    """How far a combination of outputs may be from 0: element by element, and its variance."""

    limit: Tensor
    variance: Tensor


def combination(
    outputs: list[Tensor], squares: list[Tensor], terms: int, dtype: torch.dtype, *, short: Tensor | None = None
) -> Floor:
    """The floor of sum_i +-y_i; outputs [R, C] in float64 and their S^2, K = `terms`.

    `short`: S^2 of operands whose bits the law changes; they count where the user has allowed float32 operands to be
    shortened (TF32).
    """
    form, u = number_format(dtype), WORK_ROUNDOFF
    limit = torch.zeros_like(outputs[0])
    variance = torch.zeros_like(limit)
    spread = torch.zeros_like(limit)
    for values, own in zip(outputs, squares, strict=True):
        ulp = form.ulp(values)
        limit += ulp / 2
        variance += ulp.square() / 12
        spread += sum_spread(terms, own, values, u).square()
    shortened = operand_spread(short) if short is not None and dtype == torch.float32 else None
    if shortened is not None:
        spread += shortened.square()
    # Under the normal range a device may flush to 0: float32 and bfloat16 units do, and the result is as good.
    return Floor(SLACK * limit + Z_ELEMENT * spread.sqrt() + 4 * form.flushed, variance + spread + form.flushed**2)


def squares_from_split(difference: Tensor, x: Tensor, split_rows: Tensor) -> Tensor:
    """S^2 [R, C] from f(m x) - f((1 - m) x) on some rows, carried to other rows by |x|^2.

    One draw of signs says little about one element, and rows may be so alike that a column is one draw too. So the
    largest of three estimates counts: the mean of the column, that of the row, and the element's own square (where one
    massive term makes up the sum, the difference is that term itself).
    """
    square, tiny = difference.square(), torch.finfo(torch.float64).tiny
    size = x.square().sum(-1, keepdim=True)
    mean = size[split_rows].mean().clamp_min(tiny)
    by_row = (square.mean(-1, keepdim=True) / size[split_rows].clamp_min(tiny)).median() * size
    squares = torch.maximum(square.mean(0)[None] * (size / mean), by_row)
    squares[split_rows] = torch.maximum(squares[split_rows], torch.maximum(square, square.mean(-1, keepdim=True)))
    return squares


def mean_square_limit(count: int) -> float:
    """Limit of the mean of (e / sigma)^2 over `count` elements."""
    return MEAN_SQUARE + Z_MEAN * math.sqrt(2 / max(1, count))


def truncation_share(
    error: Tensor, outputs: list[Tensor], signs: list[int], floor: Floor, dtype: torch.dtype
) -> tuple[float, float]:
    """How much of the error is what rounding toward zero would make, by least squares, and its standard error.

    A truncated y is short by ulp / 2 on average, so e = -c sum_i sign_i sign(y_i) ulp(y_i) / 2 with c = 1; rounding to
    nearest gives c = 0.
    """
    form = number_format(dtype)
    pattern = torch.zeros_like(error)
    for values, sign in zip(outputs, signs, strict=True):
        pattern -= sign * values.sign() * form.ulp(values) / 2
    weight = pattern / floor.variance
    total = float((weight * pattern).sum())
    return (0.0, math.inf) if total <= 0 else (float((weight * error).sum()) / total, total**-0.5)
