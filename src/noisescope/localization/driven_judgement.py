"""Checks whether driven operators (driven_operators.py) compute internally as healthy ones do.

============  ==================================================================================================
norms         the error of each row along its own normalised numbers (a factor of the row: mean square and reciprocal
              root) and, where the mean is taken off, along the gain (the mean). Roundings of the output, within the
              round-off model, give each of these numbers its standard error; what the class's own code adds to all
              of a row on the host, by itself and under random rounding, is allowed as well, so that a class that
              computes in 16 bits by design is healthy
exponentials  the relative error of exp(-d), averaged over parts of an octave of exp and over parts of the depths
============  ==================================================================================================

A 32nd of the dtype's unit of round-off is allowed in any case; of exp, 2^-13 in float16 as well as in bfloat16, since a
healthy kernel for 16-bit outputs may use a short polynomial (flash attention has one with errors up to 9e-5).

False alarms: means alarm at 6.5 standard errors (8e-11 each), the rows' mean square as in judge.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.localization.call_tree import Node
from noisescope.localization.driven_operators import DrivenNorm, DrivenWeights
from noisescope.localization.error_pattern import Pattern
from noisescope.localization.formula_recognition import NormFormula, norm_formula
from noisescope.localization.function_pattern import is_smooth
from noisescope.localization.host_operators import norm_by
from noisescope.localization.host_products import Recomputed, Rows
from noisescope.localization.host_twin import HostTwin
from noisescope.localization.judge import RMS_LIMIT, Judgement
from noisescope.localization.roundoff_floors import (
    ROUNDING_STD,
    WORK_ROUNDOFF,
    Z_MEAN,
    Reference,
    number_format,
    operand_bits,
)
from noisescope.localization.tensors import on_host, rms

_SHARE = 1 / 32  # of a unit of round-off, that a norm may be off by in all of a row
_EXP = 2.0**-13  # relative
_PARTS = (1, 4, 16)  # of an octave
_DEPTHS = 8  # parts of what lies further below
_LEAN = 1 / 16  # of u: rounded weights of one part of an octave need not cancel
_RUNS, _HOST_ROWS = 4, 64  # of the class's code under random rounding
_BY_DESIGN = 2.0  # times the variance that single roundings give: more than chance over so many rows
_SEEN, _LEAST = 1.25, 0.1  # times the variance that is seen; of the round-off model's
_LARGEST = 1e3  # times the limit: errors that say nothing more


@dataclass(frozen=True)
class Driven:
    """The result of driving one operator."""

    judgement: Judgement
    pattern: Pattern
    recomputed: Recomputed
    resolution: float  # the smallest relative error of all rows' factors, or of exp in an octave, that would have shown


def judge_norm(call: DrivenNorm, twin: HostTwin, known: dict[tuple[object, ...], tuple[float, ...]]) -> Driven | None:
    """Judge a driven norm; None if its code can't run on the host. `known` is what its class's code adds to a row."""
    width = call.x.shape[-1]
    formula = norm_formula(call.callee, width)
    if formula is None or not bool(_gain(call, formula)[0].any()):  # a gain of 0 lets nothing of its input through
        return None
    rows = Rows(call.x.numel(), 0)
    found = norm_by(formula, call.callee, call.x, call.y, rows)
    key = (type(call.callee), width, call.x.dtype, formula)
    if key not in known:
        known[key] = _host_scatter(call, twin, formula)
    scatter = known[key]
    if not scatter:
        return None
    factors = _factors(found.y.double() - found.reference.values, call, formula, found.reference)
    if not bool(factors.found.isfinite().all()):
        return None  # NaN and infinity are what the ordinary judge is for
    judgement, resolution = Judgement(elements=found.y.numel()), 0.0
    pattern = Pattern("unknown", 0.0)
    free = _SHARE * number_format(call.x.dtype).u
    for at, (name, allowed) in enumerate(zip(("factor", "mean"), scatter, strict=False)):
        size, variance = factors.found[:, at], factors.variance[:, at] * min(max(_SEEN * factors.seen, _LEAST), 1.0)
        error = (variance + allowed**2 + free**2).sqrt()
        weight = error.square().reciprocal()
        mean = float((size * weight).sum() / weight.sum())
        limit = free + float(factors.lean[:, at].mean()) + allowed + Z_MEAN * float(weight.sum()) ** -0.5
        scatter_limit = RMS_LIMIT + Z_MEAN * math.sqrt(2 / len(size))
        scattered = float(((size - mean) / error).square().mean()) / scatter_limit
        strength = max(scattered, abs(mean) / limit)
        resolution = resolution or limit
        if strength > judgement.strength:
            judgement.strengths = {"driven": min(strength, _LARGEST)}
            one = float(error.median())
            judgement.said = (
                f"driven with {len(size)} synthetic rows, each row's {name} is off by {_percent(rms(size))} (rms), "
                f"{_percent(mean, sign=True)} on average; rounding explains at most {_percent(one)}"
            )
            pattern = _norm_pattern(name, size, _mean_square(call, formula), mean if scattered <= 1 else None)
    judgement.tests = 4
    return Driven(judgement, pattern, found, resolution)


@dataclass(frozen=True)
class _Factors:
    """Errors common to a whole row, [R, 1 or 2]: a factor of its numbers and, if the mean is subtracted, their mean."""

    found: Tensor
    variance: Tensor  # by the round-off model of single elements
    lean: Tensor  # what roundings may be off by on average
    seen: float  # variance of what is left over, in units of the model's: it counts roundings that not all kernels make


def _factors(error: Tensor, call: DrivenNorm, formula: NormFormula, reference: Reference) -> _Factors:
    """Per row, the least-squares error along the normalised row and, if the mean is subtracted, along the gain."""
    gain, weight = _gain(call, formula)
    wide = call.x.double().reshape(-1, call.x.shape[-1])[: len(error)]
    along = formula.apply(wide, weight, None)[0]
    patterns = [along, gain.expand_as(along)] if formula.centred else [along]
    lever = reference.variance.reciprocal()
    design = torch.stack(patterns, -1)
    weighted = design * lever[..., None]
    gram = torch.einsum("rci,rcj->rij", design, weighted)
    gram = gram + 1e-12 * gram.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] * torch.eye(len(patterns)).double()
    inverse = torch.linalg.inv(gram)
    found = torch.einsum("rij,rcj,rc->ri", inverse, weighted, error)
    free = torch.zeros_like(error) if reference.systematic is None else reference.systematic
    lean = (weighted.abs() * free[..., None]).sum(1) / gram.diagonal(dim1=-2, dim2=-1)
    rest = error - torch.einsum("rci,ri->rc", design, found)
    free_share = 1 - len(patterns) / error.shape[-1]
    seen = float((rest.square() * lever).mean()) / max(free_share, 0.5)
    return _Factors(found, inverse.diagonal(dim1=-2, dim2=-1), lean, seen)


def _gain(call: DrivenNorm, formula: NormFormula) -> tuple[Tensor, Tensor | None]:
    """What each channel is multiplied by, and the weight that says so."""
    stored = formula.parameters_of(call.callee)[0]
    if stored is None:
        return torch.ones(call.x.shape[-1], dtype=torch.float64), None
    weight = on_host(stored).double()
    return formula.gain_of(weight), weight


def _host_scatter(call: DrivenNorm, twin: HostTwin, formula: NormFormula) -> tuple[float, ...]:
    """Standard deviation of the row-wide error of the class's own code: under random rounding, and by design."""
    width = call.x.shape[-1]
    some = call.x.reshape(-1, width)[:_HOST_ROWS].reshape(1, -1, width)
    node = Node(call.unit, "norm", call.callee, 0, (some,), {})
    runs = twin.rounded(node, _RUNS)
    if len(runs) < _RUNS or any(y.shape != some.shape for y in runs):
        return ()
    rows = [y.double().reshape(-1, width) for y in runs]
    centre = torch.stack(rows).mean(0)
    reference = norm_by(formula, call.callee, some, runs[0], Rows(some.numel(), 0)).reference
    total, alone = [], []
    for y in rows:
        factors = _factors(y - centre, call, formula, reference)
        total.append(factors.found.square().mean(0))
        # What elements do one by one shows in the factors as well, and is in the round-off model already.
        alone.append(factors.seen * factors.variance.mean(0))
    spread = (sum(total, torch.zeros(())) - sum(alone, torch.zeros(()))) / (_RUNS - 1)
    off = _factors(centre - reference.values, call, formula, reference)  # a factor that the code rounds to 16 bits
    own, one_by_one = off.found.square().mean(0), off.seen * off.variance.mean(0)
    by_design = torch.where(own > _BY_DESIGN * one_by_one, own - one_by_one, 0.0)
    return tuple(float(v) for v in (spread.clamp_min(0) + by_design).sqrt())


def _mean_square(call: DrivenNorm, formula: NormFormula) -> Tensor:
    wide = call.x.double().reshape(-1, call.x.shape[-1])
    wide = wide - wide.mean(-1, keepdim=True) if formula.centred else wide
    return wide.square().mean(-1) + formula.eps


def _norm_pattern(name: str, size: Tensor, square: Tensor, constant: float | None) -> Pattern:
    """The fault pattern; `constant` is the error that all rows share, if any."""
    if name == "mean":
        return Pattern("accumulation", 0.7, "as when the mean is computed in too few bits")
    if is_smooth(size, torch.remainder(square[: len(size)].log2(), 2.0)):
        return Pattern("function table", 0.8, "as when rsqrt of the row's mean square is inaccurate")
    if constant is not None:
        return Pattern("gain", 0.7, f"multiplied by {1 + constant:.5g}")
    return Pattern("accumulation", 0.7, "as when the mean square or its root is computed in too few bits")


# -- exponentials


def judge_weights(call: DrivenWeights) -> Driven:
    """Judge the weights exp(-d) / (1 + exp(-d)) of driven keys; equal depths share one error, so they count once."""
    depth, weight = _each_depth_once(call)
    exact = torch.sigmoid(-depth)
    other = 1 - exact
    error = (weight / exact - 1) / other  # of the exponential, relative
    form = number_format(min(call.dtype, call.given, key=lambda dtype: number_format(dtype).bits))
    u = max(form.u, 2.0**-24, 2.0 ** -operand_bits() if call.given == torch.float32 else 0.0)
    # Rounded: the weight, the sum that it is divided by or the weight once more, the output; and the score.
    variance = (ROUNDING_STD * u) ** 2 * ((1 + 1 / call.channels) / other.square() + depth.square())
    limit_of = _EXP + max(_LEAN * form.u, 8 * WORK_ROUNDOFF)
    judgement, resolution = Judgement(elements=weight.numel()), 0.0
    finite = error.isfinite()
    if not bool(finite.all()):
        judgement.strengths = {"driven": math.inf}
        judgement.said = f"driven with {len(depth)} synthetic scores, {int((~finite).sum())} weights are not finite"
    else:
        for part in _parts(depth):
            lever = variance[part].reciprocal()
            mean = float((error[part] * lever).sum() / lever.sum())
            limit = limit_of + Z_MEAN * float(lever.sum()) ** -0.5
            judgement.tests += 1
            resolution = resolution or limit
            if abs(mean) / limit > judgement.strength:
                judgement.strengths = {"driven": min(abs(mean) / limit, _LARGEST)}
                low, high = (float(v) for v in torch.aminmax(depth[part]))
                judgement.said = (
                    f"driven with {len(depth)} synthetic scores, weights of keys {low:.2g} to {high:.2g} below the top "
                    f"are off by {_percent(mean, sign=True)} on average; rounding explains at most {_percent(limit)}"
                )
    pattern = Pattern("function table", 0.85, "as when exp is inaccurate")
    values = exact[:, None]
    reference = Reference(values, (form.ulp(values), limit_of * values))
    found = Recomputed(weight[:, None].to(call.dtype), reference, x=-depth[:, None])
    return Driven(judgement, pattern, found, resolution)


def _each_depth_once(call: DrivenWeights) -> tuple[Tensor, Tensor]:
    """The depths that differ, and the mean weight of each."""
    depth, which, count = torch.unique(call.depth, return_inverse=True, return_counts=True)
    return depth, torch.zeros_like(depth).index_add_(0, which, call.weight) / count


def _parts(depth: Tensor) -> list[Tensor]:
    """Parts of the octave in which exp is computed, and of the depths below; each with enough samples for a mean."""
    octave = torch.remainder(depth / math.log(2), 1.0)
    deep = depth >= depth.quantile(0.75)
    found = [~deep & ((octave * parts).long() == at) for parts in _PARTS for at in range(parts)]
    edges = torch.linspace(float(depth[deep].min()), float(depth.max()) + 1e-9, _DEPTHS + 1, dtype=torch.float64)
    found += [deep & (depth >= low) & (depth < high) for low, high in itertools.pairwise(edges)]
    return [part for part in found if int(part.sum()) >= 16]


def _percent(value: float, *, sign: bool = False) -> str:
    return f"{100 * value:+.2g} %" if sign else f"{100 * value:.2g} %"
