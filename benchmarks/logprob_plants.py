"""Log-probabilities with a known cause of disagreement, and healthy pairs, made without noisescope.

A world is sequences of tokens with what each of two healthy systems says of them: their own log-probabilities, and
those after temperature, top-p and top-k, from the whole distribution. A plant takes a world and gives the rows of file
A and file B as JSON objects. Plants in `TUNED` were looked at while the causes were written; `HELD_OUT` has other sizes
and other kinds, and was not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = list[dict[str, Any]]
VARIANTS = ("T0.7", "T0.49", "T0.8", "T0.64", "T1.3", "T1.5", "p0.9", "p0.8", "k20", "k50")


@dataclass(frozen=True)
class Sequence:
    """What two healthy systems say of one sequence of sampled tokens; `a` and `b` map "" and VARIANTS to [T]."""

    tokens: list[int]
    a: dict[str, Array]
    b: dict[str, Array]


World = list[Sequence]


def variants(logits: Array, tokens: Array) -> dict[str, Array]:
    """Log-probabilities of tokens [T] by logits [T, V], plain and after each processor."""
    found = {"": _logprob(logits, tokens)}
    ordered = -np.sort(-logits, axis=1)
    for name in VARIANTS:
        kind, size = name[0], float(name[1:])
        if kind == "T":
            found[name] = _logprob(logits / size, tokens)
            continue
        if kind == "k":
            least = ordered[:, int(size) - 1]
        else:
            share = np.exp(ordered - _logsumexp(ordered)[:, None]).cumsum(1)
            last = (share < size).sum(1).clip(max=logits.shape[1] - 1)  # the token that passes the limit stays
            least = ordered[np.arange(len(ordered)), last]
        kept = np.where(logits >= least[:, None], logits, -np.inf)
        found[name] = _logprob(kept, tokens)
    return found


def _logsumexp(z: Array) -> Array:
    top = z.max(1)
    found: Array = top + np.log(np.exp(z - top[:, None]).sum(1))
    return found


def _logprob(logits: Array, tokens: Array) -> Array:
    found: Array = logits[np.arange(len(tokens)), tokens] - _logsumexp(logits)
    return found


def synthetic(seed: int, *, rows: int = 40, tokens: int = 64, noise: float = 0.02, vocabulary: int = 400) -> World:
    """Distributions from nearly sure to flat; the second system's logits differ by `noise`. Tokens are of the nucleus
    of 0.8 and of the 20 likeliest, so that every processor keeps them."""
    draw = np.random.default_rng(seed)
    world = []
    for _ in range(rows):
        length = int(draw.integers(tokens // 2, tokens + 1))
        logits = draw.normal(size=(length, vocabulary)) * draw.uniform(0.8, 6.0, (length, 1))
        picked = np.array([_pick(row, draw) for row in logits])
        other = logits + noise * draw.normal(size=logits.shape)
        world.append(Sequence(picked.tolist(), variants(logits, picked), variants(other, picked)))
    return world


def _pick(logits: Array, draw: np.random.Generator) -> int:
    """A token from the 20 likeliest within the nucleus of 0.8."""
    order = np.argsort(-logits)[:20]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    inside = np.concatenate([[True], p[order].cumsum()[:-1] < 0.8])
    order = order[inside]
    return int(draw.choice(order, p=p[order] / p[order].sum()))


def rows_of(world: World, side: str, variant: str = "") -> Rows:
    return [
        {
            "id": f"s{number}",
            "step": number // 4,
            "token_ids": one.tokens,
            "logprobs": vars(one)[side][variant].tolist(),
        }
        for number, one in enumerate(world)
    ]


Plant = Callable[[World, np.random.Generator], tuple[Rows, Rows]]


def change(edit: Callable[[Array, int, dict[str, Any], np.random.Generator], Any], **left_out: bool) -> Plant:
    """A plant that edits each row's values in B: edit(values, number, row, draw) -> values."""

    def plant(world: World, draw: np.random.Generator) -> tuple[Rows, Rows]:
        a, b = rows_of(world, "a"), rows_of(world, "b")
        for number, row in enumerate(b):
            values = edit(np.array(row["logprobs"]), number, row, draw)
            row["logprobs"] = values if isinstance(values, list) else values.tolist()
            if len(row["token_ids"]) != len(row["logprobs"]):
                del row["token_ids"]
        for side in (a, b):
            for row in side:
                for name in left_out:
                    row.pop(name, None)
        return a, b

    return plant


def processed(mine: str, other: str) -> Plant:
    return lambda world, draw: (rows_of(world, "a", mine), rows_of(world, "b", other))


def shifted(steps: int) -> Plant:
    def edit(values: Array, *_: Any) -> Array:
        moved = np.roll(values, steps)
        moved[:steps] = 0.0 if steps > 0 else moved[:steps]
        return moved if steps > 0 else np.concatenate([values[-steps:], np.zeros(-steps)])

    return change(edit)


def missing(value: float | None, share: float) -> Plant:
    def edit(values: Array, number: int, row: dict[str, Any], draw: np.random.Generator) -> list[float | None]:
        gone = draw.random(len(values)) < share
        return [value if lost else float(kept) for lost, kept in zip(gone, values, strict=True)]

    return change(edit)


def worse(size: Callable[[Array, int], Array]) -> Plant:
    """More noise at some positions or rows: size(positions, row number), in shares of the token's surprise."""

    def edit(values: Array, number: int, row: dict[str, Any], draw: np.random.Generator) -> Array:
        scale = size(np.arange(len(values), dtype=float), number) * np.minimum(1.0, -values)
        return np.minimum(values + scale * draw.normal(size=len(values)), -1e-6)

    return change(edit)


def reordered(*, keys: bool) -> Plant:
    def plant(world: World, draw: np.random.Generator) -> tuple[Rows, Rows]:
        a, b = rows_of(world, "a"), rows_of(world, "b")
        order = draw.permutation(len(b))
        b = [b[at] for at in order]
        if not keys:
            for row in (*a, *b):
                del row["id"], row["token_ids"]
        else:  # the names stay where they were: only the tokens tell
            for number, row in enumerate(b):
                row["id"] = f"s{number}"
        return a, b

    return plant


def duplicated(share: float) -> Plant:
    def plant(world: World, draw: np.random.Generator) -> tuple[Rows, Rows]:
        a, b = rows_of(world, "a"), rows_of(world, "b")
        for at in range(0, len(b) - 1, 2):
            if draw.random() < 2 * share:
                source = b[at + 1]
                b[at] = {**b[at], "logprobs": list(source["logprobs"]), "token_ids": list(source["token_ids"])}
        return a, b

    return plant


def to_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return rounded.view(np.float32).astype(np.float64)


# name -> (cause that must be named, plant)
TUNED: dict[str, tuple[str, Plant]] = {
    "off by one, to the right": ("misaligned", shifted(1)),
    "cut at 24 tokens": ("truncated", change(lambda v, *_: v[:24])),
    "zeros at 5 % of the tokens": ("missing values", missing(0.0, 0.05)),
    "-9999 at 3 % of the tokens": ("missing values", missing(-9999.0, 0.03)),
    "temperature 0.7 on one side": ("temperature", processed("", "T0.7")),
    "temperature 0.7 twice": ("temperature", processed("T0.7", "T0.49")),
    "top-p 0.9 renormalised": ("top-p", processed("", "p0.9")),
    "top-k 20 renormalised": ("top-k", processed("", "k20")),
    "gap grows with position": ("grows with position", worse(lambda t, n: 0.01 * t)),
    "weights drift with the step": ("grows with step", worse(lambda t, n: 0.02 * (n // 4) + 0 * t)),
    "a tenth of the rows duplicated": ("duplicated rows", duplicated(0.1)),
    "rows shuffled": ("reordered rows", reordered(keys=False)),
    "logs to base 10": ("scale", change(lambda v, *_: v / np.log(10))),
    "another context before the first tokens": ("first tokens", worse(lambda t, n: 1.5 * np.exp(-t / 3))),
}
HELD_OUT: dict[str, tuple[str, Plant]] = {
    "off by one, to the left": ("misaligned", shifted(-1)),
    "off by two": ("misaligned", shifted(2)),
    "the last third as zeros": ("truncated", change(lambda v, *_: np.where(np.arange(len(v)) < len(v) * 2 // 3, v, 0))),
    "null at 4 % of the tokens": ("missing values", missing(None, 0.04)),
    "zeros at 1 % of the tokens": ("missing values", missing(0.0, 0.01)),
    "temperature 1.3 on one side": ("temperature", processed("", "T1.3")),
    "temperature 0.8 twice": ("temperature", processed("T0.8", "T0.64")),
    "top-p 0.8 renormalised": ("top-p", processed("", "p0.8")),
    "top-k 50 renormalised": ("top-k", processed("", "k50")),
    "gap jumps at token 20": ("grows with position", worse(lambda t, n: np.where(t >= 20, 0.4, 0.0))),
    "weights synchronised late": ("grows with step", worse(lambda t, n: 0.3 * (n >= 20) + 0 * t)),
    "a quarter of the rows duplicated": ("duplicated rows", duplicated(0.25)),
    "rows shuffled under their names": ("reordered rows", reordered(keys=True)),
    "negative log-probabilities": ("scale", change(lambda v, *_: -v)),
    "stored in bfloat16": ("stored precision", change(lambda v, *_: to_bfloat16(v))),
    "five tokens of the prompt in front": ("misaligned", change(lambda v, n, r, d: np.r_[-d.gamma(1.0, 2.0, 5), v])),
}  # fmt: skip
HEALTHY: dict[str, Plant] = {
    "ids, steps, tokens": processed("", ""),
    "no ids, no steps": change(lambda v, *_: v, id=True, step=True),
    "numbers alone": change(lambda v, *_: v, id=True, step=True, token_ids=True),
    "temperature 0.7 on both": processed("T0.7", "T0.7"),
    "top-p 0.9 on both": processed("p0.9", "p0.9"),
}
