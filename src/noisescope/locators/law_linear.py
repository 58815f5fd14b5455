"""The laws of anything linear in one operand: a projection, an expert's product, P V of an attention call.

Exact laws cost a call each and are put together where they can: f(-2 x) = -2 f(x) is oddness and scaling at once, and
is taken apart only where it breaks. Additivity takes one call: half of the rows carry m x, the others (1 - m) x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescope.locators import law_statistics
from noisescope.locators.floors import number_format
from noisescope.locators.law_floors import (
    Z_MEAN,
    combination,
    mean_square_limit,
    squares_from_split,
    truncation_share,
)
from noisescope.locators.law_readings import Reading, exact, floored, host, rms, same_bits
from noisescope.locators.law_repeats import steadiness
from noisescope.locators.recompute import host_arithmetic

ANALYSED = 1 << 20  # numbers of an output that are looked at, in whole rows
_SEED = 5
_CARRIED = 16.0  # slack on sums of squares that were carried over from other rows
_TRUNCATES = 0.4  # share of an error that looks like rounding toward zero: 0 for nearest, 1 for truncation


@dataclass
class Examined:
    """The readings of one call of an operator, and what tells fault classes apart."""

    readings: list[Reading] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(reading.broken for reading in self.readings)


@dataclass(frozen=True)
class Linear:
    """A call that is linear in x [..., M, K]; `call` makes it again without any bias."""

    call: Callable[[Tensor], Tensor]
    x: Tensor
    terms: int  # K, the length of its sums
    free_rows: bool = True  # rows are independent of their place: they may be moved and called alone
    statistics: bool = True  # columns of the output are channels, so that R24 makes sense
    additive: bool = True  # not so where activations are quantised on the way
    zero_channels: Callable[[tuple[int, ...]], set[int]] | None = None  # which channels have a weight of 0


def examine(linear: Linear, y: Tensor | None) -> Examined:
    """All laws; `y` is the output for x as it came, None where a bias was added to it."""
    found = Examined()
    x = linear.x
    if x.numel() == 0:
        return found
    base = linear.call(x) if y is None else y
    rolled = _rolled(x) if linear.free_rows else None
    turned = None if rolled is None else linear.call(rolled)
    repeat = linear.call(x)
    factor = _factor(x, base)
    scaled = linear.call(x * -factor)
    mask = torch.rand(x.shape[-1], generator=torch.Generator("cpu").manual_seed(_SEED)) < 0.5
    halves = _halves(linear, mask.to(x.device)) if linear.additive else None
    zero, nan = _zero_and_nan(linear)
    alone = linear.call(x.reshape(-1, x.shape[-1])[:1]) if linear.free_rows and x.numel() > x.shape[-1] else None
    with host_arithmetic():
        rows = _rows(base)
        b = host(base)[rows].double()
        found.readings.append(repeat_reading(host(base), host(repeat)))
        found.readings.append(
            exact("R17", host(scaled)[rows].double(), -factor * b, _allowed(b, base.dtype))
        )  # stands for R7 as well until it breaks
        found.readings.append(exact("R8", host(zero).double(), torch.zeros_like(host(zero).double())))
        if nan is not None:
            found.readings.append(exact("R26", host(nan).double(), torch.full_like(host(nan).double(), math.nan)))
        squares = None
        if halves is not None:
            squares = _additivity(linear, base, *halves, found)
        if squares is None:
            squares = b.square().mean(0, keepdim=True).expand(len(host(base)), -1)
        if turned is not None:
            _same_rows("R2", host(turned), _rolled_back(base, x), squares, linear.terms, found)
        if alone is not None:
            _same_rows("R3", host(alone), host(base)[:1], squares[:1], linear.terms, found)
        if linear.statistics:
            _statistics(linear, base, found)
    if found.broken:
        _look_closer(linear, base, found)
    else:
        found.readings.append(Reading("R7", 0.0, elements=b.numel()))
    return found


def _rows(y: Tensor) -> Tensor:
    """Indices of the rows that are looked at: all, or as many as ANALYSED numbers hold, spread evenly."""
    total = y.numel() // max(1, y.shape[-1])
    most = max(2, ANALYSED // max(1, y.shape[-1]))
    return torch.arange(total) if total <= most else torch.linspace(0, total - 1, most).long()


def _rolled(x: Tensor) -> Tensor | None:
    """Rows moved on by one, over all leading dimensions."""
    flat = x.reshape(-1, x.shape[-1])
    return None if len(flat) < 2 else flat.roll(1, 0).reshape(x.shape)


def _rolled_back(y: Tensor, x: Tensor) -> Tensor:
    return host(y).roll(1, 0)


def _factor(x: Tensor, y: Tensor) -> float:
    """2, or 1/2 where twice the numbers would not fit the dtype (float16)."""
    largest = max(float(x.abs().nan_to_num(0.0).max()), float(y.abs().nan_to_num(0.0, posinf=0.0).max()))
    return 2.0 if 2.5 * largest < torch.finfo(y.dtype).max else 0.5


def _allowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers near the end of the normal range may lose a bit when halved, or be flushed in float32 and bfloat16."""
    form = number_format(dtype)
    smallest = 2.0 ** (form.least - form.bits + 1)
    flushed = 2.0**form.least if form.least <= -126 else 0.0
    return torch.where(values.abs() < 2.0 ** (form.least + 2), 2 * smallest + 4 * flushed, 0.0)


def _halves(linear: Linear, mask: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """f(m x), f((1 - m) x) and the rows of x they belong to, each [R, C].

    In one call where rows are free: the first half of them keeps one half of the inner dimension, the second half of
    them the other half of the same numbers.
    """
    x = linear.x
    if not linear.free_rows:
        index = torch.arange(x.numel() // x.shape[-1])
        return host(linear.call(x * mask)), host(linear.call(x * ~mask)), index
    flat = x.reshape(-1, x.shape[-1])
    half = len(flat) // 2
    if half == 0:
        return None
    new = flat.clone()
    new[:half], new[half : 2 * half] = flat[:half] * mask, flat[:half] * ~mask
    out = host(linear.call(new.reshape(x.shape)))
    return out[:half], out[half : 2 * half], torch.arange(half)


def _zero_and_nan(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """f(0), and f of a row with one NaN in it."""
    x = linear.x
    if not linear.free_rows:
        return linear.call(torch.zeros_like(x)), None
    few = torch.zeros_like(x.reshape(-1, x.shape[-1])[:4])
    if not linear.additive or len(few) < 2:
        return linear.call(few), None
    few[0, 0] = math.nan
    out = linear.call(few)
    return out[1:], out[:1]


def repeat_reading(first: Tensor, second: Tensor) -> Reading:
    return exact("R1", second.double(), first.double())


def _additivity(
    linear: Linear, base: Tensor, first: Tensor, second: Tensor, where: Tensor, found: Examined
) -> Tensor:
    """R18, and S^2 of every row for the other floors."""
    keep = _rows(first)
    top = where[keep]
    a, b, y = first[keep].double(), second[keep].double(), host(base)[top].double()
    x = host(linear.x).double()
    squares = squares_from_split(a - b, x, top)
    here = squares[top]
    outputs = [a, b, y]
    floor = combination(outputs, [here / 2, here / 2, here], linear.terms, base.dtype)
    error = a + b - y
    scale = rms(y)
    reading = floored("R18", error, floor.limit, scale)
    usable = error.isfinite() & (floor.variance > 0)
    if bool(usable.any()):
        square = float((error.square() / floor.variance)[usable].mean())
        limit = mean_square_limit(int(usable.sum()))
        share, uncertainty = truncation_share(
            error.nan_to_num(0.0, 0.0, 0.0), outputs, [1, 1, -1], floor, base.dtype
        )
        by_share = (abs(share) - Z_MEAN * uncertainty) / _TRUNCATES
        typical = float(floor.variance[usable].mean().sqrt())
        strength = max(reading.strength, math.sqrt(square / limit), by_share)
        found.facts["truncates"] = share if abs(share) > Z_MEAN * uncertainty else 0.0
        found.facts["mean square"] = square
        reading = Reading(
            "R18",
            strength,
            max(reading.size, float(error[usable].square().mean().sqrt()) / max(scale, 1e-300)),
            math.sqrt(limit) * typical / max(scale, 1e-300),
            reading.share,
            reading.channels,
            reading.elements,
        )
    found.readings.append(reading)
    if reading.broken:
        bad = ~(error.abs() <= floor.limit)
        found.facts["at top"] = _at_top(bad, outputs)
        found.facts["few"] = float(bad.double().mean()) < 0.02 and reading.strength > 4
    return squares


def _at_top(bad: Tensor, outputs: list[Tensor]) -> bool:
    """Whether the elements that break additivity are the largest of one of the outputs."""
    if not bool(bad.any()):
        return False
    large = torch.zeros_like(bad)
    for values in outputs:
        large |= values.abs() >= 0.995 * values.abs().max()
    return bool((large | ~bad).all())


def _same_rows(law: str, got: Tensor, expected: Tensor, squares: Tensor, terms: int, found: Examined) -> None:
    """Two outputs of the same rows, summed perhaps in another order."""
    rows = _rows(expected)
    a, b = got[rows].double(), expected[rows].double()
    if same_bits(a, b):
        found.readings.append(Reading(law, 0.0, elements=a.numel()))
        return
    own = (squares.roll(1, 0) if law == "R2" else squares)[rows] * _CARRIED
    floor = combination([a, b], [own, own], terms, got.dtype)
    both_nan = a.isnan() & b.isnan()
    found.readings.append(floored(law, torch.where(both_nan, 0.0, a - b), floor.limit, rms(b)))


def _statistics(linear: Linear, base: Tensor, found: Examined) -> None:
    """R24 on rows whose inputs differ."""
    rows = _rows(base)
    different = law_statistics.different_rows(host(linear.x)[rows])
    values = host(base)[rows][different]
    seen = law_statistics.look(values)
    if seen.dead and linear.zero_channels is not None:  # a weight of 0 is no fault
        excused = linear.zero_channels(seen.dead)
        seen = law_statistics.Statistics(**{**vars(seen), "dead": tuple(c for c in seen.dead if c not in excused)})
    found.facts["statistics"] = seen
    found.readings.append(law_statistics.reading(seen, values))


def _look_closer(linear: Linear, base: Tensor, found: Examined) -> None:
    """Calls that only a suspect pays for: does the fault repeat itself, is it odd, does it scale, has it an offset?"""
    x, facts = linear.x, found.facts
    facts.update(steadiness(linear.call, x, base, _rolled(x) if linear.free_rows else None))
    minus, zero = linear.call(-x), linear.call(torch.zeros_like(x))
    factor = _factor(x, base)
    double = linear.call(x * factor)
    with host_arithmetic():
        y = facts.pop("steady")
        m, d, z = host(minus).double(), host(double).double(), host(zero).double()
        if not facts["random"]:
            found.readings[:] = [r for r in found.readings if r.law != "R17"]
            found.readings.append(exact("R17", d, factor * y, _allowed(y, base.dtype)))
        found.readings.append(exact("R7", m, -y, _allowed(y, base.dtype)))
        facts.update(_shape_of_even_part(y, m, base.dtype), **_offset(z, y, base.dtype))


def _shape_of_even_part(y: Tensor, minus: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """e = (f(x) + f(-x)) / 2 is 0 for anything odd: a constant is an offset, half an ulp a directed rounding."""
    even = (y + minus) / 2
    hit = (even != 0).any(0)
    if not bool(hit.any()):
        return {"even": "none"}
    part = even[:, hit]
    ulps = (part.abs() / number_format(dtype).ulp(y[:, hit])).nan_to_num(math.inf)
    middle = part.median()
    spread = (part - middle).abs().median()
    shape = "other"
    if float(ulps.quantile(0.999) if ulps.numel() < 1 << 23 else ulps.max()) <= 1.0:
        shape = "within an ulp"
    elif bool((part.sign() == part.sign()[:1]).all()) and bool((y[:, hit].abs() == part.abs()).all()):
        shape = "sign stuck"
    elif float(middle.abs()) > 0 and float(spread) < 0.2 * float(middle.abs()):
        shape = "constant"
    return {"even": shape, "even channels": int(hit.sum()), "even size": float(middle)}


def _offset(zero: Tensor, y: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What f(0) is, where it is not 0: one bit of the dtype, a constant, or something else."""
    hit = zero != 0
    if not bool(hit.any()):
        return {}
    values = zero[hit]
    same = bool((values == values[0]).all())
    bits = values.to(dtype).view(law_statistics._INTEGERS[dtype.itemsize])
    single = same and int(bits[0]) != 0 and bin(int(bits[0]) & ((1 << 8 * dtype.itemsize) - 1)).count("1") == 1
    constant = bool((y[:, hit.any(0)] == y[:1, hit.any(0)]).all())
    return {
        "f(0)": "one bit" if single else ("constant channel" if constant else ("constant" if same else "varied")),
        "f(0) channels": int(hit.any(0).sum()),
        "f(0) value": float(values[0]),
    }
