"""Causes that depend on where in a sequence, or when in training, the differences are larger.

An unlikely token changes more under any error, so sizes are compared at equal likelihood (`relative_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from noisescope import stats
from noisescope.comparison.logprob_files import Array
from noisescope.comparison.logprob_pairs import ONE_TEST, Found, Pair, Pairs, relative_sizes, significant, t_statistic

_MOST = 2000  # sequences whose ranks are permuted
RATIO = 1.5  # how many times larger a gap must be at some positions, or later steps, to be a cause


def first_tokens(pairs: Pairs) -> Found | None:
    """The gap is larger at the first tokens than later: what precedes them differs."""
    sizes = relative_sizes(pairs)
    contrasts = [_mean(size[:4]) - _mean(size[8:]) for size in sizes]
    early, late = _mean_of(size[:4] for size in sizes), _mean_of(size[8:] for size in sizes)
    if not significant(t_statistic(contrasts), len(pairs)) or early < 2 * RATIO * late:
        return None
    by_position = _by_position(sizes)
    ends = next((at for at, level in enumerate(by_position) if level < RATIO * late), len(by_position))
    return Found(
        "first tokens",
        f"At equal likelihood, the first 4 tokens differ {early / max(late, 1e-12):.1f} times as much as those after "
        "the 8th.",
        "Compare what precedes the first scored token: system prompt, chat template, beginning-of-text token, "
        "truncated prompt.",
        _levelled(pairs, np.where(np.arange(len(by_position)) < ends, by_position / max(late, 1e-12), 1.0)),
        sum(min(ends, len(one.a)) for one in pairs),
    )


def position(pairs: Pairs) -> Found | None:
    """The gap grows along the sequence, or jumps at a position."""
    sizes = relative_sizes(pairs)
    longest = max((len(size) for size in sizes), default=0)
    if longest < 16:
        return None
    split = longest // 2
    contrasts = [_mean(size[split:]) - _mean(size[: min(split, len(size))]) for size in sizes]
    by_position = _by_position(sizes)
    quarter = max(longest // 4, 4)
    early, late = _mean(by_position[:quarter]), _mean(by_position[-quarter:])
    if not significant(t_statistic(contrasts), len(pairs)) or late < RATIO * early:
        return None
    at = _jump(by_position)
    how = f"they jump at token {at}" if at is not None else "they grow steadily"
    relative = np.array([_mean(by_position[max(0, t - 4) : t + 5]) for t in range(longest)]) / max(early, 1e-12)
    return Found(
        "grows with position",
        f"At equal likelihood, differences in the last quarter are {_times(late, early)} those in the first; {how}.",
        "Check what depends on position: a quantised or stale KV cache, rotary base or scaling, a sliding window, "
        "chunked prefill, a context-length limit.",
        _levelled(pairs, np.maximum(relative, 1.0)),
        sum(len(one.a) for one in pairs),
    )


def _jump(by_position: Array) -> int | None:
    """Where two levels explain the curve much better than a line does."""
    known = np.nan_to_num(by_position, nan=float(np.nanmean(by_position)))
    t = np.arange(len(known), dtype=np.float64)
    line = float(((known - np.polyval(np.polyfit(t, known, 1), t)) ** 2).sum())
    costs = {
        at: float(((known[:at] - known[:at].mean()) ** 2).sum() + ((known[at:] - known[at:].mean()) ** 2).sum())
        for at in range(4, len(known) - 3)
    }
    best = min(costs, key=lambda at: costs[at], default=None)
    return best if best is not None and costs[best] < 0.6 * line else None


def training_step(pairs: Pairs) -> Found | None:
    """The gap grows from step to step: one side's weights fall behind."""
    known = [(one.step, _mean(size)) for one, size in zip(pairs, relative_sizes(pairs), strict=True)]
    steps = np.array([step for step, _ in known if step is not None])
    sizes = np.array([size for step, size in known if step is not None])
    if len(set(steps)) < 3 or len(steps) < 6 or not np.ptp(sizes) > 0:
        return None
    found = stats.correlation(steps, sizes, every=max(1, len(steps) // _MOST), permutations=1999)
    order = np.argsort(steps, kind="stable")
    third = max(len(order) // 3, 1)
    early, late = _mean(sizes[order[:third]]), _mean(sizes[order[-third:]])
    if found.value is None or found.p is None or not (found.value > 0 and found.p < ONE_TEST and late >= RATIO * early):
        return None
    levels = {step: max(_mean(sizes[steps == step]) / max(early, 1e-12), 1.0) for step in set(steps)}
    mended = tuple(
        one if one.step is None else one.with_differences(one.differences / levels[one.step]) for one in pairs
    )
    return Found(
        "grows with step",
        f"At equal likelihood, differences at the last steps are {_times(late, early)} those at the first "
        f"(steps {steps.min():g} to {steps.max():g}, rank correlation {found.value:.2f}).",
        "Check that weights reach the rollout engine after each update: the version it reports, a prefix cache that "
        "survives an update, asynchronous rollouts, a layer or adapter that is not sent.",
        mended,
        int(sum(one.usable.sum() for one in pairs)),
    )


def _times(late: float, early: float) -> str:
    return f"{late / early:.1f} times" if early > 1e-3 * late else "more than 1000 times"


def _levelled(pairs: Pairs, factors: Array) -> tuple[Pair, ...]:
    """Differences divided by the factor of their position."""
    return tuple(
        one.with_differences(one.differences / factors[np.minimum(np.arange(len(one.a)), len(factors) - 1)])
        for one in pairs
    )


def _by_position(sizes: Sequence[Array]) -> Array:
    """Mean over sequences at each position; where few sequences reach, that of the positions before."""
    longest = max(len(size) for size in sizes)
    table = np.full((len(sizes), longest), np.nan)
    for row, size in enumerate(sizes):
        table[row, : len(size)] = size
    counts = np.isfinite(table).sum(0)
    sums = np.nansum(table, axis=0)
    found = np.divide(sums, counts, out=np.full(longest, np.nan), where=counts > 0)
    last = 1.0
    for at in range(longest):
        last = float(found[at]) if np.isfinite(found[at]) else last
        found[at] = last
    return np.asarray(found, dtype=np.float64)


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _mean_of(parts: Iterable[Array]) -> float:
    return _mean(np.concatenate(list(parts)))
