"""Ratios of losses: against Fieller's roots, by hand, and where they must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from noisescope import stats
from noisescope.stats import score_estimates


def losses(n: int, above: float, below: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    clean, shared = rng.normal(5, 1, n), rng.normal(0, 0.5, n)
    first = clean - above - shared - rng.normal(0, 0.5, n)
    return clean, first, clean - below - shared - rng.normal(0, 0.5, n)


def test_a_ratio_of_losses_holds_fiellers_roots() -> None:
    """For nearly symmetric losses the interval is that of Fieller's quadratic, and hardly more."""
    clean, a, b = losses(300, 1.0, 0.6, 1)
    x, y, n = clean - b, clean - a, 300
    t, cov = scipy.stats.t.ppf(0.975, n - 1), np.cov(clean - b, clean - a) / n
    p, q, r = (
        x.mean() ** 2 - t**2 * cov[0, 0],
        x.mean() * y.mean() - t**2 * cov[0, 1],
        y.mean() ** 2 - t**2 * cov[1, 1],
    )
    root = math.sqrt(q * q - p * r)
    found = stats.degradation_ratio(clean, a, b)
    assert found.low is not None and found.high is not None
    assert found.value == pytest.approx(y.mean() / x.mean())
    assert found.low <= (q - root) / p + 1e-9 and found.high >= (q + root) / p - 1e-9
    assert found.high - found.low < 1.1 * 2 * root / p


def test_no_ratio_to_a_loss_that_may_be_nothing() -> None:
    """Beside a window that loses nothing there is no ratio, but the excess is clear."""
    clean = np.ones(60)
    noisy, beside = np.tile([0.0, 1.0], 30), np.ones((60, 2))
    beside[0, 0] = 0
    found = stats.degradation_ratio(clean, noisy, beside)
    assert (found.low, found.high, found.note) == (None, None, score_estimates.NO_LOSS_BELOW)
    excess = stats.degradation_excess(clean, noisy, beside, factor=1.5)
    assert excess.value == pytest.approx(0.5 - 1.5 / 120) and excess.above(0.3)
    same = stats.degradation_excess(clean, noisy, noisy)
    assert same.value == 0 and not same.above(0) and not same.below(0)


def test_excess_and_ratio_decide_alike() -> None:
    """The ratio lies above the factor exactly where the excess lies above 0."""
    decided = 0
    for seed in range(30):
        clean, a, b = losses(40, 1.2, 0.6, seed)
        ratio, excess = stats.degradation_ratio(clean, a, b), stats.degradation_excess(clean, a, b, factor=1.5)
        assert ratio.above(1.5) == excess.above(0)
        decided += ratio.above(1.5)
    assert 3 < decided < 28
