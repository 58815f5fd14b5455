"""How far two healthy systems differ: the round-off band of log-probabilities, and how it judges a measured gap.

Two healthy systems run one model in one dtype and differ in summation order. Each rounds its results to the nearest
number; small differences decide which one, and layer after layer this grows into an unavoidable difference of
log-probabilities. Its size is measured on the model itself (measures/rounded_forwards.py): by `ns.Rounding`, and in
float32 by the same forward in float64. This module does not import torch, so a band
measured on one machine can judge gaps on another.

A gap is the mean over sequences of the mean |difference| per token, in nats: `gap_between`.

The limit is expected * exp(z s). s has two parts: what the mean varies by from one set of tokens to another, and how
well the model of the other system's kernels is known (`KERNEL_SPREAD`), both on a logarithmic scale. A gap below the
band is not a fault: the systems share kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from noisescope import stats
from noisescope.diagnosis.report import RunReport
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate

Array = NDArray[np.float64]
RoundoffVerdict = Literal["identical", "round-off", "more than round-off", "undecided"]

FALSE_ALARM = 0.01  # share of healthy pairs whose gap lies above the band
FEWEST_TOKENS = 32  # below, a mean |difference| says too little to be judged

# Spread (standard deviation of the logarithm) of measured / expected over healthy pairs of kernels, rounded up:
# benchmarks/roundoff_band.py and engine_band.py have the pairs. float32 kernels differ in how they sum, which decides
# their error; in 16 bits the rounding of results hides that.
KERNEL_SPREAD = {"bfloat16": 0.25, "float16": 0.25, "float32": 0.60, "float64": 0.60}
_SURPRISES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)  # edges of -log p, in nats
_FEWEST_IN_BIN = 20


@dataclass(frozen=True)
class SurpriseBin:
    """Tokens whose -log p lies in [low, high): likely tokens change little, unlikely ones a lot."""

    low: float
    high: float | None  # None: no upper end
    expected: float  # mean |difference| in nats
    tokens: int


@dataclass(frozen=True)
class RoundoffBand:
    """The |difference| of log-probabilities, in nats per token, that round-off alone explains.

    `expected` has the interval of the mean; a healthy pair's gap on these tokens lies above `high` with probability
    `false_alarm`, and below `low` as rarely unless the two share kernels. `spread` is that of a sequence's mean
    relative to the mean of all.
    """

    dtype: str
    expected: Estimate
    low: float
    high: float
    false_alarm: float
    spread: float
    sequences: int
    tokens: int
    by_surprise: tuple[SurpriseBin, ...]
    method: Literal["rounding", "float64"] = "rounding"  # how it was measured

    def for_tokens(self, logprobs: Sequence[Array]) -> RoundoffBand:
        """The band of other tokens of the same model, from their log-probabilities, one array per sequence."""
        known = [np.asarray(row, dtype=np.float64)[np.isfinite(row)] for row in logprobs]
        known = [row for row in known if len(row)]
        if not known:
            raise InvalidInput("a round-off band needs log-probabilities of at least one sequence; all are missing")
        edges = np.array([one.low for one in self.by_surprise[1:]])
        levels = np.array([one.expected for one in self.by_surprise])
        means = [float(levels[np.searchsorted(edges, -row, side="right")].mean()) for row in known]
        value = float(np.mean(means))
        ratio = 1.0 if not self.expected.value else value / self.expected.value
        moved = replace(self.expected.times(ratio), value=value)
        return _banded(replace(self, expected=moved, sequences=len(known), tokens=sum(map(len, known))))

    def judge(self, gap: Estimate, *, tokens: int | None = None) -> RoundoffVerdict:
        """Whether round-off explains a gap measured on the tokens of this band."""
        if gap.value is None or (self.tokens if tokens is None else tokens) < FEWEST_TOKENS:
            return "undecided"
        if gap.value == 0:
            return "identical"
        return "round-off" if gap.value <= self.high else "more than round-off"


def band_of(
    logprobs: Sequence[Array],
    differences: Sequence[Array],
    *,
    dtype: str,
    method: Literal["rounding", "float64"] = "rounding",
) -> RoundoffBand:
    """The band from a model's runs: per sequence the clean log-probabilities [T] and, for each seed, how far another
    system's differ [S, T]."""
    sizes = [np.abs(np.asarray(one, dtype=np.float64)) for one in differences]
    if not sizes or not all(size.size and np.isfinite(size).all() for size in sizes):
        raise InvalidInput("a round-off band needs finite differences of at least one token in every sequence")
    means = np.array([size.mean() for size in sizes])
    expected = stats.mean(means, countable=False)
    tokens = np.concatenate([size.mean(0) for size in sizes])
    surprise = -np.concatenate([np.asarray(one, dtype=np.float64) for one in logprobs])
    by_seed = [np.array([size[seed].mean() for size in sizes]) for seed in range(len(sizes[0]))]
    varied = float(np.mean([row.std(ddof=1) for row in by_seed])) if len(sizes) > 1 else 0.0
    spread = varied / expected.value if expected.value else 0.0
    return _banded(
        RoundoffBand(
            dtype,
            expected,
            0.0,
            0.0,
            FALSE_ALARM,
            spread,
            len(sizes),
            len(tokens),
            _by_surprise(surprise, tokens),
            method,
        )
    )


def gap_between(a: Sequence[Array], b: Sequence[Array]) -> Estimate:
    """The mean over sequences of the mean |difference| per token; tokens that either side lacks (NaN) are left out."""
    means = []
    for left, right in zip(a, b, strict=True):
        size = np.abs(np.asarray(left, dtype=np.float64) - np.asarray(right, dtype=np.float64))
        if np.isfinite(size).any():
            means.append(float(size[np.isfinite(size)].mean()))
    if not means:
        return Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE)
    return stats.mean(means, countable=False)


def _banded(band: RoundoffBand) -> RoundoffBand:
    """With its ends put in."""
    kernels = KERNEL_SPREAD.get(band.dtype, max(KERNEL_SPREAD.values()))
    width = math.hypot(kernels, math.sqrt(2 / max(band.sequences, 1)) * band.spread)
    factor = math.exp(float(special.ndtri(1 - band.false_alarm)) * width)
    value = band.expected.value or 0.0
    return replace(band, low=value / factor, high=value * factor)


def _by_surprise(surprise: Array, sizes: Array) -> tuple[SurpriseBin, ...]:
    """Bins with enough tokens each: a thin one joins the one before it."""
    found: list[tuple[float, list[float]]] = []
    for low, high in itertools.pairwise(_SURPRISES):
        inside = list(sizes[(surprise >= low) & (surprise < high)])
        if not found or len(found[-1][1]) >= _FEWEST_IN_BIN:
            found.append((low, inside))
        else:
            found[-1][1].extend(inside)
    if len(found) > 1 and len(found[-1][1]) < _FEWEST_IN_BIN:
        found[-2][1].extend(found.pop()[1])
    ends = [low for low, _ in found[1:]] + [None]
    rows = zip(found, ends, strict=True)
    return tuple(SurpriseBin(low, end, float(np.mean(inside)), len(inside)) for (low, inside), end in rows)


# -- the report of `noisescope robustness --rounding`


@dataclass(frozen=True)
class Digits:
    """Decimal digits that round-off leaves right: of a typical token (median), and what 19 of 20 tokens have."""

    place: str
    typical: float | None  # None: nothing differed
    worst: float | None


@dataclass(frozen=True)
class GreedyForecast:
    """When two healthy systems' greedy texts are expected to differ."""

    median_tokens: Estimate
    per_token: Estimate  # share of tokens at which the likeliest token differs, given the same text so far
    watched: int  # tokens that a text was followed for, at most
    texts: int


@dataclass(frozen=True)
class RoundoffFound:
    band: RoundoffBand
    layers: tuple[Digits, ...]
    logits: Digits
    greedy: GreedyForecast | None


@dataclass(frozen=True, kw_only=True)
class Roundoff(RunReport):
    """What round-off alone does to a model."""

    roundoff: RoundoffFound
    could_not_see: tuple[str, ...]


def digits_of(place: str, relative_errors: Array) -> Digits:
    """From relative errors, one per token and seed."""
    known = np.asarray(relative_errors, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known) or not known.any():
        return Digits(place, None, None)
    typical, worst = np.quantile(known, [0.5, 0.95])
    return Digits(place, *(None if error == 0 else max(0.0, -math.log10(error)) for error in (typical, worst)))


def forecast(flipped: Sequence[NDArray[np.bool_]], *, watched: int) -> GreedyForecast:
    """From flags [S, T] per text: whether the likeliest token differs at each step of one and the same text."""
    whole = [np.asarray(one, dtype=bool) for one in flipped if np.asarray(one).size]
    if not whole:
        raise InvalidInput("no text has a generated token, so greedy texts can't be judged")
    waits = np.array([[_first(row) for row in one] for one in whole])
    happened = np.array([[bool(row.any()) for row in one] for one in whole])
    shares = stats.mean([float(one.mean()) for one in whole], countable=False)
    return GreedyForecast(stats.median_wait(waits, happened), shares, watched, len(whole))


def _first(flags: NDArray[np.bool_]) -> int:
    return int(np.argmax(flags)) + 1 if flags.any() else len(flags)
