"""The class of a fault from the pattern of its errors: which elements, which channels, which bits, along what.

Patterns are asked in an order in which the narrow ones come first: a value stuck at a limit is also a spike, and every
fault is also an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from noisescope.localization.error_pattern import Evidence, Pattern, aligned_block, input_pattern

_MOST = 0.95  # of the wrong elements that a pattern must explain
_DEAD_SHARE = 0.01  # of the largest value: the smallest dead zone
_SPARSE = 0.05  # wrong elements in a channel, at most, for spikes
_PRODUCTS = ("linear", "matmul", "bmm")


def classify(evidence: Evidence) -> Pattern:
    """The likeliest pattern of one operator's errors."""
    for pattern in _PATTERNS:
        found = pattern(evidence)
        if found is not None:
            found.channels, found.period = found.channels or evidence.reported, evidence.period
            return found
    return Pattern("unknown", 0.3, "no known pattern", evidence.reported, evidence.period)


def is_stale(evidence: Evidence, other: Evidence) -> bool:
    """Whether the wrong elements of one call hold what belongs to another call, which is right there itself or not."""
    if evidence.y.shape != other.y.shape:
        return False
    wrong = evidence.bad & ~(other.bad & (evidence.y == other.y))  # a constant is the same in every call
    if int(wrong.sum()) < max(4, 0.5 * int(evidence.bad.sum())):
        return False
    belongs = (evidence.y - other.values).abs() <= other.limit
    return float(belongs[wrong].double().mean()) > _MOST


# -- patterns


def _nan_to_zero(e: Evidence) -> Pattern | None:
    lost = e.bad & e.y.isfinite() & ~e.fits
    if not bool(lost.any()) or int(lost.sum()) < _MOST * int(e.bad.sum()):
        return None
    values = e.y[lost].abs()
    whole = ((values == 0) | (values >= e.form.largest)).double().mean()
    return Pattern("nan to zero", 0.95, f"{int(lost.sum())} results should not be finite") if whole > _MOST else None


def _cut_off(e: Evidence) -> Pattern | None:
    """An activation that is 0 or its input where its gate is nearly closed or open."""
    if e.operator not in ("silu", "gelu") or e.x is None or not bool(e.bad.any()):
        return None
    given, x = e.y[e.bad], e.x[e.bad]
    cut = torch.where(x < 0, given == 0, given == x)
    limit = float(x.abs().min())
    return Pattern("function table", 0.9, f"0 or its input beyond +-{limit:.3g}") if bool(cut.all()) else None


def _dead_zone(e: Evidence) -> Pattern | None:
    """Zeros where the value is below a limit, and none of the values above it is wrong."""
    if not bool(e.bad.any()) or not bool((e.y[e.bad] == 0).all()):
        return None
    inside = e.columns
    limit = float(e.values[e.bad].abs().max())
    alive = ~e.bad & inside & (e.y != 0)
    if int(alive.sum()) == 0:
        return None  # whole channels are dead, or the whole output
    below = alive & (e.values.abs() < 0.99 * limit)
    if int(below.sum()) > 0.02 * int(e.bad.sum()):
        return None
    negative = e.bad & (e.values < 0)
    if bool(negative.any()):
        flushed = bool(torch.signbit(e.native[negative]).double().mean() > 0.5)
    else:  # no sign to tell them apart: a dead zone is a share of the largest value, what is flushed is next to nothing
        flushed = limit < _DEAD_SHARE * float(e.values[inside & e.fits].abs().max())
    if flushed or limit <= 2.0**e.form.least:
        return Pattern("flush to zero", 0.9, f"values below {limit:.3g} are 0 and keep their sign")
    return Pattern("dead zone", 0.9, f"values below {limit:.3g} are 0, those above are right")


def _dead_lane(e: Evidence) -> Pattern | None:
    if len(e.y) < 2:
        return None
    constant = (e.native == e.native[:1]).all(0) & e.bad.any(0)
    changing = (e.values.amax(0) - e.values.amin(0)) > e.limit.amax(0)
    dead = constant & changing
    if not bool(dead.any()) or int(e.bad[:, dead].sum()) < _MOST * int(e.bad.sum()):
        return None
    found = dead.nonzero().flatten().tolist()
    what = "0" if bool((e.y[0, dead] == 0).all()) else "a constant"
    return Pattern("dead lane", 0.95, f"{len(found)} channels are {what} in every row", tuple(found))


def _saturation(e: Evidence) -> Pattern | None:
    """The wrong ones all lie at +-t, t is the largest there is, and they should be larger."""
    if not bool(e.bad.any()):
        return None
    given, wanted = e.y[e.bad].abs(), e.values[e.bad].abs()
    inside = e.y[e.columns].abs()
    top = float(torch.where(inside.isfinite(), inside, 0.0).max())
    tied = (given == top) & (wanted > given) & (e.y[e.bad].sign() == e.values[e.bad].sign())
    if float(tied.double().mean()) < _MOST or top == 0:
        return None
    return Pattern("saturation", 0.95, f"{int(tied.sum())} values that should be larger lie at +-{top:.6g}")


def _stuck_bit(e: Evidence) -> Pattern | None:
    """One bit that never changes in the channels concerned, and turning it over mends the wrong elements."""
    constant = e.constant_bits()
    low = [bit for bit, value in constant if value == 0]
    run = 0
    while run in low:
        run += 1
    if run >= 2:
        return _short(e, run)
    for bit, value in constant:
        if e.mended_by(bit) > 0.9:
            return Pattern("stuck bit", 0.95, f"bit {bit} is always {value}", details={"bit": bit, "value": value})
    return None


def _short(e: Evidence, run: int) -> Pattern:
    """A short mantissa: cut off at the end (toward zero), or kept short while a sum was made (to nearest, and more)."""
    inside = e.columns & e.fits & (e.values != 0)
    error = (e.error * e.values.sign() / e.form.ulp(e.values))[inside] / 2**run
    text = f"the lowest {run} bits of the mantissa are always 0"
    toward_zero = float(error.clamp(-1.5, 1.5).mean()) < -0.25
    if e.operator in _PRODUCTS and not toward_zero:
        return Pattern("accumulation", 0.8, f"{text}, and the errors are as of sums that were kept so short")
    return Pattern("truncation", 0.9, text)


def _swapped(e: Evidence) -> Pattern | None:
    columns = e.bad.any(0).nonzero().flatten()
    if not 2 <= len(columns) <= 1024 or float(e.bad[:, columns].double().mean()) < 0.25:
        return None
    y, values, limit = e.y[:, columns], e.values[:, columns], e.limit[:, columns]
    partners = {}
    for at in range(len(columns)):
        fits = ((y[:, at : at + 1] - values).abs() <= limit).double().mean(0)
        fits[at] = 0
        if float(fits.max()) > _MOST:
            partners[int(columns[at])] = int(columns[int(fits.argmax())])
    if len(partners) < 0.9 * len(columns):
        return None
    a, b = next(iter(partners.items()))
    text = f"{len(partners)} channels hold what belongs to another (channel {a} that of {b})"
    return Pattern("swapped channels", 0.95, text, tuple(sorted(partners)))


def _rounding(e: Evidence) -> Pattern | None:
    """Errors within one ulp, half an ulp off on average: along the sign, or along +1."""
    ulp = e.form.ulp(e.values)
    inside = e.columns & e.fits & (e.values != 0)
    error = (e.error / ulp)[inside]
    free = error.abs() < 1.5  # sums that cancel say nothing about rounding
    if float(free.double().mean()) < 0.5 or error.numel() < 16:
        return None
    error, sign = error[free], e.values.sign()[inside][free]
    if float((error.abs() > 1.05).double().mean()) > 0.05:
        return None
    along, offset = float((error * sign).mean()), float(error.mean())
    if max(abs(along), abs(offset)) < 0.25 or max(abs(along), abs(offset)) > 0.75:
        return None
    if abs(along) >= abs(offset):
        mode = "toward zero" if along < 0 else "away from zero"
    else:
        mode = "down" if offset < 0 else "up"
    return Pattern("rounding mode", 0.9, f"rounded {mode}: {along:+.2f} ulp along the sign, {offset:+.2f} along +1")


def _not_finite(e: Evidence) -> Pattern | None:
    """NaN or infinity where a number belongs: what made it can't be read from it."""
    nonfinite = int((e.bad & ~e.y.isfinite()).sum())
    if nonfinite == 0 or nonfinite < _MOST * int(e.bad.sum()):
        return None
    return Pattern("unknown", 0.9, f"{nonfinite} results are NaN or infinite where a finite number belongs")


def _spike(e: Evidence) -> Pattern | None:
    """A few wrong elements among right ones."""
    count = int(e.bad.sum())
    if count == 0:
        return None
    share = count / max(1, int(e.columns.sum()))
    rest = e.columns & ~e.bad & e.fits
    healthy = e.chi(rest) < 1.5
    if share > _SPARSE or not healthy:
        return None
    height = float((e.error[e.bad].abs() / e.scale).nan_to_num(posinf=1e30).median())
    return Pattern("spike", 0.9, f"{count} elements are off, by {height:.3g} times the output's rms, the rest is right")


def _bias(e: Evidence) -> Pattern | None:
    for direction, what in ((torch.ones_like(e.values), "added"), (e.values.sign(), "added along the sign")):
        size = e.along(direction)
        if e.explains(direction * size):
            return Pattern("bias", 0.9, f"{size:+.4g} is {what}")
    return None


def _gain(e: Evidence) -> Pattern | None:
    slope = e.along(e.values)
    if not e.explains(e.values * slope):
        return None
    block = aligned_block(e.concerned, e.y.shape[1])
    if block is not None:
        text = f"channels {block[0]} to {block[1] - 1} are multiplied by {1 + slope:.4g}"
        return Pattern("block scale", 0.9, text)
    return Pattern("gain", 0.9, f"multiplied by {1 + slope:.5g}")


def _row_gain(e: Evidence) -> Pattern | None:
    """A factor of each row's own: a normaliser, or the reciprocal root of a norm."""
    if e.operator not in ("softmax", "norm") or int(e.columns[0].sum()) < 8:
        return None
    weight = e.weights()
    slope = (e.error * e.values * weight).sum(1, keepdim=True) / (e.values.square() * weight).sum(1, keepdim=True)
    if not e.explains(e.values * slope.nan_to_num(0.0)):
        return None
    if e.operator == "softmax":
        return Pattern(
            "accumulation", 0.7, "each row has a factor of its own, as a short sum of its exponentials gives"
        )
    return Pattern("function table", 0.8, "each row has a factor of its own, as a table for the reciprocal root gives")


def _remaining(e: Evidence) -> Pattern | None:
    if e.operator in _PRODUCTS:
        return Pattern("accumulation", 0.6, "repeatable errors of no pattern, as sums kept in too few bits make")
    if e.operator in ("softmax", "silu", "gelu", "norm"):
        return Pattern("function table", 0.6, "the error is a function of the input")
    return None


_PATTERNS: tuple[Callable[[Evidence], Pattern | None], ...] = (
    _nan_to_zero,
    _cut_off,
    _dead_zone,
    _saturation,
    _dead_lane,
    _stuck_bit,
    _swapped,
    _rounding,
    _bias,
    _gain,
    _row_gain,
    _not_finite,
    input_pattern,
    _spike,
    _remaining,
)
