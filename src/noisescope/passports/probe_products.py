"""How a matrix product sums and treats operands and results: bits kept, rounding, exactness, error against float64.

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

from noisescope.passports.shared_tools import (
    BIG_SIGN,
    SMALL,
    UNCLEAR,
    Array,
    Format,
    Product,
    attempt,
    format_of,
    host_product,
    item,
    name_rounding,
    nonsense,
    rounded,
    scattered,
)

COLUMNS = 16  # of w: 8-bit products need a multiple of 16
INNER_SIZES = (64, 256, 1024, 4096, 16384)
QUICK_INNER_SIZES = (64, 1024)
MARGIN = 1.25  # on the bound of a sum's error: rounding errors of second order


@dataclass(frozen=True)
class Widths:
    """The bits a product keeps: of its operands (after the leading 1), of its running sum, of its result."""

    operand: int | None  # None: operands are not cut
    running_sum: int
    result: int
    drifts: bool = True  # the running sum is not known to be rounded to nearest

    def carried(self, precision: int) -> int:
        """Significant bits of an operand of this precision that come through to the result."""
        operand = precision if self.operand is None else self.operand + 1
        return min(precision, operand, self.running_sum, self.result)

    def expected(self, x: Array, w: Array) -> tuple[Array, Array, Array]:
        """x @ w in float64, sum |x||w|, and the largest error that these widths explain: a worst case, not a spread.

        u_result |y| + (n u_sum + 2 u_operand) sum |x||w|, with u a whole ulp, n = K for sums that drift and sqrt(K)
        for those rounded to nearest, whose errors have no common sign. The float64 reference errs by K 2^-53 itself.
        """
        reference, terms = host_product(x, w), host_product(np.abs(x), np.abs(w))
        inner = x.shape[1]
        cut = 0.0 if self.operand is None else 2 * 2.0**-self.operand
        per_term = (inner if self.drifts else math.sqrt(inner)) * 2.0 ** (1 - self.running_sum) + inner * 2.0**-53 + cut
        return reference, terms, MARGIN * (2.0 ** (1 - self.result) * np.abs(reference) + per_term * terms)


@np.errstate(all="ignore")
def products(product: Product, inner_sizes: Sequence[int]) -> tuple[dict[str, Any], Widths]:
    """All lines about one product, and the widths for judging its other results."""
    found = accumulator(product, inner_sizes)
    result_bits = _result_bits(product, found)
    operand = _operand_bits(product, found, int(result_bits["value"] or 0))
    form, result = format_of(product.dtype), format_of(product.result_dtype)
    kept = int(operand["value"] or form.precision - 1)
    sum_rounding = attempt(lambda: accumulation_rounding(product, found))
    widths = Widths(
        operand=kept if "cut" in operand else None,
        running_sum=found.bits or result.precision,
        result=int(result_bits["value"] or result.precision - 1) + 1,
        drifts="nearest" not in str(sum_rounding["value"]),
    )
    lines = {
        "sum_bits": found.line,
        "sum_rounding": sum_rounding,
        "result_bits": result_bits,
        "result_rounding": attempt(lambda: result_rounding(product, found)),
        "operand_bits": operand,
        "terms": attempt(lambda: _terms(product, kept)),
        "small_integers": attempt(lambda: _small_integers(product)),
        "error": attempt(lambda: _error(product, widths)),
    }
    return lines, widths


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
    """The result of the width probe: bits, and the arrangements that showed the loss (none: no loss was found)."""

    bits: int | None
    at: tuple[Arrangement, ...]
    line: dict[str, Any]


def accumulator(product: Product, inner_sizes: Sequence[int]) -> Accumulator:
    how = (
        "first k at which B + 1 - B with B = 1.5 x 2^k, summed by the product, is not 1: the minimum over inner "
        "sizes and positions of the three terms; the leading bit is counted"
    )
    seen = {at: bits_kept(product, at) for inner in inner_sizes for at in arrangements(inner)}
    bits = min(b for b, _ in seen.values())
    showing = tuple(at for at, (b, lossy) in seen.items() if b == bits and lossy)
    if bits < 3:
        what = f"1.5 x 2^{bits} + 1 - 1.5 x 2^{bits} is not 1: the product does not add small numbers correctly"
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
    how = "sums between two neighbours of the running sum (quarters of an ulp, both signs), the large part subtracted"
    if found.bits is None:
        return item(None, how, hidden="the width of the sum is unknown")
    if not found.at:
        return item(None, how, hidden=f"no loss was observed up to {found.bits - 1} bits")
    names = [_rounding(product, at, found.bits + 1, cancel=True) for at in found.at]
    if None in names:
        return item(None, how, hidden="the format can't represent the numbers of this test")
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
        return item(None, how, hidden=f"the running sum ({found.bits} bits) has fewer bits than the result")
    name = _rounding(product, Arrangement(64, 0, 1, 2), precision + 1, cancel=False)
    return item(name, how) if name else item(None, how, hidden="the format can't represent the numbers of this test")


def _prefix(right: Array) -> int:
    """How many of the first entries are true."""
    return int(np.argmin(right)) if not right.all() else len(right)


def _result_bits(product: Product, found: Accumulator) -> dict[str, Any]:
    """Bits of the result after its leading 1: detects results stored in fewer bits."""
    how = "largest j for which 1 + 2^-j, summed from two terms, is exact; the leading bit is not counted"
    precision = format_of(product.result_dtype).precision
    j = np.arange(1, precision)
    x, w = np.zeros((len(j), 64)), np.ones((64, COLUMNS))
    x[:, 0], x[:, 1], w[1] = 1.0, np.ldexp(1.0, 1 - j), 0.5  # w takes a half: 8-bit formats can't hold the smallest
    got = product(x, w)
    right = (got == (1.0 + np.ldexp(1.0, -j))[:, None]).all(axis=1)
    kept = _prefix(right)
    if kept == 0:
        return nonsense(f"1 + 0.5 gives {got[0, 0]:g}", how)
    short = found.bits is not None and kept < min(found.bits, precision) - 1
    return item(kept, how, of=precision - 1, **({"cut": "the result is stored in fewer bits"} if short else {}))


def _operand_bits(product: Product, found: Accumulator, result_bits: int) -> dict[str, Any]:
    """Bits of an operand after its leading 1 that reach the result: 10 under TF32, 23 in full float32."""
    how = "largest j for which (1 + 2^-j) x 1 is exact, as x and as w; the leading bit is not counted"
    precision = format_of(product.dtype).precision
    j = np.arange(1, precision)
    numbers = 1.0 + np.ldexp(1.0, -j)
    kept = []
    for inner in (64, 1024):
        pick = inner // 2 + 1  # any place: one operand is zero elsewhere
        x = np.zeros((len(j), inner))
        x[:, pick] = numbers
        as_x = product(x, np.ones((inner, COLUMNS)))
        width = -(-len(j) // COLUMNS) * COLUMNS
        w = np.ones((inner, width))
        w[pick, : len(j)] = numbers
        one_hot = np.zeros((COLUMNS, inner))
        one_hot[:, pick] = 1.0
        as_w = product(one_hot, w)[:, : len(j)]
        kept += [_prefix((as_x == numbers[:, None]).all(axis=1)), _prefix((as_w == numbers).all(axis=0))]
    bits = min(kept)
    if bits == 0:
        return nonsense("1.5 x 1 does not give 1.5", how)
    visible = min(found.bits - 1 if found.bits else precision - 1, result_bits, precision - 1)
    if bits >= visible:  # nothing is lost before the sum or the result loses it
        hidden = visible < precision - 1
        return item(
            None if hidden else bits, how, of=precision - 1, **({"hidden": "by a low-precision sum"} if hidden else {})
        )
    return item(bits, how, of=precision - 1, rounding=_operand_rounding(product, bits), cut=_shortcut(bits))


def _shortcut(bits: int) -> str:
    known = {10: "TF32", 11: "HF32", 7: "bfloat16", 3: "e4m3", 2: "e5m2"}
    return f"operands are truncated to {bits} bits" + (f" ({known[bits]})" if bits in known else "")


def _operand_rounding(product: Product, bits: int) -> str:
    """How an operand is truncated: numbers between two neighbours at `bits` bits, in quarters of an ulp."""
    quarter = math.ldexp(1.0, -bits - 2)
    x = np.zeros((len(SMALL), 64))
    x[:, 0] = 1.5 * BIG_SIGN + SMALL * quarter
    observed = (product(x, np.ones((64, COLUMNS))) - 1.5 * BIG_SIGN[:, None]) / quarter
    return name_rounding(observed)


def _terms(product: Product, operand_bits: int) -> dict[str, Any]:
    """Whether x * w enters the sum unrounded.

    With a = 1 + 2^-h, a * a = 1 + 2^(1-h) + 2^(-2h); less 1 + 2^(1-h) leaves 2^(-2h) if nothing was rounded. A fused
    multiply-add rounds after adding, so it is exact only where the other term is in the sum already.
    """
    how = "a x a - (1 + 2^(1-h)) with a = 1 + 2^-h, in both orders: 2^(-2h) where the term is not rounded"
    h = operand_bits
    a, lift = 1.0 + 2.0**-h, 2.0 ** min(6, h)  # lifted, so that a float16 result stays a normal number
    share = []
    for first, second in ((0, 1), (1, 0), (0, 63), (63, 0)):
        x, w = np.zeros((16, 64)), np.zeros((64, COLUMNS))
        x[:, first], w[first] = a, a * lift
        x[:, second], w[second] = 1.0 + 2.0 ** (1 - h), -lift
        share.append(float((product(x, w) == lift * 2.0 ** (-2 * h)).mean()))
    value = "exact" if min(share) == 1 else "fused multiply-add" if max(share) > 0 else "rounded"
    # Below 1 where some results, at the edge of a tile, are computed by another kernel.
    return item(value, how, share_of_results=max(share))


def _small_integers(product: Product) -> dict[str, Any]:
    """A product of -1, 0 and 1 has one correct result, at any width above a few bits, in any order."""
    how = "x [33, K] by w [K, 48] of -1, 0 and 1 against integers on the host, K = 64 and 512"
    wrong, total, columns = 0, 0, set()
    for inner in (64, 512):
        x = np.trunc(1.5 * scattered((33, inner), 1, 8))
        w = np.trunc(1.5 * scattered((inner, 48), 2, 8))
        exact = x.astype(np.int64) @ w.astype(np.int64)
        off = product(x, w) != exact
        wrong, total = wrong + int(off.sum()), total + off.size
        columns |= set(np.flatnonzero(off.any(axis=0)).tolist())
    if wrong:
        where = "all columns" if len(columns) == 48 else f"columns {', '.join(map(str, sorted(columns)[:8]))}"
        what = f"{wrong} of {total} products of small integers are wrong ({where}): rounding can't explain that"
        return nonsense(what, how)
    return item("exact", how)


def _error(product: Product, widths: Widths) -> dict[str, Any]:
    how = "x [40, 768] by w [768, 48] against float64: worst |error| / sum |x||w|, in units of 2^-precision"
    precision = format_of(product.dtype).precision
    x, w = (scattered(shape, seed, precision) for shape, seed in (((40, 768), 3), ((768, 48), 4)))
    reference, terms, bound = widths.expected(x, w)
    error = np.abs(product(x, w) - reference)
    units = float((error / terms).max() * 2.0**precision)
    beyond = ~(error <= bound)  # NaN is beyond
    if beyond.any():
        what = (
            f"{int(beyond.sum())} of {beyond.size} results are further from float64 than the format's precision "
            f"explains"
        )
        return nonsense(what, how, worst=rounded(units))
    return item(rounded(units), how, would_show=rounded(float((bound / terms).max() * 2.0**precision)))
