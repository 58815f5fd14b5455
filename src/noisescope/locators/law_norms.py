"""The laws of norms: y_ij = w_j (x_ij - mean_i) / sqrt(variance_i + eps), with one gain w_j for all rows and scales of x.

The gains are not read but found: w_j is the median over rows of y_ij / n_ij, n the normalised input on the host. One gain
a channel must then explain every element (R25), and every element for 4 x (R6) and for other multiples of x (R6'),
where a table for the reciprocal root is read elsewhere. A constant gain stays invisible until the weights are read (R27).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from noisescope.locators import law_statistics
from noisescope.locators.floors import number_format, work_roundoff
from noisescope.locators.law_floors import Z_ELEMENT
from noisescope.locators.law_linear import ANALYSED, Examined
from noisescope.locators.law_readings import Reading, exact, floored, host, rms
from noisescope.locators.law_scope import Heard, unbiased
from noisescope.locators.law_repeats import steadiness
from noisescope.locators.recognise import norm_formula
from noisescope.locators.recompute import host_arithmetic

_FACTORS = (1.19, 1.41, 1.7, 1.83)  # spread over an octave of the variance
_FEWEST_ROWS = 8  # for a median that a few wrong rows do not move


def examine(heard: Heard, *, weights: bool = False) -> Examined:
    """All laws of one call of a norm."""
    found = Examined()
    x, y = heard.x, heard.output
    if x is None or y is None or y.shape != x.shape or not x.is_floating_point() or x.numel() == 0:
        found.skipped.append("norm laws: its output has another shape than its input")
        return found
    call, biased = unbiased(heard)
    base = call(x) if biased else y
    flat = x.reshape(-1, x.shape[-1])
    turned = call(flat.roll(1, 0).reshape(x.shape)) if len(flat) > 1 else None
    repeat = call(x)
    minus = call(-x)
    few = torch.zeros_like(flat[:4])
    few[0, 0] = math.nan
    special = call(few)
    centred, eps = _formula(heard)
    room = torch.finfo(x.dtype).max / 8 > float(x.abs().nan_to_num(0.0).max())
    power = 4.0 if room else 0.25
    # How numbers are multiplied on the device does not matter: the law takes the product as it came out.
    scaled = [(factor, x * factor) for factor in (power, *(_FACTORS if room else (1 / f for f in _FACTORS)))]
    outputs = [(factor, z, call(z)) for factor, z in scaled]
    with host_arithmetic():
        rows = _rows(base)
        y0 = host(base)[rows].double()
        found.readings.append(exact("R1", host(repeat).double(), host(base).double()))
        found.readings.append(exact("R7", host(minus)[rows].double(), -y0))
        out = host(special).double()
        found.readings.append(exact("R26", out[:1], torch.full_like(out[:1], math.nan)))
        if len(out) > 1:
            found.readings.append(exact("R8", out[1:], torch.zeros_like(out[1:])))
        if turned is not None:
            found.readings.append(_moved(host(turned)[rows], host(base).roll(1, 0)[rows]))
        _statistics(heard, host(x)[rows], host(base)[rows], found)
        _one_gain(host(x)[rows], host(base)[rows], outputs, rows, centred, eps, found, heard, weights=weights)
    if found.broken:
        found.facts.update(steadiness(call, x, base, flat.roll(1, 0).reshape(x.shape)))
    return found


def _rows(y: Tensor) -> Tensor:
    total = y.numel() // y.shape[-1]
    most = max(_FEWEST_ROWS, ANALYSED // y.shape[-1])
    return torch.arange(total) if total <= most else torch.linspace(0, total - 1, most).long()


def _formula(heard: Heard) -> tuple[bool | None, float | None]:
    """Whether the mean is taken off, and eps; None where the class is not one of the known formulas."""
    callee = heard.callee
    if isinstance(callee, nn.Module):
        width = heard.x.shape[-1] if heard.x is not None else 0
        formula = norm_formula(callee, width)
        return (None, None) if formula is None else (formula.centred, formula.eps)
    name = getattr(callee, "__name__", "")
    given = [value for value in (*heard.args[1:], heard.kwargs.get("eps")) if isinstance(value, float)]
    if name == "layer_norm":
        return True, given[-1] if given else 1e-5
    return (False, given[-1] if given else torch.finfo(heard.y.dtype).eps) if name == "rms_norm" else (None, None)


def _moved(got: Tensor, expected: Tensor) -> Reading:
    """The same rows in other places: at most two roundings apart."""
    a, b = got.double(), expected.double()
    limit = 4 * number_format(got.dtype).ulp(b)
    return floored("R2", torch.where(a.isnan() & b.isnan(), 0.0, a - b), limit, rms(b))


def _statistics(heard: Heard, x: Tensor, y: Tensor, found: Examined) -> None:
    different = law_statistics.different_rows(x)
    seen = law_statistics.look(y[different])
    weight = getattr(heard.callee, "weight", None)
    if seen.dead and isinstance(weight, Tensor) and weight.numel() == y.shape[-1]:
        gains = host(weight.reshape(1, -1))[0].double()
        excused = {c for c in seen.dead if float(gains[c]) in (0.0, -1.0)}
        seen = law_statistics.Statistics(**{**vars(seen), "dead": tuple(c for c in seen.dead if c not in excused)})
    plain = law_statistics.Statistics(seen.stuck, seen.stuck_channels, seen.dead)  # gaps and ties: R25 is sharper
    found.facts["statistics"] = seen
    found.readings.append(law_statistics.reading(plain, y))


def normalised(x: Tensor, *, centred: bool, eps: float) -> tuple[Tensor, Tensor]:
    """n [R, C] and 1 / sqrt(variance + eps) [R, 1] in float64."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centred else x
    root = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * root, root


def _gains(y: Tensor, n: Tensor) -> Tensor:
    """w_j, the median over the rows in which n_ij is large enough to tell."""
    ratio = torch.where(n.abs() > 0.05 * n.abs().amax(0, keepdim=True).clamp_min(1e-30), y / n, math.nan)
    return ratio.nanmedian(0).values.nan_to_num(0.0)


def _one_gain(
    x: Tensor,
    y: Tensor,
    outputs: list[tuple[float, Tensor, Tensor]],
    rows: Tensor,
    centred: bool | None,
    eps: float | None,
    found: Examined,
    heard: Heard,
    *,
    weights: bool,
) -> None:
    """R25, R6, R6', and R27 where weights are read."""
    if centred is None or eps is None:
        found.skipped.append("R25, R6, R6' of norms: no known formula")
        return
    usable = x.double().isfinite().all(-1)
    if int(usable.sum()) < _FEWEST_ROWS:
        found.skipped.append(f"R25, R6, R6' of norms: fewer than {_FEWEST_ROWS} rows")
        return
    values = y.double()
    n, _ = normalised(x[usable], centred=centred, eps=eps)
    gains = _gains(values[usable], n)
    reading = _explained("R25", x[usable], y[usable], gains, centred=centred, eps=eps)
    found.readings.append(reading)
    for factor, z, out in outputs:
        law = "R6" if factor in (4.0, 0.25) else "R6'"
        found.readings.append(
            _explained(law, host(z)[rows][usable], host(out)[rows][usable], gains, centred=centred, eps=eps)
        )
    found.facts["expected"] = (y[usable], gains * n, _limit(x[usable], n, gains, y.dtype, centred=centred, eps=eps))
    if weights:
        _stored_gain(heard, gains, y.dtype, len(n), found)


def _limit(x: Tensor, n: Tensor, gains: Tensor, dtype: torch.dtype, *, centred: bool, eps: float) -> Tensor:
    """Two roundings to the dtype, one of the gain found, sums and root in float32, and what taking the mean off costs."""
    form, u = number_format(dtype), work_roundoff(dtype)
    expected = (gains * n).abs()
    limit = 4 * form.ulp(expected) + 4 * form.u * expected
    limit = limit + u * (16 + math.sqrt(n.shape[-1])) * expected
    if centred:
        _, root = normalised(x, centred=True, eps=eps)
        limit = limit + 8 * u * x.double().abs().amax(-1, keepdim=True) * root * gains.abs()
    return limit + (4 * 2.0**form.least if form.least <= -126 else 0.0)


def _explained(law: str, x: Tensor, y: Tensor, gains: Tensor, *, centred: bool, eps: float) -> Reading:
    """y against w n: element by element, and a factor for each row, in which roundings average out."""
    n, _ = normalised(x, centred=centred, eps=eps)
    expected, values = gains * n, y.double()
    limit = _limit(x, n, gains, y.dtype, centred=centred, eps=eps)
    reading = floored(law, values - expected, limit, rms(expected))
    energy = expected.square().sum(-1)
    factor = (values * expected).sum(-1) / energy.clamp_min(1e-300) - 1
    few = expected.pow(4).sum(-1).sqrt() / energy.clamp_min(1e-300)  # 1 / sqrt(number of elements that matter)
    floor = (limit / expected.abs().clamp_min(1e-300)).median(-1).values / 4 * few * Z_ELEMENT
    floor = floor + work_roundoff(y.dtype) * (16 + math.sqrt(n.shape[-1]))
    strength = float((factor.abs() / floor).nan_to_num(math.inf).max())
    if strength <= reading.strength:
        return reading
    return Reading(law, strength, max(reading.size, float(factor.abs().max())), float(floor.median()), reading.share,
                   reading.channels, reading.elements, facts={"rows": True})  # fmt: skip


def _stored_gain(heard: Heard, gains: Tensor, dtype: torch.dtype, rows: int, found: Examined) -> None:
    """R27: the gains found against those stored."""
    weight = getattr(heard.callee, "weight", None)
    formula = norm_formula(heard.callee, gains.numel()) if isinstance(heard.callee, nn.Module) else None
    if not isinstance(weight, Tensor) or weight.numel() != gains.numel() or formula is None:
        return
    stored = host(weight.detach().reshape(1, -1))[0].double() + (1 if formula.gain == "one_plus_weight" else 0)
    form, u = number_format(dtype), work_roundoff(dtype)
    limit = (8 * form.u + u * (16 + math.sqrt(gains.numel()))) * stored.abs() + 1e-30
    reading = floored("R27", (gains - stored)[None], limit[None], rms(stored))
    slope = float((gains * stored).sum() / stored.square().sum().clamp_min(1e-300)) - 1
    floor = 8 * form.u / math.sqrt(gains.numel()) + u * (16 + math.sqrt(gains.numel()))
    if abs(slope) / floor > reading.strength:
        reading = Reading("R27", abs(slope) / floor, abs(slope), floor, 1.0, (), gains.numel())
    found.facts["gain"] = slope
    found.readings.append(reading)
