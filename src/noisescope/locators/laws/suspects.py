"""Calls that only a suspect pays for: they tell the class of a fault, not whether there is one.

Does it repeat itself? Noise differs from call to call, stale data are what the call before left. And of something
linear: is the fault odd, does it scale, has it an offset, does it mind the bits of its input?
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from noisescope.locators.floors import INTEGERS, number_format
from noisescope.locators.laws import statistics
from noisescope.locators.laws.examined import Examined, Facts
from noisescope.locators.laws.linear import SEED, Linear, allowed, random_half, scale_factor, split
from noisescope.locators.laws.readings import differing, exact, host, looked_at, rms
from noisescope.locators.laws.roundoff import combination, mean_square_limit, squares_from_split
from noisescope.locators.recompute import host_arithmetic

_RUNS = 4
_ODD_ULPS = 1.0  # what a directed rounding leaves of f(x) + f(-x), halved


def steadiness(call: Callable[[Tensor], Tensor], x: Tensor, base: Tensor, other: Tensor | None, facts: Facts) -> Tensor:
    """Repeated calls: is it `random`, is it `stale`, how many elements change. Gives what it settles on.

    `other` is another input (rows moved by one) that is called in between: a call after it that differs from those
    that repeat each other remembers what was computed before.
    """
    runs = [call(x) for _ in range(_RUNS)]
    if other is not None:
        call(other)
    after = None if other is None else call(x)
    with host_arithmetic():
        kept = [host(run).double() for run in runs[1:]]  # the first may still hold what an earlier call left
        y, first = kept[-1], host(base).double()
        changed = torch.stack([differing(run, y) for run in kept[:-1]]).any(0)
        facts.random = bool(changed.any())
        if not facts.random:
            remembers = after is not None and bool(differing(host(after).double(), y).any())
            facts.stale = remembers or bool(differing(first, y).any())
        count_changes(changed | differing(first, y), facts)
        return y


def count_changes(changed: Tensor, facts: Facts) -> None:
    """How many elements [R, C] changed, of all and of the channels in which any did."""
    hit = changed.any(0)
    if bool(hit.any()):
        facts.changed_share = float(changed.double().mean())
        facts.changed_in_channels = float(changed[:, hit].double().mean())


def look_closer(linear: Linear, base: Tensor, found: Examined) -> None:
    """Does the fault repeat itself, is it odd, does it scale, has it an offset, does it mind the bits of its input?"""
    x, call, facts = linear.x, linear.call, found.facts
    steady = steadiness(call, x, base, linear.turned, facts)
    again, minus, zero = call(x), call(-x), call(torch.zeros_like(x))
    factor = scale_factor(x, base)
    double = call(x * factor)
    halves = split(linear, random_half(x, SEED + 1), bits=False) if linear.additive else None
    with host_arithmetic():
        rows = looked_at(base)
        y = steady[rows]
        both = next(r for r in found.readings if r.law in ("R17", "R7"))  # f(-2 x): now each law by itself
        found.readings.remove(both)
        for law, out, sign in ((both.law, double, factor), ("R7", minus, -1.0)):
            reading = exact(law, host(out)[rows].double() / sign, y, allowed=allowed(y, base.dtype))
            found.readings.append(replace(both, law=law) if facts.random else reading)
        seen, odd, null = (linear.view(t).double() for t in (again, minus, zero))
        facts.even = _even_part(seen, odd, base.dtype)
        facts.at_zero = _at_zero(null, seen, base.dtype)
        if not linear.channels:  # for the class alone
            facts.statistics = statistics.look(linear.view(again))
            facts.gap_size = facts.statistics.gap / max(rms(seen), 1e-300)
        if halves is not None:
            facts.adds_up_by_halves = _adds_up(linear, base, *halves)
        stuck = [bit for bit, value in facts.statistics.stuck if value == 0]
        if facts.additivity is not None and stuck:
            facts.coarse_sums = _summed_coarsely(*facts.additivity, max(stuck) + 1, base.dtype)


def _adds_up(linear: Linear, base: Tensor, a: Tensor, b: Tensor, where: Tensor) -> bool:
    """Additivity over halves of the inner dimension: kept where only the operands' low bits were lost."""
    keep = looked_at(a)
    outputs = [a[keep].double(), b[keep].double(), host(base)[where[keep]].double()]
    squares = squares_from_split(outputs[0] - outputs[1], host(linear.x).double(), where[keep])[where[keep]]
    floor = combination(outputs, [squares / 2, squares / 2, squares], linear.terms, base.dtype)
    error = outputs[0] + outputs[1] - outputs[2]
    usable = error.isfinite()
    square = float((error.square() / floor.variance)[usable].mean()) if bool(usable.any()) else math.inf
    return square < mean_square_limit(error.numel()) and bool((error.abs() <= floor.limit).all())


def _summed_coarsely(error: Tensor, outputs: list[Tensor], bits: int, dtype: torch.dtype) -> bool:
    """Whether results that end in `bits` zeros were summed that coarsely, and not cut there once at the end.

    A cut is toward zero, or one rounding; sums of many roundings are neither.
    """
    form = number_format(dtype)
    variance, pattern = torch.zeros_like(error), torch.zeros_like(error)
    for values, sign in zip(outputs, (1, 1, -1), strict=True):
        coarse = form.ulp(values) * 2**bits
        variance += coarse.square() / 12
        pattern -= sign * values.sign() * coarse / 2
    along = float((error * pattern / variance).sum() / (pattern.square() / variance).sum())
    return along < 0.5 and float((error.square() / variance).mean()) > 2


def _even_part(y: Tensor, minus: Tensor, dtype: torch.dtype) -> str:
    """e = (f(x) + f(-x)) / 2 is 0 for anything odd: a constant is an offset, half an ulp a directed rounding."""
    even = (y + minus) / 2
    hit = (even != 0).any(0)
    if not bool(hit.any()):
        return ""
    part = even[:, hit]
    ulps = (part.abs() / number_format(dtype).ulp(y[:, hit])).nan_to_num(math.inf)
    middle = part.median()
    if float((ulps > _ODD_ULPS).double().mean()) < 1e-3:
        return "within an ulp"
    if bool((part.sign() == part.sign()[:1]).all()) and bool((y[:, hit].abs() == part.abs()).all()):
        return "sign stuck"
    if float(middle) != 0 and float((part - middle).abs().median()) < 0.2 * abs(float(middle)):
        return "constant"
    return "other"


def _at_zero(zero: Tensor, y: Tensor, dtype: torch.dtype) -> str:
    """What f(0) is, where it is not 0: one bit of the dtype, a constant, or something else."""
    hit = zero != 0
    if not bool(hit.any()):
        return ""
    values = zero[hit]
    same = bool((values == values[0]).all())
    bits = int(values[:1].to(dtype).view(INTEGERS[dtype.itemsize])[0]) % (1 << 8 * dtype.itemsize)
    if same and bits.bit_count() == 1:
        return "one bit"
    if bool((y[:, hit.any(0)] == y[:1, hit.any(0)]).all()):
        return "constant channel"
    return "constant" if same else "varied"
