"""The laws of anything linear in one operand: a projection, an expert's product, P V of an attention call.

Exact laws cost one call each and are combined where possible: f(-2 x) = -2 f(x) tests oddness and scaling at once, and
is split only if it fails. Additivity takes one call: half of the rows carry x_1, the others x_2 = x - x_1, where x_1 is
0.7 x or 0.3 x at random for each inner index. Both are exact but have other bits than x, so operands that are truncated
on the way in do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import TINY, Judgement
from noisescope.localization.laws.call_results import (
    LawEvidence,
    check_repeatability,
    sampled_rows,
)
from noisescope.localization.laws.calls_with_other_inputs import attempt, probe
from noisescope.localization.laws.output_statistics import copies, measure
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import (
    Z_MEAN,
    Floor,
    Reference,
    combination,
    mean_square_limit,
    number_format,
    squares_from_split,
    truncation_share,
)
from noisescope.localization.tensors import distinct_rows, host_rows, rms, same_numbers

_SEED = 5
_PART = 0.7
_NANS = 32  # inner indices tried with a NaN: one of each lane of a unit up to 32 wide
# Slack on S^2 that were carried over from other rows, by |x|^2. Null: right on average over rows, and too low where a
# row has its large inputs at large weights; 16 covers a row whose S is four times what its norm says. Up to there 7
# standard deviations hold as elsewhere (1.3e-12 a tail). Largest seen: 0.10 of the limit in 780 tests of batch size
# (benchmarks/healthy_limits.py).
_CARRIED = 16.0
# Share of an error that looks like rounding toward zero: 0 for nearest, 1 for truncation. Null: what is found is normal
# about 0, with its standard error at most, so that 0.4 + Z_MEAN errors are passed at 8e-11 per test at most. The 0.4 is
# for the lean that healthy rounding has (density falls within a cell: 0.02 ulp, a share of 0.04).
_TRUNCATES = 0.4


@dataclass(frozen=True)
class Linear:
    """A call that is linear in x [..., M, K]; `call` repeats it without any bias."""

    call: Callable[[Tensor], Tensor]
    x: Tensor
    terms: int  # K, the length of its sums
    free_rows: bool = True  # rows are independent of their place: they may be moved and called alone
    channels: bool = True  # columns of the output are channels, so that output statistics make sense
    additive: bool = True  # not so where activations are quantised on the way
    zero_channels: Callable[[tuple[int, ...]], set[int]] | None = None  # which channels have a weight of 0
    view: Callable[[Tensor], Tensor] = host_rows  # an output as rows and channels, where it has another layout

    @property
    def rolled(self) -> Tensor | None:
        """x with its rows shifted by one, over all leading dimensions."""
        many = self.free_rows and self.x.numel() > self.x.shape[-1]
        return probe(self.x, moved_rows) if many else None


def examine(linear: Linear, y: Tensor | None) -> tuple[LawEvidence, Tensor]:
    """Test all laws; returns the output without bias. `y` is the output for x, None if a bias was added to it."""
    found, x, call = LawEvidence(), linear.x, linear.call
    base = call(x) if y is None else y
    rolled = None if linear.rolled is None else call(linear.rolled)
    repeat = call(x)
    factor = scale_factor(x, base)
    scaled = call(probe(x, lambda t: t * -factor))
    parts = split(linear, random_half(x, _SEED)) if linear.additive else None
    zero, nan = _zero_and_nan(linear)
    one_row = None if rolled is None else probe(x, lambda t: t.reshape(-1, t.shape[-1])[:1])
    alone = None if one_row is None else attempt(lambda: call(one_row))
    with host_arithmetic():
        rows = sampled_rows(base)
        b, whole = host_rows(base)[rows].double(), host_rows(base)
        size = rms(b)
        if parts is None:
            squares = b.square().mean(0, keepdim=True).expand(len(whole), -1)
        else:
            squares = _additivity(linear, base, *parts, found)
        floor = combination([b, b], [_CARRIED * squares[rows]] * 2, linear.terms, base.dtype).limit
        found.check(Law.REPEAT, host_rows(repeat)[rows].double(), b, round_off=floor)
        got = host_rows(scaled)[rows].double() / -factor
        # Stands for oddness as well until it breaks.
        law = Law.ODDNESS if factor == 1 else Law.SCALE_BY_TWO
        found.check(law, got, b, allowed(b, base.dtype), round_off=floor)
        if factor == 1:
            why = "the inputs range so widely that neither twice nor half of them fits the dtype"
            found.skipped.append(f"{Law.SCALE_BY_TWO}: {why}")
        found.check(Law.ZERO, host_rows(zero).double(), torch.zeros_like(host_rows(zero).double()), scale=size)
        if nan is not None:
            _nan_passes(host_rows(nan)[: min(_NANS, x.shape[-1])].double(), found)
        if rolled is not None:
            _same_rows(Law.ROW_ORDER, host_rows(rolled), whole.roll(1, 0), squares.roll(1, 0), linear.terms, found)
        if alone is not None:
            _same_rows(Law.BATCH_SIZE, host_rows(alone), whole[:1], squares[:1], linear.terms, found)
        elif one_row is not None:
            found.skipped.append(f"{Law.BATCH_SIZE}: the module does not take one row alone")
        if linear.channels:
            _statistics(linear, base, found)
        if not found.broken:
            found.add(Judgement({Law.ODDNESS: 0.0}, tests=b.numel()))
    return found, base


def moved_rows(x: Tensor) -> Tensor:
    """x with its rows shifted by one, over all leading dimensions."""
    return x.reshape(-1, x.shape[-1]).roll(1, 0).reshape(x.shape)


def random_half(x: Tensor, seed: int) -> Tensor:
    """A random half of the inner dimension, on the host."""
    coins = torch.rand(x.shape[-1], generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return coins < 0.5


def scale_factor(x: Tensor, y: Tensor) -> float:
    """2, or 1/2 if doubled numbers would not fit the dtype (float16), or 1 if halving would lose bits."""
    with host_arithmetic():
        given = x.detach().cpu()
        largest = max(float(t.detach().cpu().abs().nan_to_num(0.0, posinf=0.0).max()) for t in (given, y))
        if 2.5 * largest < torch.finfo(y.dtype).max:
            return 2.0
        return 0.5 if bool((given / 2 * 2 == given).all()) else 1.0


def allowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers near the end of the normal range may lose a bit when halved, or be flushed in float32 and bfloat16."""
    form = number_format(dtype)
    smallest = 2.0 ** (form.least - form.bits + 1)
    return torch.where(values.abs() < 2.0 ** (form.least + 2), 2 * smallest + 4 * form.flushed, 0.0)


def split(linear: Linear, mask: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """f(x_1), f(x_2) with x_1 + x_2 = x, and the rows of x they belong to, [R, C]; in one call where rows are free."""
    x = linear.x
    with host_arithmetic():
        given = x.detach().cpu()
        large = given * _PART  # x - fl(0.7 x) is exact (Sterbenz 1974)
        part = torch.where(mask, large, given - large)
        rest = given - part
        if not linear.free_rows:
            index = torch.arange(x.numel() // x.shape[-1])
            parts = [part.to(x.device), rest.to(x.device)]
        else:
            rows = given.reshape(-1, x.shape[-1])
            half = len(rows) // 2
            if half == 0:
                return None
            both = [t.reshape(rows.shape)[:half] for t in (part, rest)]
            joined = torch.cat([*both, rows[2 * half :]]).reshape(x.shape).to(x.device)
    if not linear.free_rows:
        return host_rows(linear.call(parts[0])), host_rows(linear.call(parts[1])), index
    out = host_rows(linear.call(joined))
    return out[:half], out[half : 2 * half], torch.arange(half)


def _zero_and_nan(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """f(0), and f of x with one NaN in some rows, at different inner indices, and zeros for the rest."""
    x = linear.x
    zero = linear.call(probe(x, torch.zeros_like))
    if not linear.free_rows or not linear.additive:
        return zero, None
    return zero, linear.call(probe(x, with_nans))


def with_nans(x: Tensor, most: int = _NANS) -> Tensor:
    """Zeros in the shape of x, with one NaN in each of the first rows."""
    rows = torch.zeros_like(x).reshape(-1, x.shape[-1])
    at = torch.arange(min(len(rows), most, x.shape[-1]))
    rows[at, at] = math.nan
    return rows.reshape(x.shape)


def _nan_passes(out: Tensor, found: LawEvidence) -> None:
    """An inner index whose NaN reaches no output is not part of the sum."""
    result = found.check(Law.NAN_PASSES, out, torch.full_like(out, math.nan))
    result.said = f"{Law.NAN_PASSES}: {result.bad} of {out.numel()} results are not NaN"


def _additivity(
    linear: Linear, base: Tensor, first: Tensor, second: Tensor, where: Tensor, found: LawEvidence
) -> Tensor:
    """Test additivity; also returns S^2 of every row for the other tolerances."""
    keep = sampled_rows(first)
    top = where[keep]
    outputs = [first[keep].double(), second[keep].double(), host_rows(base)[top].double()]
    a, b, y = outputs
    squares = squares_from_split((a - b) / (2 * _PART - 1), host_rows(linear.x).double(), top)
    here = squares[top]
    floor = combination(outputs, [here / 2, here / 2, here], linear.terms, base.dtype, short=here)
    error, scale = a + b - y, max(rms(y), TINY)
    result = found.check(Law.ADDITIVITY, a + b, y, floor.limit)
    usable = error.isfinite() & (floor.variance > 0) & _full_precision(outputs, base.dtype)
    if bool(usable.any()):
        strength, visible = _on_average(error, outputs, floor, usable, base.dtype)
        if strength > 1:  # a sort that only a suspect pays for
            strength, visible = _on_average(error, outputs, floor, usable & ~copies(outputs), base.dtype)
        result.raise_to(Law.ADDITIVITY, strength)
        result.visible_share = math.sqrt(visible) / scale
    return squares


def _on_average(
    error: Tensor, outputs: list[Tensor], floor: Floor, usable: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """The strength of what additivity shows on average, and the mean square that would have broken the law."""
    error, variance = error[usable], floor.variance[usable]
    own = Floor(floor.limit[usable], variance)
    square, limit = float((error.square() / variance).mean()), mean_square_limit(len(error))
    share, uncertainty = truncation_share(error, [values[usable] for values in outputs], [1, 1, -1], own, dtype)
    by_share = (abs(share) - Z_MEAN * uncertainty) / _TRUNCATES
    return max(math.sqrt(square / limit), by_share), limit * float(variance.mean())


def _full_precision(outputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Elements in the normal range: under it a number has few bits, and its rounding leans toward zero."""
    return torch.stack(outputs).abs().amin(0) >= 2.0 ** number_format(dtype).least


def _same_rows(law: Law, got: Tensor, expected: Tensor, squares: Tensor, terms: int, found: LawEvidence) -> None:
    """Two outputs of the same rows, summed perhaps in another order."""
    rows = sampled_rows(expected)
    a, b = got[rows].double(), expected[rows].double()
    if same_numbers(a, b):
        found.check(law, a, b)
        return
    own = squares[rows] * _CARRIED
    floor = combination([a, b], [own, own], terms, got.dtype, short=own)  # one row alone may have another kernel
    found.check(law, a, b, floor.limit)


def _statistics(linear: Linear, base: Tensor, found: LawEvidence) -> None:
    """Output statistics on rows whose inputs differ."""
    rows = sampled_rows(base)
    values = host_rows(base)[rows][distinct_rows(host_rows(linear.x)[rows])]
    seen = measure(values)
    if seen.dead and linear.zero_channels is not None:  # a weight of 0 is not a fault
        excused = linear.zero_channels(seen.dead)
        seen = replace(seen, dead=tuple(c for c in seen.dead if c not in excused))
    found.facts.statistics = seen
    found.add_statistics(seen, values)


def probe_suspect(linear: Linear, base: Tensor, found: LawEvidence) -> None:
    """Further calls for a suspect only: does it repeat itself, and is it oddness or scaling that it breaks?"""
    x, call, facts = linear.x, linear.call, found.facts
    steady = check_repeatability(call, x, base, linear.rolled, facts)
    factor = scale_factor(x, base)
    minus, double = call(probe(x, torch.neg)), call(probe(x, lambda t: t * factor))
    with host_arithmetic():
        rows = sampled_rows(base)
        y = steady[rows]
        both = Law.SCALE_BY_TWO if Law.SCALE_BY_TWO in found.results else Law.ODDNESS
        if not facts.random:
            del found.results[both]
            for law, out, sign in ((both, double, factor), (Law.ODDNESS, minus, -1.0)):
                found.check(law, host_rows(out)[rows].double() / sign, y, allowed(y, base.dtype))
        if Law.ODDNESS in found.broken and linear.channels and not facts.random:
            mirrored = Recomputed(-host_rows(minus)[rows], Reference(y, (), exact=True))
            facts.pattern = classify(Evidence.of("linear", mirrored, found.broken[Law.ODDNESS]))
        if not linear.channels:  # for the class alone
            facts.statistics = measure(linear.view(base))
