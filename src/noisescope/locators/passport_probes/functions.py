"""Worst and mean error of functions, in ulps against a wider host reference, and where the worst is.

16-bit formats: every number in the range. Longer ones: a grid, half of it evenly spaced, half by magnitude. Numbers
whose operand or result is subnormal are left out: `subnormal_...` says what becomes of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import erf

from noisescope.locators.passport_probes.numbers import (
    Array,
    Format,
    attempt,
    format_of,
    in_ulps,
    item,
    nonsense,
    rounded,
    scattered,
    values,
)
from noisescope.locators.passport_probes.operations import Operation

POINTS = {"quick": 2**15, "full": 2**19}
POINTS_OF_FLOAT64 = {"quick": 2**12, "full": 2**15}  # its reference, long double, is slow
SOFTMAX_ROW = 64


@dataclass(frozen=True)
class Curve:
    """A function's reference (numpy, in the type of its argument) and the range of operands that matters.

    Where the result is a difference of large terms by nature (the tail of GELU), ulps are those of `floor` at least.
    """

    reference: Callable[[Array], Array]
    low: float
    high: float
    floor: float = 0.0
    extended: bool = True  # the reference exists in long double


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu_tanh(x: Array) -> Array:
    c = np.sqrt(x.dtype.type(2) / x.dtype.type(np.pi))
    return np.asarray(x / 2 * (1 + np.tanh(c * (x + x.dtype.type(0.044715) * x**3))))


CURVES = {
    "exp": Curve(np.exp, -87.0, 88.0),
    "log": Curve(np.log, 0.0, math.inf),
    "rsqrt": Curve(lambda x: 1 / np.sqrt(x), 0.0, math.inf),
    "sqrt": Curve(np.sqrt, 0.0, math.inf),
    "tanh": Curve(np.tanh, -20.0, 20.0),
    "sigmoid": Curve(_sigmoid, -87.0, 20.0),
    "silu": Curve(lambda x: x * _sigmoid(x), -80.0, 100.0),
    "gelu_erf": Curve(lambda x: x / 2 * (1 + erf(x / math.sqrt(2))), -20.0, 100.0, floor=0.125, extended=False),
    "gelu_tanh": Curve(_gelu_tanh, -20.0, 100.0, floor=0.125),
    "sin": Curve(np.sin, -65536.0, 65536.0),
    "cos": Curve(np.cos, -65536.0, 65536.0),
}
_HOW = "against {wide} on the host, {n} operands from {low:g} to {high:g}{floor}"


@np.errstate(all="ignore")
def functions(
    table: Mapping[str, Operation], dtype: torch.dtype, device: torch.device, *, quick: bool
) -> dict[str, dict[str, Any]]:
    """Every function of the table in one dtype."""
    return {name: attempt(lambda name=name: _one(name, table[name], dtype, device, quick)) for name in table}  # type: ignore[misc]


def _one(name: str, call: Operation, dtype: torch.dtype, device: torch.device, quick: bool) -> dict[str, Any]:
    form = format_of(dtype)
    wide: type[Any] = np.float64
    if form.precision > 24:
        if np.finfo(np.longdouble).nmant < form.precision + 8:
            return {"value": None, "skipped": "the host has no type wider than float64 to judge it by"}
        if name in CURVES and not CURVES[name].extended:
            return {"value": None, "skipped": "the host has no wider reference of this function"}
        wide = np.longdouble
    count = (POINTS if form.precision <= 24 else POINTS_OF_FLOAT64)["quick" if quick else "full"]

    def on_device(*arguments: Array) -> Array:
        return values(call(*(torch.from_numpy(a).to(dtype).to(device) for a in arguments)))

    if name == "div":
        a, b = _magnitudes(form, count // 4, 5), _magnitudes(form, count // 4, 6)
        normal = _normal(a / b, form)
        a, b = a[normal], b[normal]
        how = f"against {_type_name(wide)} on the host, {len(a)} pairs of all magnitudes"
        return _line(on_device(a, b), a.astype(wide) / b.astype(wide), form, how, at=lambda i: [a[i], b[i]])
    if name == "softmax":
        rows = 12 * scattered((count // SOFTMAX_ROW // 4, SOFTMAX_ROW), 7, min(form.precision - 4, 20))
        wider = rows.astype(wide)
        powers = np.exp(wider - wider.max(axis=1, keepdims=True))
        reference = (powers / powers.sum(axis=1, keepdims=True)).ravel()
        size = f"{len(rows)} rows of {SOFTMAX_ROW} from -12 to 12"
        how = f"against {_type_name(wide)} on the host, {size}; at: operand - maximum"
        normal = _normal(reference, form)
        below = (rows - rows.max(axis=1, keepdims=True)).ravel()[normal]
        return _line(on_device(rows).ravel()[normal], reference[normal], form, how, at=lambda i: below[i])
    curve = CURVES[name]
    x = _operands(form, curve, count)
    reference = curve.reference(x.astype(wide))
    normal = _normal(reference, form)
    x, reference = x[normal], reference[normal]
    floor = f"; ulps of {curve.floor:g} or more" if curve.floor else ""
    how = _HOW.format(wide=_type_name(wide), n=len(x), low=x.min(), high=x.max(), floor=floor)
    return _line(on_device(x), reference, form, how, at=lambda i: x[i], floor=curve.floor)


def _normal(reference: Array, form: Format) -> Array:
    """Results that are normal numbers also when they are rounded up."""
    size = np.abs(reference)
    return np.asarray((size >= form.smallest_normal) & (size <= form.largest / (1 + 2.0**-form.precision)))


def _type_name(wide: type[Any]) -> str:
    return "long double" if wide is np.longdouble else "float64"


def _line(
    got: Array, reference: Array, form: Format, how: str, *, at: Callable[[int], Any], floor: float = 0.0
) -> dict[str, Any]:
    """Value: the worst error in ulps. `bias_ulp` is the mean error away from zero: about -0.5 where results are cut."""
    missing = ~np.isfinite(got)
    if missing.any():
        first = int(np.argmax(missing))
        what = f"{int(missing.sum())} of {len(got)} results are {got[first]:g} where a finite number is right"
        return nonsense(what, how, at=_plain(at(first)), points=len(got))
    off = in_ulps(got.astype(reference.dtype) - reference, reference, form, floor)
    distance = np.abs(off)
    i = int(np.argmax(distance))
    worst = float(distance[i])
    details = {
        "at": _plain(at(i)),
        "mean_ulp": rounded(float(distance.mean())),
        "bias_ulp": round(float((off * np.sign(reference)).mean()), 3) + 0.0,
        "points": len(got),
        "bits_right": max(0, form.precision - round(math.log2(max(worst, 0.5)) + 1)),
    }
    if details["bits_right"] < 2:
        return nonsense(f"wrong by {worst:.3g} ulp, all its bits, at {details['at']}", how, **details)
    return item(rounded(worst), how, **details)


def _plain(at: Any) -> Any:
    return [float(number) for number in at] if isinstance(at, list) else float(at)


def _operands(form: Format, curve: Curve, count: int) -> Array:
    """Normal numbers of the format within the curve's range, each once."""
    low, high = max(curve.low, -form.largest), min(curve.high, form.largest)
    if form.precision <= 11:
        x = values(torch.from_numpy(np.arange(-(2**15), 2**15).astype(np.int16)).view(form.dtype))
    else:
        bounded, half = math.isfinite(curve.high), count // 2
        even = np.linspace(low, high, half) if bounded else np.linspace(0.25, 4.0, half)
        x = np.concatenate([_magnitudes(form, half, 8, reach=max(-low, high) if bounded else None), even])
        x = np.unique(values(torch.from_numpy(x).to(form.dtype)))
    return np.asarray(x[(x >= low) & (x <= high) & (np.abs(x) >= form.smallest_normal)])


def _magnitudes(form: Format, count: int, seed: int, reach: float | None = None) -> Array:
    """Numbers of both signs, evenly over all binades of the format, or over those from 2^-24 to `reach`."""
    lowest, top = (form.emin, math.frexp(form.largest)[1] - 1) if reach is None else (-24, math.frexp(reach)[1] - 1)
    spread = (scattered((count,), seed, 30) + 1) / 2  # [0, 1)
    exponent = lowest + np.floor(spread * (top - lowest + 1)).astype(np.int64)
    mantissa = 1 + np.abs(scattered((count,), seed + 100, form.precision)) % 1  # -1 is taken as 0: 1 <= mantissa < 2
    sign = np.where(scattered((count,), seed + 200, 8) < 0, -1.0, 1.0)
    return np.asarray(sign * np.ldexp(mantissa, exponent))
