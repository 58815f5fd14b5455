"""Error patterns of functions and long sums: attention masks and positions, tables for exp, low-precision sums."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from noisescope.localization.error_pattern import Evidence, Pattern, shorten
from noisescope.localization.host_products import Weighing

PRODUCTS = ("linear", "matmul", "bmm")
_FUNCTIONS = ("silu", "gelu", "norm", "softmax")
_FITS = 0.95  # of the wrong elements that another mask must explain
_KNOTS = 24
_DEPTH = 24.0  # exp(-24) of the largest: what lies below weighs nothing
_SMALL = 0.3  # of the output's rms: errors of arithmetic with few bits; what is larger is something else
_ALIKE = 6.0  # between the sizes of errors, in units of what rounding makes, of the upper and the lower tenth of rows
_TAILS = 12.0  # kurtosis: 3 for normal errors
_SMOOTH = 0.5  # of the variance: what neighbours along the input may differ by, squared and halved


def attention_pattern(e: Evidence) -> Pattern | None:
    """A fused call that uses the wrong keys or values, or weights them with an inaccurate exp."""
    if e.weighing is None or not bool(e.bad.any()):
        return None
    for name, text, other in _other_attention(e.weighing):
        fits = (e.y - other[e.weighing.seen]).abs() <= 4 * e.limit
        if float(fits[e.bad].double().mean()) > _FITS and e.explains(other[e.weighing.seen] - e.values):
            return Pattern(name, 0.9, text)
    if _explained_by_depth(e, e.weighing):
        return Pattern(
            "function table", 0.85, "the error in a key's weight depends on how far its score is below the maximum"
        )
    return None


def _other_attention(given: Weighing) -> Iterator[tuple[str, str, Tensor]]:
    """What an attention call would return with another mask, or with keys or values shifted by one position."""
    scores, hidden, values = given.scores, given.hidden, given.values
    later, earlier = torch.roll(hidden, 1, -1), torch.roll(hidden, -1, -1)
    later[..., 0] = earlier[..., -1] = True  # there is nothing beyond
    causal = torch.zeros_like(hidden)
    length, keys = hidden.shape[-2:]
    if length == keys:
        causal |= torch.ones(length, keys, dtype=torch.bool).triu(1)
    masks = {
        "one key beyond the end of the mask is attended to": hidden & later,
        "one key before the start of the mask is attended to": hidden & earlier,
        "the last key the mask allows is ignored": hidden | earlier,
        "the first key the mask allows is ignored": hidden | later,
        "its mask is ignored": torch.zeros_like(hidden),
        "only the causal part of its mask is applied": causal,
    }
    for text, mask in masks.items():
        if not torch.equal(mask, hidden):
            yield "mask", text, _weighed(scores, torch.where(mask.all(-1, keepdim=True), hidden, mask), values)
    keys_before, keys_after = (_one_off(scores, -1, back=back) for back in (True, False))
    values_before, values_after = (_one_off(values, -2, back=back) for back in (True, False))
    moved = {
        "keys are shifted by one position (from the position before)": (keys_before, values),
        "keys are shifted by one position (from the position after)": (keys_after, values),
        "values are shifted by one position (from the position before)": (scores, values_before),
        "values are shifted by one position (from the position after)": (scores, values_after),
    }
    for text, (other_scores, other_values) in moved.items():
        yield "position", text, _weighed(other_scores, hidden, other_values)
    for keep in range(1, 8):
        text = f"as if scores had {keep} bits of mantissa"
        yield "truncation", text, _weighed(shorten(scores, keep, torch.round), hidden, values)


def _one_off(x: Tensor, dim: int, *, back: bool) -> Tensor:
    """Each position with its neighbour's values; the last one stays."""
    length = x.shape[dim]
    at = torch.arange(length) + (-1 if back else 1)
    return x.index_select(dim, at.clamp(0, length - 1))


def _weighed(scores: Tensor, hidden: Tensor, values: Tensor) -> Tensor:
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
    return torch.matmul(p, values).reshape(-1, values.shape[-1])


def _hats(depth: Tensor, most: float) -> Iterator[Tensor]:
    """Basis of a piecewise linear function up to `most` that is 0 at depth 0: one hat function per knot."""
    step = most / (_KNOTS - 1)
    for knot in range(1, _KNOTS):
        yield (1 - (depth / step - knot).abs()).clamp_min(0.0)


def _explained_by_depth(e: Evidence, given: Weighing) -> bool:
    """Whether weights p (1 + g(depth)), normalised, explain an output.

    Since y sum p (1 + g) = sum p (1 + g) v, the error is y - sum p v = sum_j g_j (sum p hat_j (v - y)): linear in g.
    A factor of all weights cancels, so g is 0 at the top; or else g = -1, no weight at all, would explain anything.
    """
    scores = given.scores.masked_fill(given.hidden, -math.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    depth = scores.amax(-1, keepdim=True) - scores
    depth = torch.where(depth < _DEPTH, depth, 0.0)  # hidden keys, and such as weigh nothing
    whole = (depth, float(depth.max().clamp_min(1e-6)))
    octave = (torch.remainder(depth / math.log(2), 1.0), 1.0)  # exp is mostly made of 2^n and a function on one octave
    return any(_explained(e, [_shift(e, given, p * hat) for hat in _hats(*basis)]) for basis in (whole, octave))


def _shift(e: Evidence, given: Weighing, part: Tensor) -> Tensor:
    """sum part (v - y), [R, C]."""
    weighed, total = torch.matmul(part, given.values), part.sum(-1, keepdim=True)
    weighed, total = (t.reshape(-1, t.shape[-1])[given.seen] for t in (weighed, total))
    return weighed - total * e.y


def _explained(e: Evidence, patterns: list[Tensor]) -> bool:
    """Whether a sum of patterns, each [R, C], explains the error."""
    weight = e.weights().sqrt().flatten()
    design = torch.stack([torch.where(weight > 0, p.flatten() * weight, 0.0) for p in patterns], 1)
    gram = design.T @ design
    gram.diagonal().add_(1e-9 * float(gram.diagonal().max()) + 1e-300)
    size = torch.linalg.solve(gram, design.T @ (e.error.flatten() * weight))
    return e.explains(sum((float(c) * p for c, p in zip(size, patterns, strict=True)), torch.zeros_like(e.error)))


def function_pattern(e: Evidence) -> Pattern | None:
    """An activation or a softmax whose error is a function of its input: similar inputs have similar errors."""
    if e.x is None or e.operator not in ("silu", "gelu", "softmax"):
        return None
    inside = e.columns & e.fits & e.y.isfinite()
    error, x = e.error, e.x
    if e.operator == "softmax":
        inside = inside & (e.values > 1e-3 * e.values.amax(1, keepdim=True))
        relative = torch.where(inside, e.error / e.values.clamp_min(1e-30), torch.nan)
        error = relative - relative.nanmedian(1, keepdim=True).values
        x = (e.x - e.x.amax(1, keepdim=True)).clamp_min(-_DEPTH)
    inside = inside & error.isfinite()
    if int(inside.sum()) < 64:
        return None
    if not is_smooth(error[inside], x[inside]):
        return None
    return Pattern("function table", 0.85, "the error is a function of the input")


def is_smooth(errors: Tensor, along: Tensor) -> bool:
    """Whether nearby inputs have similar errors."""
    ordered = errors[along.argsort()]
    spread = float(ordered.var())
    return spread > 0 and float(ordered.diff().square().mean()) / 2 <= _SMOOTH * spread


def remaining(e: Evidence) -> Pattern | None:
    """Small errors everywhere, of the size that rounding with fewer bits would cause; anything else stays unknown."""
    if e.operator not in (*PRODUCTS, "attention", *_FUNCTIONS) or not _like_rounding(e):
        return None
    if e.operator in _FUNCTIONS:
        return Pattern("function table", 0.5, "small errors everywhere, as from a coarse table or low-precision sums")
    if e.weighing is not None and _weights_are_off(e, e.weighing):
        return Pattern(
            "function table", 0.6, "small errors everywhere, as from an inaccurate exp in the attention weights"
        )
    return Pattern(
        "accumulation", 0.6, "small errors everywhere, proportional to the terms summed, as from low-precision sums"
    )


def _weights_are_off(e: Evidence, given: Weighing) -> bool:
    """Whether errors are proportional to p (v - y) of each key rather than to the summed p v."""
    p = torch.softmax(given.scores.masked_fill(given.hidden, -math.inf), -1).nan_to_num(0.0).square()
    terms = (torch.matmul(p, given.values.square()), torch.matmul(p, given.values), p.sum(-1, keepdim=True))
    squares, cross, total = (t.reshape(-1, t.shape[-1])[given.seen] for t in terms)
    floor = e.variance
    units = (squares - 2 * e.values * cross + e.values.square() * total, squares)

    def misfit(unit: Tensor) -> float:
        """Of normal errors whose variance is a multiple of a unit, beside healthy ones."""
        scale = float((e.error.square() - floor).sum().clamp_min(0)) / max(1e-300, float(unit.sum()))
        variance = floor + scale * unit.clamp_min(0)
        return float((variance.log() + e.error.square() / variance).mean())

    return misfit(units[0]) < misfit(units[1])


def _like_rounding(e: Evidence) -> bool:
    inside = e.columns & e.fits & e.y.isfinite()
    if float(inside.double().mean()) < 0.9 * float(e.columns.double().mean()):
        return False
    inside = inside & (e.values != 0)  # what a mask hides is 0 whatever the arithmetic
    if int(inside.sum()) < 16:
        return False
    size = math.sqrt(float(e.error[inside].square().mean()) / max(1e-300, float(e.values[inside].square().mean())))
    unit = e.reference.spread if e.reference.spread is not None else e.reference.variance.sqrt()
    ratio = torch.where(inside, e.error / unit.clamp_min(1e-300), 0.0)
    squares, count = ratio.square(), inside.double()
    rows = (squares.sum(1) / count.sum(1).clamp_min(1)).sqrt()[inside.sum(1) >= min(4, int(inside.sum(1).max()))]
    low, high = torch.quantile(rows, torch.tensor([0.1, 0.9], dtype=rows.dtype))
    kurtosis = float(ratio[inside].pow(4).mean()) / max(1e-300, float(squares[inside].mean()) ** 2)
    return size < _SMALL and float(high) < _ALIKE * float(low) and kurtosis < _TAILS
