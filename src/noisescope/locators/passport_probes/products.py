"""What a product does to its operands and results: mantissas cut, exactness, small integers, error against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisescope.locators.passport_probes.accumulation import (
    COLUMNS,
    Accumulator,
    accumulation_rounding,
    accumulator,
    result_rounding,
)
from noisescope.locators.passport_probes.numbers import (
    Array,
    attempt,
    format_of,
    host_product,
    item,
    nonsense,
    rounded,
    scattered,
)
from noisescope.locators.passport_probes.operations import Product
from noisescope.locators.passport_probes.rounding import BIG_SIGN, SMALL, name_rounding

MARGIN = 1.25  # on the bound of a sum's error: rounding errors of second order


@dataclass(frozen=True)
class Widths:
    """Bits a product was seen to keep: of its operands (behind the leading 1), of its running sum, of its result."""

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
    """All lines about one product, and the widths by which its other results can be judged."""
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


def _prefix(right: Array) -> int:
    """How many of the first entries are true."""
    return int(np.argmin(right)) if not right.all() else len(right)


def _result_bits(product: Product, found: Accumulator) -> dict[str, Any]:
    """Bits of the result behind its leading 1: a result stored short is seen here."""
    how = "largest j up to which 1 + 2^-j, summed from two terms, comes back exactly; the leading bit is not counted"
    precision = format_of(product.result_dtype).precision
    j = np.arange(1, precision)
    x, w = np.zeros((len(j), 64)), np.ones((64, COLUMNS))
    x[:, 0], x[:, 1], w[1] = 1.0, np.ldexp(1.0, 1 - j), 0.5  # w takes a half: 8-bit formats can't hold the smallest
    got = product(x, w)
    right = (got == (1.0 + np.ldexp(1.0, -j))[:, None]).all(axis=1)
    kept = _prefix(right)
    if kept == 0:
        return nonsense(f"1 + 0.5 gives {_shown(got[0, 0])}", how)
    short = found.bits is not None and kept < min(found.bits, precision) - 1
    return item(kept, how, of=precision - 1, **({"cut": "the result is stored short"} if short else {}))


def _operand_bits(product: Product, found: Accumulator, result_bits: int) -> dict[str, Any]:
    """Bits of an operand behind its leading 1 that reach the result: 10 under TF32, 23 in whole float32."""
    how = "largest j up to which (1 + 2^-j) x 1 comes back exactly, as x and as w; the leading bit is not counted"
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
        return item(None if hidden else bits, how, of=precision - 1, **({"hidden": "by a short sum"} if hidden else {}))
    return item(bits, how, of=precision - 1, rounding=_operand_rounding(product, bits), cut=_shortcut(bits))


def _shortcut(bits: int) -> str:
    known = {10: "TF32", 11: "HF32", 7: "bfloat16", 3: "e4m3", 2: "e5m2"}
    return f"operands are cut to {bits} bits" + (f" ({known[bits]})" if bits in known else "")


def _operand_rounding(product: Product, bits: int) -> str:
    """How an operand is cut: numbers between two neighbours at `bits` bits, one at a time, in quarters of an ulp."""
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
    """A product of -1, 0 and 1 has one right answer, at any width above a few bits, in any order."""
    how = "x [33, K] by w [K, 48] of -1, 0 and 1 against whole numbers on the host, K = 64 and 512"
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
        what = f"{wrong} of {total} results of small whole numbers are wrong ({where}): no rounding explains that"
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
        what = f"{int(beyond.sum())} of {beyond.size} results are further from float64 than its own bits explain"
        return nonsense(what, how, worst=rounded(units))
    return item(rounded(units), how, would_show=rounded(float((bound / terms).max() * 2.0**precision)))


def _shown(number: float) -> str:
    return f"{number:g}"
