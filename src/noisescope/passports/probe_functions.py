"""Measures functions, single additions and casts, and fused attention: errors in ulps against a wider host reference.

Functions are tested at every number of a 16-bit format's range; longer formats on a grid, half of it evenly spaced,
half by magnitude. Numbers whose operand or result is subnormal are left out: `subnormal_...` covers those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import erf

from noisescope.passports.probe_specials import elementwise_specials
from noisescope.passports.shared_tools import (
    BIG_SIGN,
    SMALL,
    Array,
    Format,
    Operation,
    attempt,
    format_of,
    host_product,
    in_ulps,
    item,
    name_rounding,
    nonsense,
    rounded,
    scattered,
    values,
)

POINTS = {"quick": 2**15, "full": 2**19}
POINTS_OF_FLOAT64 = {"quick": 2**12, "full": 2**15}  # its reference, long double, is slow
SOFTMAX_ROW = 64
REPEATS = 32  # of each sum, to see stochastic rounding
HEADS, TOKENS, WIDTH = 2, 160, 64  # 160: more than one tile of 64 or 128, the last one not full
BOUND = 64.0  # ulps: of a result with rounded weights, a long way; beyond it the answer is wrong, not rough


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
            return {"value": None, "skipped": "the host has no type wider than float64 to compare with"}
        if name in CURVES and not CURVES[name].extended:
            return {"value": None, "skipped": "the host has no wider reference for this function"}
        wide = np.longdouble
    host = "long double" if wide is np.longdouble else "float64"
    count = (POINTS if form.precision <= 24 else POINTS_OF_FLOAT64)["quick" if quick else "full"]

    def on_device(*arguments: Array) -> Array:
        return values(call(*(torch.from_numpy(a).to(dtype).to(device) for a in arguments)))

    if name == "div":
        a, b = _magnitudes(form, count // 4, 5), _magnitudes(form, count // 4, 6)
        normal = _normal(a / b, form)
        a, b = a[normal], b[normal]
        how = f"against {host} on the host, {len(a)} pairs of all magnitudes"
        return _line(on_device(a, b), a.astype(wide) / b.astype(wide), form, how, at=lambda i: [a[i], b[i]])
    if name == "softmax":
        rows = 12 * scattered((count // SOFTMAX_ROW // 4, SOFTMAX_ROW), 7, min(form.precision - 4, 20))
        wider = rows.astype(wide)
        powers = np.exp(wider - wider.max(axis=1, keepdims=True))
        reference = (powers / powers.sum(axis=1, keepdims=True)).ravel()
        size = f"{len(rows)} rows of {SOFTMAX_ROW} from -12 to 12"
        how = f"against {host} on the host, {size}; at: operand - maximum"
        normal = _normal(reference, form)
        below = (rows - rows.max(axis=1, keepdims=True)).ravel()[normal]
        return _line(on_device(rows).ravel()[normal], reference[normal], form, how, at=lambda i: below[i])
    curve = CURVES[name]
    x = _operands(form, curve, count)
    reference = curve.reference(x.astype(wide))
    normal = _normal(reference, form)
    x, reference = x[normal], reference[normal]
    how = f"against {host} on the host, {len(x)} operands from {x.min():g} to {x.max():g}"
    how += f"; ulps of {curve.floor:g} or more" if curve.floor else ""
    return _line(on_device(x), reference, form, how, at=lambda i: x[i], floor=curve.floor)


def _normal(reference: Array, form: Format) -> Array:
    """Results that are normal numbers also when they are rounded up."""
    size = np.abs(reference)
    return np.asarray((size >= form.smallest_normal) & (size <= form.largest / (1 + 2.0**-form.precision)))


def _line(
    got: Array, reference: Array, form: Format, how: str, *, at: Callable[[int], Any], floor: float = 0.0
) -> dict[str, Any]:
    """The value is the worst error in ulps.

    `bias_ulp` is the mean error away from zero: about -0.5 if results are truncated.
    """
    missing = ~np.isfinite(got)
    if missing.any():
        first = int(np.argmax(missing))
        what = f"{int(missing.sum())} of {len(got)} results are {got[first]:g} but should be finite"
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
        return nonsense(f"wrong by {worst:.3g} ulp (no bit is correct) at {details['at']}", how, **details)
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


# -- single sums and casts


@np.errstate(all="ignore")
def elementwise(table: Mapping[str, Operation], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """All lines about single sums, products and casts in one dtype."""
    form = format_of(dtype)
    quarter = 2.0 ** (-form.precision - 1)
    big = np.repeat(1.5 * BIG_SIGN, REPEATS)  # [24 x REPEATS]
    small = np.repeat(SMALL * quarter, REPEATS)

    def named(result: torch.Tensor) -> str:
        return name_rounding(((values(result) - big) / quarter).reshape(len(SMALL), REPEATS))

    def add() -> dict[str, Any]:
        a, b = (torch.from_numpy(numbers).to(dtype).to(device) for numbers in (big, small))
        return item(named(table["add"](a, b)), "1.5 + s with s in quarters of an ulp, both signs")

    def cast() -> dict[str, Any]:
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        exact = torch.from_numpy(big + small).to(wide).to(device)
        return item(named(table["cast"](exact, dtype)), f"1.5 + s in {str(wide).removeprefix('torch.')}, cast")

    lines = {"add_rounding": attempt(add)}
    if dtype != torch.float64:
        lines["cast_rounding"] = attempt(cast)
    return {**lines, **elementwise_specials(table, dtype, device)}


# -- fused attention


@np.errstate(all="ignore")
def attention(call: Operation, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
    """The error against float64, rows that sum to 1, a shift of all keys, laws in V.

    Keys and shift are multiples of 1/8, so that their sum is exact.
    """
    form = format_of(dtype)
    shape = (1, HEADS, TOKENS, WIDTH)
    q, k, v = (2 * scattered(shape, seed, bits) for seed, bits in ((31, form.precision), (32, 5), (33, form.precision)))
    shift = 4 * scattered((WIDTH,), 34, 6)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return values(call(*(torch.from_numpy(a).to(dtype).to(device) for a in (q, k, v))))

    plain = attempt(lambda: {"value": attend(q, k, v)})
    if "skipped" in plain:
        return {"error": plain}
    out = plain["value"]
    ulp = 2.0 ** (1 - form.precision)  # of 1
    reference = _exact(q, k, v)
    unit = ulp * float(np.abs(reference).max())

    def in_units(difference: Array, unit: float, how: str) -> dict[str, Any]:
        worst = float(np.abs(difference).max() / unit)
        if not worst <= BOUND * max(1.0, 2.0 ** (form.precision - 24)):
            return nonsense(f"off by {worst:.3g} ulp", how, worst=rounded(worst))
        return item(rounded(worst), how)

    def laws() -> dict[str, dict[str, Any]]:
        normal = np.abs(out) >= form.smallest_normal
        return {
            "zero": item(not attend(q, k, 0 * v).any(), "V = 0 gives 0"),
            "odd": item(bool(np.array_equal(attend(q, k, -v), -out)), "-V gives the negative"),
            "doubling": item(
                bool(np.array_equal(attend(q, k, 2 * v)[normal], 2 * out[normal])),
                "2 V gives the double where results are normal numbers",
            ),
            "repeat": item(bool(np.array_equal(attend(q, k, v), out)), "the same call twice"),
        }

    return {
        "error": in_units(out - reference, unit, "worst error against float64, in ulps of the largest result"),
        "rows_sum": in_units(attend(q, k, np.ones_like(v)) - 1.0, ulp, "V = 1: worst distance from 1, in ulps of 1"),
        "key_shift": in_units(
            attend(q, k + shift, v) - out,
            unit,
            "the same vector added to all keys: worst change, in ulps of the largest result",
        ),
        "single_key": in_units(
            attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]) - v[:, :, :1],
            ulp * float(np.abs(v[:, :, :1]).max()),
            "one key: worst distance from its value, in ulps of the largest (kernels that use a fast reciprocal are "
            "off by one)",
        ),
        **laws(),
    }


def _exact(q: Array, k: Array, v: Array) -> Array:
    scores = host_product(q, k.swapaxes(-1, -2)) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return host_product(weights / weights.sum(axis=-1, keepdims=True), v)
