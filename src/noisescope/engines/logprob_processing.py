"""From logits to reported log-probabilities, and back: what temperature and truncation an engine's values show.

With z the logits of a row, an engine may report log softmax(z), that of z / T, or that of the kept tokens alone, where
top-k keeps the k likeliest and top-p the smallest set of likeliest tokens that holds a share p. All of it shows in the
values: a temperature scales differences between tokens, a truncation adds -log(kept share) to every token that is left.
Token values may also be misplaced against their rows: shifted by a position, missing, or zero-filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisescope.engines.protocol import Sampling

CLOSE = 2e-3  # nats by which a reported value may be off its formula: engines compute and store it in float32
_SHARE = 1e-4  # relative error of a kept share
_LEAST_TOKENS = 3  # of a row, to tell a temperature
_BASES = (2, 10)  # of logarithms that are not natural


def reported_rows(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [T, V] that an engine with these settings reports; -inf for tokens that it leaves out."""
    if not sampling.processed:
        return logits.double().log_softmax(-1)
    return truncated((logits.double() / sampling.temperature).log_softmax(-1), sampling)


def truncated(rows: Tensor, sampling: Sampling) -> Tensor:
    """Only the likeliest tokens, with probabilities renormalised to 1."""
    order = rows.argsort(-1, descending=True)
    ranked = rows.gather(-1, order)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        left = ranked.masked_fill(~kept, -torch.inf).softmax(-1)  # top-p is a share of what top-k left
        kept &= left.cumsum(-1) - left < sampling.top_p
    return torch.full_like(rows, -torch.inf).scatter(-1, order, ranked.masked_fill(~kept, -torch.inf)).log_softmax(-1)


@dataclass(frozen=True)
class Processing:
    """What was done to logits: `unnormalised` where the values are the logits themselves; `base`: of logarithms that
    are not natural; `off`: nats left unexplained."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    unnormalised: bool = False
    base: int | None = None
    off: float = 0.0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, processed=True)


def find_processing(rows: Tensor, logits: Tensor) -> Processing:
    """The settings that turn logits [T, V] into reported rows [T, V] (NaN: no value; -inf: left out)."""
    rows, logits = rows.double(), logits.double()
    given = rows.isfinite()
    if not bool(given.any()):
        return Processing()
    if _off(rows, logits, Processing()) > CLOSE:
        for base in _BASES:
            if _off(rows * math.log(base), logits, Processing()) <= CLOSE:
                return Processing(base=base)
    total = rows.masked_fill(~given, -torch.inf).logsumexp(-1)
    unnormalised = bool((total > CLOSE).all()) or (bool(given.all()) and bool((total.abs() > 0.1).all()))
    if unnormalised:
        rows = rows - total[:, None]
    temperature = _temperature(rows, logits, given)
    found = [Processing(), Processing(temperature)]
    for one in dict.fromkeys(candidate.temperature for candidate in found):
        whole = (logits / one).log_softmax(-1)
        lifted = _median(rows - whole, given)  # -log of the kept share
        if float(lifted.max()) > CLOSE and not unnormalised:
            found.append(_truncation(whole, lifted, rows, one))
    return replace(_simplest([replace(one, off=_off(rows, logits, one)) for one in found]), unnormalised=unnormalised)


def _simplest(found: list[Processing]) -> Processing:
    """The first candidate that explains the values; else the best, if it explains half of what the first leaves."""
    exact = next((one for one in found if one.off <= CLOSE), None)
    best = min(found, key=lambda one: one.off)
    return exact or (best if best.off < 0.5 * found[0].off else found[0])


def _off(rows: Tensor, logits: Tensor, processing: Processing) -> float:
    """By how much nine of ten given values are off at most; a token left out on one side only is off for certain."""
    expected = reported_rows(logits, processing.sampling)
    given = ~rows.isnan()
    both = given & rows.isfinite() & expected.isfinite()
    alone = int((given & (rows.isfinite() != expected.isfinite())).sum())
    gaps = (rows - expected)[both].abs()
    if not gaps.numel() or alone > 0.02 * int(given.sum()):
        return torch.inf
    rank = max(1, int(0.9 * gaps.numel()))
    return float(gaps.kthvalue(rank).values)


def _temperature(rows: Tensor, logits: Tensor, given: Tensor) -> float:
    """From differences between tokens, which no truncation changes; 1 where too few tokens are given."""
    slopes = []
    for row, z, known in zip(rows, logits, given, strict=True):
        if int(known.sum()) >= _LEAST_TOKENS:
            x, y = z[known] - z[known].mean(), row[known] - row[known].mean()
            slopes.append(float((x * y).sum() / (x * x).sum()))
    if not slopes:
        return 1.0
    slope = float(torch.tensor(slopes).median())
    return 1.0 if abs(slope - 1) < CLOSE or slope <= 0 else 1 / slope


def _truncation(whole: Tensor, lifted: Tensor, rows: Tensor, temperature: float) -> Processing:
    """Numbers of tokens kept that fit every row are top-k; else the share that fits is top-p."""
    ranked = whole.sort(-1, descending=True).values.exp().cumsum(-1)
    share = (-lifted.clamp_min(0)).exp()[:, None]
    fewest = (ranked < share * (1 - _SHARE)).sum(-1) + 1
    most = (ranked <= share * (1 + _SHARE)).sum(-1)
    if bool((rows == -torch.inf).any()):  # the engine says which tokens it left out
        fewest = most = rows.isfinite().sum(-1)
    if int(fewest.max()) <= int(most.min()):
        return Processing(temperature, top_k=int(fewest.max()))
    before = torch.where(fewest > 1, ranked.gather(-1, (fewest - 2).clamp_min(0)[:, None])[:, 0], 0.0)
    return Processing(temperature, top_p=round(float(before.max() + share.min()) / 2, 3))


def _median(values: Tensor, given: Tensor) -> Tensor:
    """Of each row's given values; 0 where a row has none."""
    found: Tensor = values.masked_fill(~given, torch.nan).nanmedian(-1).values.nan_to_num(0.0)
    return found


_SHIFTS = (0, 1, -1, 2, -2)
_CLEARLY = 0.5  # a shift must make the median gap at least so many times smaller
LEAST = 1e-3  # nats: smaller gaps are no misalignment


@dataclass(frozen=True)
class TokenValues:
    """How an engine's token values differ from its own distributions: value t belongs to row t - shift."""

    shift: int = 0
    missing: int = 0  # NaN, or exactly 0 where the distribution says otherwise
    zeros: bool = False  # whether the missing ones were given as 0


def find_misplaced(values: Tensor, expected: Tensor) -> TokenValues:
    """`expected` [T - 1] are the values that the engine's own distributions give the tokens."""
    values, expected = values.double(), expected.double()
    zeros = (values == 0) & (expected < -LEAST)
    missing = values.isnan() | zeros
    gaps = {shift: _gap(values, expected, missing, shift) for shift in _SHIFTS}
    best = min(gaps, key=lambda shift: gaps[shift])
    shift = best if gaps[0] > LEAST and gaps[best] < _CLEARLY * gaps[0] else 0
    return TokenValues(shift, int(missing.sum()), bool(zeros.any()))


def _gap(values: Tensor, expected: Tensor, missing: Tensor, shift: int) -> float:
    moved = torch.roll(expected, shift)
    inside = ~missing & moved.isfinite() & values.isfinite()
    edge = abs(shift)
    inside[: edge if shift > 0 else 0] = False
    inside[len(inside) - (edge if shift < 0 else 0) :] = False
    return float((values - moved)[inside].abs().mean()) if bool(inside.any()) else torch.inf


def mend_tokens(values: Tensor, found: TokenValues) -> Tensor:
    """The values moved to their correct positions; NaN where there is none."""
    mended = torch.where((values == 0) & found.zeros, torch.nan, values.double()).roll(-found.shift)
    if found.shift > 0:
        mended[-found.shift :] = torch.nan
    mended[: max(0, -found.shift)] = torch.nan
    return mended
