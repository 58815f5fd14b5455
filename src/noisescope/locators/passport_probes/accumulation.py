"""How a product sums: bits kept, and the rounding of the running sum and of the result.

B + 1 - B with B = 1.5 x 2^k is 1 as long as the sum keeps more than k bits (1.5: with a bare power of two, the numbers
just below it lie twice as close, and one order of terms would show a bit too many). The three terms lie at places of
the inner dimension that meet in the same partial sum for some order of summation, whichever that is: the worst
arrangement counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisescope.locators.passport_probes.numbers import Array, Format, format_of, item, nonsense
from noisescope.locators.passport_probes.operations import Product
from noisescope.locators.passport_probes.rounding import BIG_SIGN, SMALL, UNCLEAR, name_rounding

COLUMNS = 16  # of w: 8-bit products need a multiple of 16
INNER_SIZES = (64, 256, 1024, 4096, 16384)
QUICK_INNER_SIZES = (64, 1024)


@dataclass(frozen=True)
class Span:
    """Exponents the operands use: x from 2^x_low over x_span binades, w likewise; the unit is 2^(x_low + w_low)."""

    x_low: int
    x_span: int
    w_low: int
    w_span: int

    @property
    def unit(self) -> float:
        return math.ldexp(1.0, self.x_low + self.w_low)

    def split(self, k: int) -> tuple[int, int]:
        """2^k as a power in x and one in w: short formats can't hold all of it in one operand."""
        in_x = min(k, self.x_span)
        return in_x, k - in_x


def span_of(form: Format) -> Span:
    """Small terms stay normal numbers, in operands and result; big ones fit the format."""
    if form.emin < -100:
        return Span(0, 63, 0, 0)  # float64, float32, bfloat16
    if form.largest > 2**15:
        return Span(-12, 27, 0, 15)  # float16
    return Span(-6, 14, -6, 14)  # 8 bits


@dataclass(frozen=True)
class Arrangement:
    """Where the three terms lie along the inner dimension."""

    inner: int
    big: int
    small: int
    minus_big: int


def arrangements(inner: int) -> list[Arrangement]:
    """Neighbours, the same lane of a vector unit, far apart; where the inner size is large, only those far apart."""
    far = [Arrangement(inner, 0, inner // 4, inner // 2), Arrangement(inner, 0, inner // 2, inner - 1)]
    if inner > 1024:
        return far
    return [*(Arrangement(inner, 0, stride, 2 * stride) for stride in (1, 8)), Arrangement(inner, 2, 1, 0), *far]


def summed(product: Product, at: Arrangement, big: Array, small: Array, *, w_powers: Array, cancel: bool) -> Array:
    """big * 2^w_power + small (- big * 2^w_power) of each row and column, in units: [rows, columns]."""
    span = span_of(format_of(product.dtype))
    x = np.zeros((len(big), at.inner))
    w = np.full((at.inner, len(w_powers)), math.ldexp(1.0, span.w_low))
    x[:, at.big], x[:, at.small] = np.ldexp(big, span.x_low), np.ldexp(small, span.x_low)
    w[at.big] = np.ldexp(1.0, span.w_low + w_powers)
    if cancel:
        x[:, at.minus_big], w[at.minus_big] = -x[:, at.big], w[at.big]
    return product(x, w) / span.unit


def bits_kept(product: Product, at: Arrangement) -> tuple[int, bool]:
    """The first k at which B + 1 - B is not 1, and whether there is one; else one more than was tried."""
    span = span_of(format_of(product.dtype))
    k_x = np.arange(span.x_span + 1)
    k_w = np.repeat([0, min(span.w_span, span.x_span)], COLUMNS // 2)
    got = summed(product, at, np.ldexp(1.5, k_x), np.ones(len(k_x)), w_powers=k_w, cancel=True)
    k = k_x[:, None] + k_w[None, :]
    wrong = got != 1.0  # NaN is wrong too
    return (int(k[wrong].min()), True) if wrong.any() else (int(k.max()) + 1, False)


@dataclass(frozen=True)
class Accumulator:
    """What the width probe found: bits, and the arrangements that showed the loss (none: no loss was seen)."""

    bits: int | None
    at: tuple[Arrangement, ...]
    line: dict[str, Any]


def accumulator(product: Product, inner_sizes: Sequence[int]) -> Accumulator:
    how = (
        "first k at which B + 1 - B with B = 1.5 x 2^k, summed by the product, is not 1: the least over inner sizes "
        "and places of the three terms; the leading bit counts"
    )
    seen = {at: bits_kept(product, at) for inner in inner_sizes for at in arrangements(inner)}
    bits = min(b for b, _ in seen.values())
    showing = tuple(at for at, (b, lossy) in seen.items() if b == bits and lossy)
    if bits < 3:
        what = f"1.5 x 2^{bits} + 1 - 1.5 x 2^{bits} is not 1: the product does not add up small numbers"
        return Accumulator(None, (), nonsense(what, how, inner_size=showing[0].inner))
    by_size = {str(inner): min(b for at, (b, _) in seen.items() if at.inner == inner) for inner in inner_sizes}
    most = max(b for b, _ in seen.values())
    return Accumulator(
        bits, showing, item(bits, how, at_least=not showing, most_in_an_arrangement=most, by_inner_size=by_size)
    )


def _rounding(product: Product, at: Arrangement, k: int, *, cancel: bool) -> str | None:
    """How +-1.5 * 2^k + s is rounded, where 2^k is a quarter ulp's power; None where the format can't hold it."""
    span = span_of(format_of(product.dtype))
    in_x, in_w = span.split(k)
    if in_w > span.w_span:
        return None
    big = 1.5 * BIG_SIGN * 2.0**in_x
    w_powers = np.full(COLUMNS, in_w)
    runs = [summed(product, at, big, SMALL, w_powers=w_powers, cancel=cancel) for _ in range(2)]
    observed = np.concatenate(runs, axis=1)
    return name_rounding(observed if cancel else observed - (big * 2.0**in_w)[:, None])


def accumulation_rounding(product: Product, found: Accumulator) -> dict[str, Any]:
    """The rounding of the running sum, at the width and in the arrangement that showed the loss."""
    how = "sums between two neighbours of the running sum (quarters of an ulp, both signs), the large part taken away"
    if found.bits is None:
        return item(None, how, hidden="the width of the sum is unknown")
    if not found.at:
        return item(None, how, hidden=f"no loss was seen up to {found.bits - 1} bits")
    names = [_rounding(product, at, found.bits + 1, cancel=True) for at in found.at]
    if None in names:
        return item(None, how, hidden="the format can't hold the numbers of this probe")
    # In some arrangements the terms of one element meet in another order than those of the next: not clear there.
    clear = list(dict.fromkeys(name for name in names if name != UNCLEAR)) or [UNCLEAR]
    return item(clear[0], how, **({"in_other_arrangements": clear[1:]} if clear[1:] else {}))


def result_rounding(product: Product, found: Accumulator) -> dict[str, Any]:
    """The rounding of the result as it is stored."""
    how = "sums of two terms between two neighbours of the result (quarters of an ulp, both signs)"
    precision = format_of(product.result_dtype).precision
    if found.bits is None:
        return item(None, how, hidden="the width of the sum is unknown")
    if found.bits < precision:
        return item(None, how, hidden=f"the running sum ({found.bits} bits) is shorter than the result")
    name = _rounding(product, Arrangement(64, 0, 1, 2), precision + 1, cancel=False)
    return item(name, how) if name else item(None, how, hidden="the format can't hold the numbers of this probe")
