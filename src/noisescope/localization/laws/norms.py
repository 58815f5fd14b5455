"""The laws of norms: y_ij = w_j (x_ij - mean_i) / sqrt(variance_i + eps), one gain w_j for all rows and scales of x.

The gains are estimated, not read: w_j is the median over rows of y_ij / n_ij, n the normalised input on the host. One
gain per channel must then explain every element, also for 4 x and for other multiples of x, where a table for rsqrt is
read at another entry. A constant gain is invisible unless weights are read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from noisescope.localization.formula_recognition import NormFormula, norm_formula
from noisescope.localization.host_operators import given_one_tensor, host_arithmetic
from noisescope.localization.judge import TINY, Judgement, judge_law, judge_size
from noisescope.localization.laws.call_results import (
    LawEvidence,
    check_repeatability,
    sampled_rows,
)
from noisescope.localization.laws.calls_with_other_inputs import probe, unbiased
from noisescope.localization.laws.linear import moved_rows, with_nans
from noisescope.localization.laws.output_statistics import Statistics, measure
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import WORK_ROUNDOFF, Z_ELEMENT, narrower, number_format
from noisescope.localization.tensors import distinct_rows, host_rows, rms
from noisescope.probe.recorded_call import RecordedCall

_FACTORS = (1.19, 1.41, 1.7, 1.83)  # spread over an octave of the variance
_FEWEST_ROWS = 8  # for a median that a few wrong rows do not move


def examine(recorded: RecordedCall, *, weights: bool = False) -> LawEvidence:
    """Test all laws of one call of a norm."""
    found = LawEvidence()
    x, y = recorded.tensors
    if y.shape != x.shape:
        return LawEvidence(skipped=["norm laws: the output shape differs from the input shape"])
    formula = _formula(recorded)
    call, biased = unbiased(recorded) if formula is not None else (recorded.again, False)
    base = call(x) if biased else y
    repeat = call(x)
    with host_arithmetic():
        whole = host_rows(base)
        found.check(Law.REPEAT, host_rows(repeat).double(), whole.double(), round_off=_roundings(x, whole))
    rolled_x = probe(x, moved_rows)
    if formula is None:
        found.skipped.append(f"laws of norms: {type(recorded.callee).__name__} has no known formula")
    else:
        _keep_formula(recorded, call, base, rolled_x, formula, found, weights=weights)
    if found.broken:
        check_repeatability(call, x, base, rolled_x, found.facts)
    return found


def _keep_formula(
    recorded: RecordedCall,
    call: Callable[[Tensor], Tensor],
    base: Tensor,
    rolled_x: Tensor,
    formula: NormFormula,
    found: LawEvidence,
    *,
    weights: bool,
) -> None:
    """Laws that follow from the formula of a norm."""
    x = recorded.tensors[0]
    rolled, minus = call(rolled_x), call(probe(x, torch.neg))
    special = call(probe(x, lambda t: with_nans(t, 1)))
    drives = _drives(call, x, base)
    with host_arithmetic():
        rows = sampled_rows(base, _FEWEST_ROWS)
        whole, y0 = host_rows(base), host_rows(base)[rows].double()
        found.check(Law.ODDNESS, host_rows(minus)[rows].double(), -y0, round_off=_roundings(x, whole[rows]))
        out = host_rows(special).double()
        nans, zeros = out[:1], out[1:]
        found.check(Law.NAN_PASSES, nans, torch.full_like(nans, math.nan))
        if len(zeros):
            found.check(Law.ZERO, zeros, torch.zeros_like(zeros), scale=rms(y0))
        moved = whole.roll(1, 0)[rows]  # the same rows in other positions: at most two roundings apart
        found.check(Law.ROW_ORDER, host_rows(rolled)[rows].double(), moved.double(), _roundings(x, moved))
        _statistics(recorded, formula, host_rows(x)[rows], whole[rows], found)
        if len(rows) < _FEWEST_ROWS:
            found.skipped.append(f"laws of a norm's gains: fewer than {_FEWEST_ROWS} rows")
            return
        for drive in drives:
            _one_gain([(law, host_rows(z)[rows], host_rows(out)[rows]) for law, z, out in drive], formula, found)
        if weights:
            _stored_numbers(recorded, host_rows(x)[rows], whole[rows], formula, found)


def _formula(recorded: RecordedCall) -> NormFormula | None:
    """None if it is not one of the known formulas."""
    callee = recorded.callee
    if isinstance(callee, nn.Module):
        plain = given_one_tensor(recorded.args, recorded.kwargs)
        return norm_formula(callee, recorded.tensors[0].shape[-1]) if plain else None
    given = [value for value in (*recorded.args[1:], recorded.kwargs.get("eps")) if isinstance(value, float)]
    name = getattr(callee, "__name__", "")
    if name not in ("layer_norm", "rms_norm"):
        return None
    centred = name == "layer_norm"
    eps = 1e-5 if centred else torch.finfo(recorded.output.dtype).eps
    return NormFormula(centred, given[-1] if given else eps, "weight", centred)


def _drives(call: Callable[[Tensor], Tensor], x: Tensor, base: Tensor) -> list[list[tuple[Law, Tensor, Tensor]]]:
    """(law, input, output) at several scales of x; again with float32 numbers, whose rounding hides nothing."""
    with host_arithmetic():
        room = torch.finfo(x.dtype).max / 8 > float(x.detach().cpu().abs().max())
    scales = {Law.NORM_SCALED_BY_FOUR: (4.0,), Law.NORM_SCALED: _FACTORS}
    factors = [(law, f if room else 1 / f) for law, several in scales.items() for f in several]

    def drive(start: Tensor, first: Tensor) -> list[tuple[Law, Tensor, Tensor]]:
        inputs = [(law, probe(start, lambda t, f=f: t * f)) for law, f in factors]  # type: ignore[misc]
        return [(Law.ONE_GAIN_PER_CHANNEL, start, first), *((law, z, call(z)) for law, z in inputs)]

    drives = [drive(x, base)]
    if x.dtype.itemsize < 4:
        wide = probe(x, Tensor.float)
        with contextlib.suppress(RuntimeError):  # F.layer_norm with 16-bit weights takes 16-bit inputs only
            found = drive(wide, call(wide))
            if all(y.dtype == torch.float32 for _, _, y in found):
                drives.append(found)
    return drives


def _roundings(x: Tensor, y: Tensor) -> Tensor:
    """What two roundings and sums in another order may change: to the output's dtype, or before the gain to x's."""
    values, dtype = y.double(), narrower(x.dtype, y.dtype)
    return 4 * number_format(dtype).ulp(values) + 32 * WORK_ROUNDOFF * values.abs()


def _statistics(recorded: RecordedCall, formula: NormFormula, x: Tensor, y: Tensor, found: LawEvidence) -> None:
    y = y.to(narrower(x.dtype, y.dtype))  # a norm that rounds before a gain of 1 has no more bits than that
    seen = measure(y[distinct_rows(x)])
    weight = _stored(recorded, formula)
    if seen.dead:  # a gain of 0 (or 1 + -1) is not a fault, nor is an input of 0
        excused = set((x.double() == 0).all(0).nonzero().flatten().tolist())
        if weight is not None and weight.numel() == y.shape[-1]:
            gains = host_rows(weight.reshape(1, -1))[0].double()
            excused |= {c for c in seen.dead if float(gains[c]) in (0.0, -1.0)}
        seen = replace(seen, dead=tuple(c for c in seen.dead if c not in excused))
    found.facts.statistics = seen
    # Gaps and ties are left to the law of one gain, which is sharper.
    found.add_statistics(Statistics(seen.stuck, seen.stuck_channels, seen.dead), y)


def normalised(x: Tensor, formula: NormFormula) -> tuple[Tensor, Tensor]:
    """n [R, C] and 1 / sqrt(variance + eps) [R, 1] in float64."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if formula.centred else x
    root = (x.square().mean(-1, keepdim=True) + formula.eps).rsqrt()
    return x * root, root


def _gains(y: Tensor, n: Tensor) -> Tensor:
    """w_j, the median over the rows in which n_ij is large enough to tell.

    Small numbers may be the wrong ones (a dead zone), or large ones (saturation): the choice of rows that leaves fewer
    elements unexplained is taken.
    """
    best, fewest = torch.zeros(y.shape[-1], dtype=torch.float64), math.inf
    for share in (0.05, 0.5):
        ratio = torch.where(n.abs() > share * n.abs().amax(0, keepdim=True).clamp_min(1e-30), y / n, math.nan)
        gains = ratio.nanmedian(0).values.nan_to_num(0.0)
        off = float(((y - gains * n).abs() > 0.02 * (gains * n).abs()).double().sum())
        if off < fewest:
            best, fewest = gains, off
    return best


def _one_gain(drive: list[tuple[Law, Tensor, Tensor]], formula: NormFormula, found: LawEvidence) -> None:
    """Gains estimated from the first must explain all."""
    _, x, y = drive[0]
    gains = _gains(y.double(), normalised(x, formula)[0])
    for law, z, out in drive:
        found.add(_explained(law, z, out, gains, formula))


def _limit(x: Tensor, n: Tensor, gains: Tensor, dtype: torch.dtype, formula: NormFormula) -> Tensor:
    """Two roundings to the dtype, one of the estimated gain, float32 sums and root, and the subtraction of the mean."""
    form, u = number_format(dtype), WORK_ROUNDOFF
    expected = (gains * n).abs()
    limit = 4 * form.ulp(expected) + 4 * form.u * expected
    limit = limit + u * (16 + math.sqrt(n.shape[-1])) * expected
    if formula.centred:
        _, root = normalised(x, formula)
        limit = limit + 8 * u * x.double().abs().amax(-1, keepdim=True) * root * gains.abs()
    return limit + 4 * form.flushed


def _explained(law: Law, x: Tensor, y: Tensor, gains: Tensor, formula: NormFormula) -> Judgement:
    """y against w n: element by element, and as a factor per row, in which roundings average out."""
    n, _ = normalised(x, formula)
    expected, values = gains * n, y.double()
    dtype = narrower(x.dtype, y.dtype)
    limit = _limit(x, n, gains, dtype, formula)
    result = judge_law(law, values, expected, limit)
    energy = expected.square().sum(-1)
    factor = torch.where(energy > 0, (values * expected).sum(-1) / energy.clamp_min(TINY) - 1, 0.0)
    form = number_format(dtype)
    rounded = expected.abs().clamp_min(2.0**form.least)  # under the normal range roundings get no smaller
    few = (expected * rounded).square().sum(-1).sqrt() / energy.clamp_min(TINY)  # 1 / sqrt(elements that matter)
    floor = Z_ELEMENT * form.u * few  # two roundings and those of the gains: below u together
    floor = floor + WORK_ROUNDOFF * (16 + math.sqrt(n.shape[-1]))
    strength = float((factor.abs() / floor).nan_to_num(math.inf).max())
    if strength > result.strength:
        size = max(result.size, float(factor.abs().max()))
        result = judge_size(law, size, float(floor.median()), 1.0, y.numel())
        result.strengths = {law: strength}
    return result


def _stored(recorded: RecordedCall, formula: NormFormula) -> Tensor | None:
    """The gains that a norm module stores."""
    return formula.parameters_of(recorded.callee)[0] if isinstance(recorded.callee, nn.Module) else None


def _stored_numbers(recorded: RecordedCall, x: Tensor, y: Tensor, formula: NormFormula, found: LawEvidence) -> None:
    """Compare the estimated gains with the stored ones."""
    weight, n = _stored(recorded, formula), normalised(x, formula)[0]
    if weight is None or weight.numel() != n.shape[-1]:
        return
    gains = _gains(y.double(), n)
    stored = host_rows(weight.reshape(1, -1))[0].double() + (1 if formula.gain == "one_plus_weight" else 0)
    form, u = number_format(narrower(x.dtype, y.dtype)), WORK_ROUNDOFF
    # An input that is always 0 says nothing of its gain, nor does an output with few bits.
    gains = torch.where((n != 0).any(0) & ((stored * n).abs().amax(0) >= 2.0**form.least), gains, stored)
    limit = (8 * form.u + u * (16 + math.sqrt(gains.numel()))) * stored.abs() + 1e-30
    result = found.check(Law.STORED_NUMBERS, gains[None], stored[None], limit[None])
    slope = float((gains * stored).sum() / stored.square().sum().clamp_min(TINY)) - 1
    floor = 8 * form.u / math.sqrt(gains.numel()) + u * (16 + math.sqrt(gains.numel()))
    result.raise_to(Law.STORED_NUMBERS, abs(slope) / floor)
    result.visible_share = floor
