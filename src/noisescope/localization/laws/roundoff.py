"""What healthy round-off may do to a law that is not exact; built on the round-off model of roundoff_floors.py.

A law compares outputs y_i of one operator, sum_i c_i y_i = 0. Each y_i is off by one rounding to its dtype (at most
ulp / 2, variance ulp^2 / 12) and by the error of its sum of K terms (sum_spread), which needs
S^2 = sum_k (x_k w_k)^2. Without weights S^2 comes from the module itself: for a random half m of the inner dimension

    E_m [f(m x) - f((1 - m) x)]^2 = sum_k (x_k w_k)^2,

since that difference is the same sum with random signs. Nothing here is fitted to a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import (
    SLACK,
    WORK_ROUNDOFF,
    Z_ELEMENT,
    Z_MEAN,
    number_format,
    operand_spread,
    sum_spread,
)

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
