"""Perplexity as a task metric: exp of the mean over samples of the loss per token, in nats. Lower is better.

What noise takes is a share of the inverse perplexity (the geometric mean of the right tokens' probabilities), so that
losses mean the same as with other metrics: 1 - clean / noisy perplexity. Statistics are of the paired differences of
the losses, sample by sample, and their ends go through the same monotone function: an interval that covers the mean
difference covers the share.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from noisescope.diagnosis.context import Answer, Array
from noisescope.stats import Estimate, mean

PERPLEXITY = "perplexity"


def linear_scores(clean: Answer, noisy: Answer) -> tuple[Array, Array]:
    """Scores [samples] and [samples, seeds]: 1 for the clean model, less the rise of the loss in nats under noise.

    A sample whose noisy loss is not finite has failed: it counts as the worst of the others, and as a nat at least.
    """
    before, after = clean.values("nll")[0], noisy.values("nll").T
    known = np.isfinite(before)
    scores = 1 - (after[known] - before[known, None])
    worst = min(0.0, float(np.nanmin(scores, initial=0.0, where=np.isfinite(scores))))
    return np.ones(int(known.sum())), np.nan_to_num(scores, nan=worst, posinf=worst, neginf=worst)


def share_lost(rise: Estimate) -> Estimate:
    """The share of the inverse perplexity that a rise of the loss takes."""
    ends = (None if end is None else -math.expm1(-end) for end in (rise.value, rise.low, rise.high))
    value, low, high = ends
    return replace(rise, value=value, low=low, high=high)


def share_kept(kept: Estimate) -> Estimate:
    """clean / noisy perplexity, from a retention of `linear_scores`."""
    value, low, high = (None if end is None else math.exp(end - 1) for end in (kept.value, kept.low, kept.high))
    return replace(kept, value=value, low=low, high=high)


def of_losses(losses: Array) -> Estimate:
    """The perplexity of samples [samples] or [samples, seeds] of losses; infinite ones have none."""
    known = losses[np.isfinite(losses).reshape(len(losses), -1).all(1)]
    if not len(known):
        return Estimate(None, None, None, 0, note="not measurable")
    found = mean(known, countable=False)
    value, low, high = (None if end is None else _exp(end) for end in (found.value, found.low, found.high))
    return replace(found, value=value, low=low, high=high)


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < 700 else None
