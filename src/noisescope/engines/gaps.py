"""How far apart two next-token distributions are, prompt by prompt, and what a correction removes, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.estimate import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats import mean, nonnegative_mean


@dataclass(frozen=True)
class Gap:
    """Means over the tokens of each prompt: KL(b || a) in nats, and |difference| of the tokens' log-probabilities.

    NaN: not given; infinite: a has as impossible what b has not.
    """

    nats: tuple[float, ...]
    token: tuple[float, ...]

    @property
    def total(self) -> Estimate:
        return _estimated(self.nats, nonnegative=True)

    @property
    def total_token(self) -> Estimate:
        return _estimated(self.token, nonnegative=True)


def removed(before: Gap, after: Gap) -> tuple[Estimate, Estimate]:
    """What the correction removed: of the divergence, and of the tokens' |difference|."""
    return (
        _estimated([x - y for x, y in zip(before.nats, after.nats, strict=True)]),
        _estimated([x - y for x, y in zip(before.token, after.token, strict=True)]),
    )


def gap_of(prompts: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Gap:
    """From (rows of a, rows of b, token values of a, token values of b) of each prompt, rows being corresponding."""
    found = [(divergence(rows_a, rows_b), _token_gap(a, b)) for rows_a, rows_b, a, b in prompts]
    return Gap(tuple(nats for nats, _ in found), tuple(token for _, token in found))


def divergence(a: Tensor, b: Tensor) -> float:
    """The mean of KL(b || a) over rows of log-probabilities."""
    a, b = a.double(), b.double()
    terms = torch.where(b == -torch.inf, 0.0, b.exp() * (b - a))  # 0 log 0 is 0
    return max(float(terms.sum(-1).mean()), 0.0) if not bool(terms.isnan().any()) else math.nan


def _token_gap(a: Tensor, b: Tensor) -> float:
    """NaN where no token has a value on both sides."""
    gaps = (a.double() - b.double()).abs()
    known = gaps[~gaps.isnan()]
    return float(known.mean()) if known.numel() else math.nan


def _estimated(values: Sequence[float], *, nonnegative: bool = False) -> Estimate:
    if any(math.isnan(value) for value in values):
        return Estimate(None, None, None, len(values), note=NOT_MEASURABLE)
    if any(math.isinf(value) for value in values):
        return Estimate(None, None, None, len(values), note=UNBOUNDED)
    return nonnegative_mean(values) if nonnegative and any(values) else mean(values, countable=False)
