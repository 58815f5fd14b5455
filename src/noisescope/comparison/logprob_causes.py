"""Causes of disagreement that log-probabilities alone can reveal, each looked for after correcting the previous ones.

A cause function takes the pairs and returns None or a `Found`: what was observed, where to look, and the corrected
pairs. Patterns that healthy pairs can't have (a constant ratio, duplicated rows, exact zeros at unlikely tokens) need
no test. The others are tested over sequences, at level `ALARM` for all of them together, and need a size that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from noisescope.comparison.logprob_files import Array
from noisescope.comparison.logprob_pairs import (
    SENTINEL,
    Cause,
    Flags,
    Found,
    Pair,
    Pairs,
    joined,
    middle,
    significant,
    t_statistic,
)
from noisescope.comparison.logprob_trends import first_tokens, position, training_step

_FEWEST = 30  # tokens
_CURVE = 12  # bins of the curve difference over log-probability
_LIKELY = 20  # likely tokens that a temperature is recognised by
_SAME_SIGN = 0.8  # share of them that must be sharper on the same side
_SHARPER = 0.05  # by how much, on a logarithmic scale: temperatures from 0.95 to 1.05 pass unseen
_SMALLEST = 1e-6  # nats per token that top-p or top-k must cause: less is the rounding of float32
_VERY_LOW = -20.0  # nats: a value repeated below this stands for none
_ONE_SIDED = 0.45  # (up - down) / (up + down) of differences that top-p or top-k makes


# -- patterns


def scale(pairs: Pairs) -> Found | None:
    """B is A times a constant: another logarithm base, the opposite sign; or probabilities, logits, running sums."""
    a, b = joined(pairs, lambda one: one.a), joined(pairs, lambda one: one.b)
    inside = (np.abs(a) > 0.5) & (a > SENTINEL) & (np.abs(b) < -SENTINEL)
    if inside.sum() < _FEWEST:
        return None
    positive = b[inside] > 0
    if positive.mean() > 0.9 and np.median(np.abs(np.log(np.maximum(b[inside], 1e-300)) - a[inside])) < 0.1:
        mended = tuple(replace(one, b=np.log(np.maximum(one.b, 1e-300))) for one in pairs)
        return Found("scale", "B holds probabilities, not their logarithms.", _UNITS, mended, int(inside.sum()))
    if positive.mean() > 0.5 and (b[inside] > 1).mean() > 0.5 and not _opposite(a[inside], b[inside]):
        mended = tuple(replace(one, b=np.full_like(one.b, np.nan)) for one in pairs)
        words = f"{positive.mean():.0%} of B's values are above 0, so they are logits or another quantity."
        return Found("scale", words, _UNITS, mended, int(positive.sum()))
    sums = tuple(replace(one, b=np.diff(one.b, prepend=0.0)) for one in pairs)
    if _far_nearer(pairs, sums):
        return Found("scale", "B holds running sums of log-probabilities.", _UNITS, sums, int(inside.sum()))
    ratio = b[inside] / a[inside]
    factor = float(np.median(ratio))
    spread = float(np.median(np.abs(ratio - factor)))
    if not factor or abs(factor - 1) < 0.05 or spread > 0.1 * min(abs(factor), abs(factor - 1)):
        return None
    known = {-1.0: "the opposite sign", 1 / math.log(10): "logarithms to base 10", 1 / math.log(2): "base 2"}
    known |= {1 / one: words.replace("base", "base e where A has base") for one, words in known.items() if one > 0}
    word = next(
        (words for one, words in known.items() if abs(factor / one - 1) < 0.03), "not a ratio of common logarithm bases"
    )
    statement = f"B is {factor:.3g} times A at every token ({word})."
    mended = tuple(replace(one, b=one.b / factor) for one in pairs)
    return Found("scale", statement, _UNITS, mended, int(inside.sum()))


def _opposite(a: Array, b: Array) -> bool:
    """Whether b falls as a rises: a constant, negative ratio."""
    ratio = b / a
    return bool(np.median(np.abs(ratio - np.median(ratio))) < 0.1 * abs(float(np.median(ratio))))


def _far_nearer(pairs: Pairs, mended: Pairs) -> bool:
    """Whether the typical difference shrinks to a hundredth."""
    before, after = (np.abs(joined(side, lambda one: one.differences)) for side in (pairs, mended))
    return bool(np.median(before) > 0.5 and np.median(after) < 0.01 * np.median(before))


_UNITS = "Check how the file is written: noisescope expects natural logarithms of probabilities, all at most 0."


def different_tokens(pairs: Pairs) -> Found | None:
    """The files have different tokens at some positions, so the values can't be compared there."""
    flags = [_token_flags(one) for one in pairs]
    count = int(sum(flag.sum() for flag in flags))
    if not count:
        return None
    mended = tuple(replace(one, b=np.where(flag, np.nan, one.b)) for one, flag in zip(pairs, flags, strict=True))
    return Found(
        "different tokens",
        f"{count} tokens differ between the files, in {sum(map(bool, map(np.any, flags)))} sequences.",
        "Compare the token ids. Likely causes: a different tokenizer, template or special token, or texts generated "
        "separately on each side.",
        mended,
        count,
    )


def _token_flags(one: Pair) -> Flags:
    mine, other = one.row_a.tokens, one.row_b.tokens
    if not mine or not other or not len(mine) == len(other) == len(one.a) or type(mine[0]) is not type(other[0]):
        return np.zeros(len(one.a), dtype=bool)
    return np.array([x != y for x, y in zip(mine, other, strict=True)])


def missing(pairs: Pairs) -> Found | None:
    """Placeholders for "no value": null, NaN, infinities, below -1000, above 0, and 0 at unlikely tokens."""
    kinds: dict[str, int] = {}
    mended = []
    zeros = {side: _zeros_are_missing(pairs, side) for side in "ab"}
    fills = {side: _fill_value(pairs, side) for side in "ab"}
    for one in pairs:
        values = {"a": one.a.copy(), "b": one.b.copy()}
        for side, other in (("a", one.b), ("b", one.a)):
            mine = values[side]
            flags = {
                "null or NaN": np.isnan(mine),
                "infinite": np.isinf(mine),
                f"below {SENTINEL:g}": np.isfinite(mine) & (mine <= SENTINEL),
                f"exactly {fills[side]:g}": mine == fills[side],
                "above 0": np.isfinite(mine) & (mine > 1e-4),
            }
            if zeros[side]:
                flags["exactly 0"] = (mine == 0) & (other < -1e-3)
            for kind, flag in flags.items():
                if flag.any():
                    kinds[f"{kind} in {side.upper()}"] = kinds.get(f"{kind} in {side.upper()}", 0) + int(flag.sum())
                    mine[flag] = np.nan
        mended.append(replace(one, a=values["a"], b=values["b"]))
    if not kinds:
        return None
    words = ", ".join(f"{count} tokens {kind}" for kind, count in kinds.items())
    next_step = (
        "Find what writes a value where none was computed: padding, a masked token, a token outside the top "
        "log-probabilities that the server returns (-9999), a truncated sequence."
    )
    return Found(
        "missing values",
        f"Some values are placeholders, not log-probabilities: {words}.",
        next_step,
        tuple(mended),
        sum(kinds.values()),
    )


def _fill_value(pairs: Pairs, side: str) -> float:
    """A very low value that several tokens have exactly and the other side has nowhere near, such as -100; else NaN."""
    mine = joined(pairs, lambda one: one.a if side == "a" else one.b)
    other = joined(pairs, lambda one: one.b if side == "a" else one.a)
    low = (mine < _VERY_LOW) & (mine > SENTINEL) & (other > mine / 2)
    values, counts = np.unique(mine[low], return_counts=True)
    return float(values[counts.argmax()]) if len(counts) and counts.max() >= 3 else math.nan


def _zeros_are_missing(pairs: Pairs, side: str) -> bool:
    """Exact zeros at tokens that the other side finds unlikely. Top-p also gives zeros, but only at likely tokens."""
    mine = joined(pairs, lambda one: one.a if side == "a" else one.b)
    other = joined(pairs, lambda one: one.b if side == "a" else one.a)
    at = (mine == 0) & (other < -1e-3) & (other > SENTINEL)
    return int((at & (other < -0.7)).sum()) >= 2 or bool(at.sum() and (other[at] < -0.7).mean() > 0.2)


# -- processors of logits


def processed(pairs: Pairs) -> Found | None:
    """Temperature, or probabilities that were renormalised over the tokens that top-p or top-k keeps."""
    return _truncating(pairs) or _temperature(pairs)


def _truncating(pairs: Pairs) -> Found | None:
    """One side is never below the other: it divides by the share of the kept tokens."""
    differences = joined(pairs, lambda one: one.differences)
    if len(differences) < _FEWEST:
        return None
    up, down = np.maximum(differences, 0).mean(), np.maximum(-differences, 0).mean()
    if up + down < _SMALLEST or abs(up - down) / (up + down) < _ONE_SIDED:
        return None
    sign = 1.0 if up > down else -1.0
    if not _lasts_at_unlikely_tokens(pairs, sign):
        return None
    t = t_statistic(float(one.differences[one.usable].mean()) for one in pairs if one.usable.any())
    if not significant(t, len(pairs)) or float(np.quantile(sign * differences, 0.995)) > math.log(20):
        return None
    side, other = ("B", "A") if sign > 0 else ("A", "B")
    values = joined(pairs, lambda one: one.b if sign > 0 else one.a)
    plain = joined(pairs, lambda one: one.a if sign > 0 else one.b)
    likely = (plain > -0.1) & (plain < -1e-3)
    at_one = float((values[likely] > -1e-7).mean()) if likely.sum() >= 5 else 0.0
    kept = math.exp(-float(np.quantile(sign * differences, 0.995)))
    name = "top-p" if at_one > 0.5 else "top-k"
    clue = f"{at_one:.0%} of its likely tokens have" if name == "top-p" else "few tokens reach"
    share = f"; the smallest share kept is about {kept:.2f}" if name == "top-p" else ""
    mended = tuple(one.with_differences(sign * 2 * np.minimum(sign * one.differences, 0.0)) for one in pairs)
    return Found(
        name,
        f"{side}'s log-probabilities are almost never below {other}'s: they look renormalised over the tokens that "
        f"{name} keeps ({clue} probability 1{share}).",
        f"Compare log-probabilities before the processors (vLLM: logprobs_mode raw_logprobs), or sample without "
        f"{name}; {other} normalises over the whole vocabulary.",
        mended,
        len(differences),
    )


def _lasts_at_unlikely_tokens(pairs: Pairs, sign: float) -> bool:
    """Whether the rise is as large at the least likely tokens as anywhere. Where distributions are flat, most is cut by
    top-p and top-k, while a temperature changes little, and lowers what is unlikely."""
    levels = _levels(pairs)[1] * sign
    return bool(levels[0] >= 0.5 * levels.max())


def _temperature(pairs: Pairs) -> Found | None:
    """The log-odds of likely tokens are those of the other side times a number: one side is sharper.

    Of two tokens, log-odds are divided by the temperature exactly; many unlikely ones move them further from 1.
    """
    ratios = np.concatenate([_odds_ratios(one) for one in pairs]) if pairs else np.zeros(0)
    t = t_statistic(float(_odds_ratios(one).mean()) for one in pairs if len(_odds_ratios(one)))
    if len(ratios) < _LIKELY or not significant(t, len(pairs)):
        return None
    sign = math.copysign(1.0, float(np.median(ratios)))
    if (sign * ratios > 0).mean() < _SAME_SIGN or abs(float(np.median(ratios))) < _SHARPER:
        return None
    sharper = "B" if sign > 0 else "A"
    about = math.exp(-float(np.quantile(sign * ratios, 0.2)))
    curve = _curve(pairs)
    mended = tuple(one.with_differences(one.differences - curve(middle(one))) for one in pairs)
    said = sorted({row.temperature for one in pairs for row in (one.row_a, one.row_b) if row.temperature is not None})
    files = f" The files state temperature {', '.join(f'{t:g}' for t in said)}." if said else ""
    return Found(
        "temperature",
        f"{sharper} is sharper: its likely tokens are likelier and its unlikely ones less likely, as if its logits "
        f"had been divided by about {about:.2g} once more.{files}",
        "Check that both sides divide logits by the temperature exactly once. Likely causes: processed "
        "log-probabilities on one side and raw ones on the other, or a temperature applied in the engine and again "
        "in the trainer.",
        mended,
        len(ratios),
        whole=True,
    )


def _odds_ratios(one: Pair) -> Array:
    """log of (log-odds in B / log-odds in A) of tokens that both sides find likely, though not sure."""
    inside = one.usable & (np.minimum(one.a, one.b) > math.log(0.6)) & (np.maximum(one.a, one.b) < -1e-6)
    odds = [-np.log(np.expm1(-values[inside])) for values in (one.a, one.b)]
    found: Array = np.log(odds[1] / odds[0])
    return found


def _curve(pairs: Pairs) -> Callable[[Array], Array]:
    """Mean difference over log-probability, linear between bins."""
    centres, levels = _levels(pairs)
    return lambda at: np.interp(np.nan_to_num(at), centres, levels)


def _levels(pairs: Pairs) -> tuple[Array, Array]:
    """Log-probability and mean difference in bins of equally many tokens, the least likely first."""
    x, y = joined(pairs, middle), joined(pairs, lambda one: one.differences)
    order = np.argsort(x)
    bins = [part for part in np.array_split(order, _CURVE) if len(part)]
    centres = np.array([x[part].mean() for part in bins])
    return centres, np.array([y[part].mean() for part in bins])


# -- storage


def stored_precision(pairs: Pairs) -> Found | None:
    """All values of one side lie on a coarse grid: bfloat16, or a few decimals."""
    a, b = joined(pairs, lambda one: one.a), joined(pairs, lambda one: one.b)
    if len(a) < _FEWEST:
        return None
    for words, rounded in _GRIDS.items():
        on = [bool((rounded(values) == values).all()) for values in (a, b)]
        if on[0] == on[1]:
            continue
        side = "A" if on[0] else "B"
        fine = tuple(replace(one, a=rounded(one.a), b=rounded(one.b)) for one in pairs)
        coarse = float(np.abs(rounded(b if on[0] else a) - (b if on[0] else a)).mean())
        return Found(
            "stored precision",
            f"All values of {side} are {words}: that rounding changes a value by {coarse:.2g} nats on average.",
            f"Write {side}'s log-probabilities in float32, before casting or printing.",
            fine,
            len(a),
        )
    return None


def to_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)).astype(np.uint32)
    return np.where(np.isfinite(values), rounded.view(np.float32).astype(np.float64), values)


_GRIDS: dict[str, Callable[[Array], Array]] = {
    "bfloat16 numbers": to_bfloat16,
    "rounded to 2 decimals": lambda values: np.round(values, 2),
    "rounded to 3 decimals": lambda values: np.round(values, 3),
    "rounded to 4 decimals": lambda values: np.round(values, 4),
}


BY_POSITION: tuple[Cause, ...] = (first_tokens, position)
OF_SIZES: tuple[Cause, ...] = (processed, stored_precision, *BY_POSITION, training_step)
CAUSES: tuple[Cause, ...] = (missing, different_tokens, *OF_SIZES)
