"""The laws of functions: activations, softmax where it is called by itself, and a table that is looked up.

Activations: a(z) - a(-z) = z for silu and gelu, whatever sigmoid or Phi is inside, since g(z) + g(-z) = 1. The unit is
driven with what it received and with a sweep of numbers; in a 16-bit model with float32 numbers as well, whose rounding
hides nothing. How far a healthy unit may be off comes from the same code run on the host.

Softmax: rows sum to 1, a shift of all scores changes nothing, log-odds are differences of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.judge import Judgement, judge_law
from noisescope.localization.laws.call_results import (
    LawEvidence,
    check_repeatability,
)
from noisescope.localization.laws.calls_with_other_inputs import on_the_host, probe
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import WORK_ROUNDOFF, number_format, product_roundoff
from noisescope.localization.tensors import host_rows, rms
from noisescope.probe.recorded_call import RecordedCall

_WIDEST = 12.0
_LEAST = {"silu": -0.2785, "gelu": -0.1701}  # the minimum of each, and where it lies
_LEAST_AT = {"silu": -1.27, "gelu": -0.74}
_STEEPEST = 1.13  # gelu's slope is at most 1.129, silu's 1.0999, in size
_SCORE = 8.0  # units of round-off, relative to sum |q k|, that a score may be off: sqrt(D) for D = 64, in any order
_LEAST_LOG = 8.0  # natural logarithms above the smallest number of the dtype down to which probabilities are read


def examine_activation(recorded: RecordedCall) -> LawEvidence:
    """Test the activation identity, and properties that every activation must have."""
    found = LawEvidence()
    z, y = recorded.first_input, recorded.output_tensor
    if z is None or y is None or y.shape != z.shape or not z.is_floating_point() or z.numel() < 2:
        return found
    call = recorded.again
    host = on_the_host(recorded)
    moved = probe(z, lambda t: t.reshape(-1).roll(1).reshape(t.shape))
    rolled, repeat, minus = call(moved), call(z), call(probe(z, torch.neg))
    special = call(probe(z, _nan_and_zeros))
    grid = probe(z, _grid)
    swept, swept_back = call(grid), call(probe(grid, torch.neg))
    fine = probe(grid, Tensor.float) if z.dtype.itemsize < 4 else None
    fine_swept = None if fine is None else (call(fine), call(probe(fine, torch.neg)))
    with host_arithmetic():
        first = host_rows(y).double()
        limit = 4 * number_format(y.dtype).ulp(first)
        found.check(Law.REPEAT, host_rows(repeat).double(), first, round_off=limit)
        got, expected, own = (t.flatten()[None] for t in (host_rows(rolled).double(), first, limit))
        found.check(Law.ROW_ORDER, got, expected.roll(1), own.roll(1))
        out = special.detach().cpu().double().reshape(1, -1)
        found.check(Law.NAN_PASSES, out[:, :1], torch.full_like(out[:, :1], math.nan))
        found.check(Law.ZERO, out[:, 1:], torch.zeros_like(out[:, 1:]), scale=rms(first))
        for inputs, forth, back in (
            (z, y, minus),
            (grid, swept, swept_back),
            *(() if fine is None or fine_swept is None else ((fine, *fine_swept),)),
        ):
            result = None
            if host is not None:
                result = _identity(host_rows(inputs), host_rows(forth), host_rows(back), host.again)
            if result is None:
                found.skipped.append(f"{Law.ACTIVATION_IDENTITY}: not of the form z g(z) with g(z) + g(-z) = 1")
                break
            found.add(result)
        else:
            best = (fine, fine_swept[0]) if fine is not None and fine_swept is not None else (grid, swept)
            found.add(_shape(recorded.operator, host_rows(best[0]), host_rows(best[1])))
    if found.broken:
        check_repeatability(call, z, y, moved, found.facts)
    return found


def _grid(z: Tensor) -> Tensor:
    """A sweep from -12 to 12 in the shape and dtype of the unit's input."""
    steps = torch.linspace(-_WIDEST, _WIDEST, min(z.numel(), 4096), device="cpu")
    repeated = steps.repeat(-(-z.numel() // steps.numel()))[: z.numel()]
    return repeated.reshape(z.shape).to(z.dtype)


def _nan_and_zeros(z: Tensor) -> Tensor:
    """One NaN, and zeros."""
    flat = torch.zeros_like(z).reshape(-1)
    flat[0] = math.nan
    return flat.reshape(z.shape)


def _identity(z: Tensor, forth: Tensor, back: Tensor, elsewhere: Callable[[Tensor], Tensor]) -> Judgement | None:
    """The identity in ulps of the largest number involved; None if the host breaks it too."""
    unit = number_format(z.dtype).ulp(z.double().abs())
    usable = z.double().isfinite()
    on_host = (elsewhere(z).double() - elsewhere(-z).double() - z.double()).abs() / unit
    healthy = float(on_host[usable].max()) if bool(usable.any()) else 0.0
    if not healthy < 64:
        return None
    got, expected = (torch.where(usable, t, 0.0) for t in (forth.double() - back.double(), z.double()))
    limit = 4 * max(1.0, healthy) * unit
    return judge_law(Law.ACTIVATION_IDENTITY, got, expected, limit, scale=rms(forth.double()))


def _shape(operator: str, z: Tensor, y: Tensor) -> Judgement:
    """Never below its minimum, increasing to the right of it, and nowhere steeper than allowed."""
    values, order = z.double().flatten().sort()
    out = y.double().flatten()[order]
    unit = number_format(y.dtype).ulp(out.abs().clamp_min(2.0**-6))
    below = (_LEAST[operator] - out).clamp_min(0)
    right = values > _LEAST_AT[operator]
    falls = torch.zeros_like(out)
    falls[1:] = torch.where(right[1:] & right[:-1], (out[:-1] - out[1:]).clamp_min(0), 0.0)
    jumps = torch.zeros_like(out)
    jumps[1:] = ((out[1:] - out[:-1]).abs() - _STEEPEST * (values[1:] - values[:-1])).clamp_min(0)
    worst = torch.maximum(torch.maximum(below, falls), jumps)
    limit = (8 * unit + 1e-4 * (below > 0))[None]
    return judge_law(Law.ACTIVATION_IDENTITY, worst[None], torch.zeros_like(limit), limit, scale=rms(out))


# -- softmax


def log_odds(law: Law, p: Tensor, other: Tensor, factor: float, sizes: Tensor) -> Judgement:
    """log(p'_j / p'_max) = factor log(p_j / p_max), within the rounding of probabilities and scores."""
    form, u = number_format(p.dtype), product_roundoff(p.dtype)
    a, b = p.detach().cpu().double(), other.detach().cpu().double()
    least = 2.0**form.least * math.exp(_LEAST_LOG)
    at = a.argmax(-1, keepdim=True)
    first, second = a.clamp_min(1e-300).log(), b.clamp_min(1e-300).log()
    first, second = first - first.gather(-1, at), second - second.gather(-1, at)
    usable = (a > least) & (factor * first > math.log(least)) & a.gather(-1, at).isfinite()
    got, expected = torch.where(usable, second, 0.0), torch.where(usable, factor * first, 0.0)
    got = torch.where(~a.isfinite() | (usable & ~b.isfinite()), math.inf, got)  # scores were finite
    # exp of the unit rounds its result and its argument; 16-bit kernels round p before the product with V
    limit = 4 * (
        (2 + 2 * factor) * (form.u + 4 * u) + u * (_SCORE * sizes + (first.abs() + second.abs()).clamp_max(200))
    )
    smaller = torch.minimum(a, b).clamp_min(least)
    limit = limit + 2 * form.ulp(smaller) / smaller
    got, expected, limit = (t.transpose(1, 2).flatten(-2) for t in (got, expected, limit))
    return judge_law(law, got, expected, limit, scale=1.0, unit="nats")


def examine_softmax(recorded: RecordedCall) -> LawEvidence:
    """Test the laws of a softmax call over the last dimension, with chosen inputs."""
    found = LawEvidence()
    x, y = recorded.first_input, recorded.output_tensor
    dim = recorded.kwargs.get(
        "dim", recorded.args[1] if len(recorded.args) > 1 and isinstance(recorded.args[1], int) else -1
    )
    if x is None or y is None or x.shape != y.shape or dim not in (-1, x.dim() - 1) or x.shape[-1] < 2:
        return LawEvidence(skipped=["softmax laws: softmax is not over the last dimension"])
    u, form = WORK_ROUNDOFF, number_format(y.dtype)
    grid = probe(x, _scores_on_a_grid)
    repeat = recorded.again(x)
    plain, shifted = recorded.again(grid), recorded.again(probe(grid, lambda t: t + 16.0))
    doubled = recorded.again(probe(grid, lambda t: t / 2))
    single = recorded.again(probe(grid, lambda t: t[..., :1].contiguous()))
    with host_arithmetic():
        first = y.detach().cpu().double()
        again = repeat.detach().cpu().double()
        found.check(Law.REPEAT, again, first, round_off=8 * form.ulp(first))
        sizes = torch.zeros_like(first)
        found.add(log_odds(Law.KEY_SHIFT, _four(plain), _four(shifted), 1.0, _four(sizes)))
        found.add(log_odds(Law.LOG_ODDS, _four(doubled), _four(plain), 2.0, _four(sizes)))
        keys = x.shape[-1]
        for out in (y, plain):
            total = out.detach().cpu().double().sum(-1, keepdim=True)
            total = torch.where(total.isnan() | (total == 0), 1.0, total)
            slack = 2 * form.u * math.sqrt(keys) if form.bits < 20 else 0.0
            limit = torch.full_like(total, 4 * u * (8 + math.sqrt(keys)) + 2 * form.u + slack)
            one = torch.ones_like(total)
            found.check(Law.PROBABILITIES_SUM_TO_ONE, *(t.flatten(1) for t in (total, one, limit)), unit="")
        one = single.detach().cpu().double().flatten(1)
        found.check(Law.SINGLE_KEY, one, torch.ones_like(one), torch.full_like(one, 4 * form.u), unit="")
    if found.broken:
        other = probe(x, lambda t: t.roll(1, -2)) if x.dim() > 1 else None
        check_repeatability(recorded.again, x, y, other, found.facts)
    return found


def _scores_on_a_grid(x: Tensor) -> Tensor:
    """Scores with their maximum subtracted, none below -24, on a grid on which sums are exact in their dtype."""
    finite = x.clamp(-1e4, 1e4)
    low = (finite - finite.amax(-1, keepdim=True)).clamp_min(-24.0)
    step = 2.0 ** -(number_format(x.dtype).bits - 7)  # |scores| stay below 64
    return (low / step).round() * step


def _four(x: Tensor) -> Tensor:
    """[..., T, S] as [B, H, T, S]."""
    return x.reshape(-1, 1, *x.shape[-2:]) if x.dim() != 4 else x


def examine_embedding(recorded: RecordedCall, *, weights: bool) -> LawEvidence:
    """Test repetition, row order, and the stored table if weights are read."""
    found = LawEvidence()
    x, y = recorded.tensors
    plain = type(recorded.callee).forward is nn.Embedding.forward and recorded.callee.max_norm is None
    axis = -1 if plain else 0  # where positions are made inside, the order of tokens counts
    backwards = probe(x, lambda t: t.flip(axis)) if x.dim() else x
    flipped = recorded.again(backwards) if x.dim() and y.shape[:-1] == x.shape else None
    repeat = recorded.again(x)
    with host_arithmetic():
        first = host_rows(y).double()
        found.check(Law.REPEAT, host_rows(repeat).double(), first)
        if flipped is not None:
            back = flipped.detach().cpu().flip(-2 if plain else 0)
            found.check(Law.ROW_ORDER, host_rows(back).double(), first)
        if weights and plain:
            table = recorded.callee.weight.detach().cpu()[x.detach().cpu().flatten()].double()
            found.check(Law.STORED_NUMBERS, first, table)
    if found.broken:
        check_repeatability(recorded.again, x, y, backwards, found.facts)
    return found
