"""Infers the class of a fault from the pattern of its errors: the elements, channels, bits and direction.

Narrow patterns are tried first: a value stuck at a limit is also a spike, and every fault also matches "unknown".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from noisescope.localization.error_pattern import Evidence, Pattern, aligned_block, input_pattern
from noisescope.localization.function_pattern import PRODUCTS, attention_pattern, function_pattern, remaining
from noisescope.localization.row_pattern import ATTENTION_OPERATORS, Region, find_region, moved_rows, row_words

_MOST = 0.95  # of the wrong elements that a pattern must explain
_DEAD_SHARE = 0.01  # of the largest value: the smallest dead zone
_NEAREST = 0.51  # units in the last place of a number that was rounded once, at the end
_SPARSE = 0.05  # wrong elements in a channel, at most, for spikes
_EVERYWHERE = ("accumulation", "function table", "truncation", "rounding mode")  # by chance beyond tolerance in a row
_TAIL = 0.5  # of the channels, at most, that are a tail
_OF_ROWS = ("function table", "accumulation")  # classes of errors that each row has by its own
_FEWEST_ROWS = 4  # that share the constants of their channels
_VARIES = 0.01  # of the rms: what outputs change by from row to row, at least, for their errors to be constant


def classify(evidence: Evidence) -> Pattern:
    """The likeliest pattern of one operator's errors."""
    found = next((p for ask in _PATTERNS if (p := ask(evidence)) is not None), None)
    found = Pattern("unknown", 0.3, "no known pattern") if found is None else found
    found.channels, found.period = found.channels or evidence.reported, evidence.period
    last = evidence.y.shape[1] - 1
    run = found.channels and found.channels[-1] - found.channels[0] == len(found.channels) - 1
    if run and found.channels[-1] == last and len(found.channels) <= _TAIL * (last + 1):
        found.text += f"; these are the last {len(found.channels)} channels"
        if found.fault_class == "unknown":
            found.fault_class, found.confidence = "tail", 0.7
        else:
            found.details.setdefault("also", "tail")
    if found.fault_class not in _EVERYWHERE or found.row_words:
        evidence.name_rows(found)
    return found


def is_stale(evidence: Evidence, other: Evidence) -> bool:
    """Whether the wrong elements of one call hold the values of another call."""
    if evidence.y.shape[1] != other.y.shape[1]:
        return False
    if not torch.equal(evidence.index, other.index):  # of the rows that both have
        here, there = (torch.isin(a.index, b.index) for a, b in ((evidence, other), (other, evidence)))
        if not bool(here.any()) or evidence.places.shape != other.places.shape:
            return False
        evidence, other = (e.part(rows, (0, e.y.shape[1])) for e, rows in ((evidence, here), (other, there)))
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
    return (
        Pattern("nan to zero", 0.95, f"{int(lost.sum())} results are finite but should not be")
        if whole > _MOST
        else None
    )


def _cut_off(e: Evidence) -> Pattern | None:
    """An activation that returns 0, or its input, where its gate is nearly closed or open."""
    if e.operator not in ("silu", "gelu") or e.x is None or not bool(e.bad.any()):
        return None
    given, x = e.y[e.bad], e.x[e.bad]
    cut = torch.where(x < 0, given == 0, given == x)
    limit = float(x.abs().min())
    return Pattern("function table", 0.9, f"0 or equal to its input beyond +-{limit:.3g}") if bool(cut.all()) else None


def _dead_zone(e: Evidence) -> Pattern | None:
    """Zeros where the value is below a limit, and all values above it are correct."""
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
        return Pattern("flush to zero", 0.9, f"values below {limit:.3g} are flushed to 0 and keep their sign")
    return Pattern("dead zone", 0.9, f"values below {limit:.3g} are zeroed, larger values are correct")


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
    """All wrong elements lie at the end of the range of their sign, and should be beyond it."""
    if not bool(e.bad.any()):
        return None
    given, wanted, present = e.y[e.bad], e.values[e.bad], e.y[e.columns]
    ends = [float(torch.where(present.isfinite(), sign * present, 0.0).max()) for sign in (1, -1)]
    tied = [(sign * given == end) & (sign * wanted > end) & (end > 0) for sign, end in zip((1, -1), ends, strict=True)]
    if float((tied[0] | tied[1]).double().mean()) < _MOST:
        return None
    sides = [f"{sign}{end:.6g}" for sign, end, found in zip("+-", ends, tied, strict=True) if bool(found.any())]
    where = f"+-{ends[0]:.6g}" if len(sides) == 2 and ends[0] == ends[1] else " and ".join(sides)
    count = int((tied[0] | tied[1]).sum())
    return Pattern("saturation", 0.95, f"{count} values that should be larger are clipped to {where}")


def _stuck_bit(e: Evidence) -> Pattern | None:
    """One bit that never changes in the affected channels, and flipping it corrects the wrong elements."""
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
    """A short mantissa: cut at the end (toward zero or to nearest), or kept short in every addition (further off)."""
    inside = e.columns & e.fits & (e.values != 0)
    error = (e.error * e.values.sign() / e.form.ulp(e.values))[inside] / 2**run
    text = f"the lowest {run} bits of the mantissa are always 0"
    toward_zero = float(error.clamp(-1.5, 1.5).mean()) < -0.25
    at_the_end = float((error.abs() <= _NEAREST).double().mean()) > _MOST
    if e.operator in (*PRODUCTS, "attention") and not toward_zero and not at_the_end:
        return Pattern("accumulation", 0.8, f"{text}, and the errors match sums accumulated in that many bits")
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
    text = f"{len(partners)} channels hold another channel's values (channel {a} holds those of {b})"
    return Pattern("swapped channels", 0.95, text, tuple(sorted(partners)))


def _rounding(e: Evidence) -> Pattern | None:
    """Errors within one ulp, half an ulp on average, away from zero or upward."""
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
    return Pattern("rounding mode", 0.9, f"rounded {mode}: {along:+.2f} ulp away from zero, {offset:+.2f} ulp upward")


def _not_finite(e: Evidence) -> Pattern | None:
    """NaN or infinity where a number is expected; the pattern does not show the cause."""
    nonfinite = int((e.bad & ~e.y.isfinite()).sum())
    if nonfinite == 0 or nonfinite < _MOST * int(e.bad.sum()):
        return None
    return Pattern("unknown", 0.3, f"{nonfinite} results are NaN or infinite but should be finite")


def _spike(e: Evidence) -> Pattern | None:
    """A few wrong elements among correct ones."""
    count = int(e.bad.sum())
    if count == 0:
        return None
    share = count / max(1, int(e.columns.sum()))
    rest = e.columns & ~e.bad & e.fits
    healthy = e.chi(rest) < 1.5
    if share > _SPARSE or not healthy:
        return None
    height = float((e.error[e.bad].abs() / e.scale).nan_to_num(posinf=1e30).median())
    return Pattern(
        "spike", 0.9, f"{count} elements are wrong by {height:.3g} times the output's rms; the rest are correct"
    )


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


def _by_channel(e: Evidence) -> Pattern | None:
    """Each channel off by a constant of its own, in all rows: a bias vector; or by a factor of its own: a scale."""
    inside = torch.where(e.columns & e.fits, e.values, 0.0)
    if len(e.y) < _FEWEST_ROWS or float((inside - inside.mean(0)).square().mean()) < (_VARIES * e.scale) ** 2:
        return None  # of rows that are alike all errors are constant
    rows, every = torch.arange(len(e.y)), (0, e.y.shape[1])
    known, other = (dataclasses.replace(e.part(half, every), concerned=e.concerned) for half in (rows[::2], rows[1::2]))
    weight = known.weights()

    def fitted(here: Tensor, there: Tensor) -> Tensor:
        along = torch.where(weight > 0, here, 0.0)
        size = (known.error * along * weight).sum(0) / (along.square() * weight).sum(0).clamp_min(1e-300)
        return there * size

    fits = [fitted(torch.ones_like(known.values), torch.ones_like(other.values)), fitted(known.values, other.values)]
    offset, factor = (float(((other.error - fit).square() * other.weights()).sum()) for fit in fits)
    if not other.explains(fits[0] if offset < factor else fits[1]):
        return None  # small numbers weigh most: what fits a few of them must fit other rows too
    if offset < factor:
        return Pattern("bias", 0.8, "each channel is off by its own constant, as by a lost bias")
    return Pattern("gain", 0.8, "each channel is multiplied by its own factor")


def _row_gain(e: Evidence) -> Pattern | None:
    """Each row scaled by its own factor: a softmax normaliser, or the rsqrt of a norm."""
    if e.operator not in ("softmax", "norm") or int(e.columns[0].sum()) < 3:
        return None
    weight = e.weights()
    slope = (e.error * e.values * weight).sum(1, keepdim=True) / (e.values.square() * weight).sum(1, keepdim=True)
    if not e.explains(e.values * slope.nan_to_num(0.0)):
        return None
    if e.operator == "softmax":
        return Pattern(
            "accumulation",
            0.7,
            "each row is scaled by its own factor, as when the sum of exponentials is accumulated in too few bits",
        )
    return Pattern(
        "function table", 0.8, "each row is scaled by its own factor, as when rsqrt comes from a coarse table"
    )


# -- rows


def _moved(e: Evidence) -> Pattern | None:
    """Rows that hold the values of another row of the same output."""
    wrong = e.bad.any(1)
    found = moved_rows(e.y, e.values, e.limit, wrong) if bool(wrong.any()) else {}
    if not found:
        return None
    here, there = (e.places[torch.tensor(list(rows))] for rows in (found, found.values()))
    other = here.head != there.head  # repeated heads are alike, so that some rows find themselves in another
    if bool(other.all()) or (bool(other.any()) and torch.equal(here.token, there.token)):
        text = f"head {int(here.head[0])} holds the values of head {int(there.head[0])}"
        return Pattern("swapped channels", 0.8, text, row_words=row_words(wrong, e.places))
    unit = "token" if here.tokens else "row"
    steps = (there.token - here.token)[here.sequence == there.sequence]
    if len(steps) == len(found) and bool((steps == steps[0]).all()):
        text = f"each holds the values of the {unit} {abs(int(steps[0]))} {'before' if steps[0] < 0 else 'after'} it"
    else:
        first, second = (
            f"{unit} {int(p.token[0])}" + (f" of sequence {int(p.sequence[0])}" if p.shape[0] > 1 else "")
            for p in (here, there)
        )
        text = f"rows hold the values of other rows ({first} holds those of {second})"
    return Pattern("stale data", 0.9, text, details={"also": "rows"}, row_words=row_words(wrong, e.places))


def _region(e: Evidence) -> Pattern | None:
    """Some rows are wrong and all others correct; the same patterns are tried inside that region."""
    said = (e.bad | (e.columns & (e.values != 0))).any(1)  # where a mask hides all, a row is right whatever happens
    region = find_region(e.loud[said], e.bad[said], e.healthy_rows[said], e.places[said])
    if region is None:
        return None
    part = e.part(said.nonzero().flatten()[region.rows], region.channels)
    inner = _inside(part, region)
    whole = region.channels[1] - region.channels[0] > _TAIL * e.y.shape[1]
    channels = () if whole else tuple(range(*region.channels))
    if region.kind == "heads":
        if inner is None:
            return None
        return Pattern(inner.fault_class, inner.confidence, inner.text, details=inner.details, row_words=region.words)
    if inner is not None and inner.fault_class in _OF_ROWS and not region.sure:  # some rows' factors are off by less
        return Pattern(inner.fault_class, inner.confidence, inner.text, details=inner.details, row_words=region.words)
    if inner is None and region.kind != "tile" and e.operator in ATTENTION_OPERATORS:
        return None  # a mask, a position or a page: which rows it shows in says no more
    text = "no pattern inside" if inner is None else inner.text
    details = {} if inner is None else {**inner.details, "also": inner.fault_class}
    confidence = (0.9 if inner is not None else 0.8) if region.sure else 0.6
    return Pattern(region.kind, confidence, text, channels, details=details, row_words=region.words)


def _inside(part: Evidence, region: Region) -> Pattern | None:
    """The class of the errors inside a region, if it is clear."""
    box = part.y[:, slice(*region.channels)]
    if bool((box == box[0, 0]).all()):
        return Pattern("dead lane", 0.9, f"all {float(box[0, 0]):.4g}")
    inner = next((p for ask in (*_BY_VALUE, *_FITTED) if (p := ask(part)) is not None), None)
    if inner is not None and inner.fault_class == "block scale" and "input_lanes" not in inner.details:
        inner.fault_class = "gain"  # it is a block already
    return None if inner is None or inner.fault_class == "unknown" else inner


# What depends on the value of an element shows in whatever rows have such values: it is asked before rows are.
_BY_VALUE: tuple[Callable[[Evidence], Pattern | None], ...] = (
    _nan_to_zero,
    _cut_off,
    _dead_zone,
    _saturation,
    _dead_lane,
    _stuck_bit,
)
_FITTED: tuple[Callable[[Evidence], Pattern | None], ...] = (
    _swapped,
    _rounding,
    _bias,
    _gain,
    _row_gain,
    _not_finite,
    input_pattern,
    _by_channel,
)
_PATTERNS: tuple[Callable[[Evidence], Pattern | None], ...] = (
    *_BY_VALUE,
    attention_pattern,
    _moved,
    _region,
    *_FITTED,
    _spike,
    function_pattern,
    remaining,
)
