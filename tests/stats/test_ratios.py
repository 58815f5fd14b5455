"""Ratios of means and of losses: against Fieller's roots, by hand, and where they must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.stats import continuous, ratios


def test_pairs_that_carry_the_variance() -> None:
    """n pairs alike carry it all; one far out leaves one degree of freedom."""
    x, y = np.ones((1, 50)), np.tile([0.0, 2.0], 25)[np.newaxis]
    assert float(continuous.heavy_quantile(x, y, 0.95)[0]) == pytest.approx(scipy.stats.t.ppf(0.975, 49))
    y = np.ones((1, 50))
    y[0, 3] = 1e6
    assert float(continuous.heavy_quantile(x, y, 0.95)[0]) == pytest.approx(scipy.stats.t.ppf(0.975, 1), rel=0.02)


def test_one_pair_that_decides_is_no_interval() -> None:
    """Where one sample carries both means there is no interval, and the note says why; v0.1 gave 0.5 to 5."""
    rng = np.random.default_rng(0)
    below = rng.lognormal(0, 0.3, 40)
    above = below * rng.lognormal(0, 0.2, 40)
    plain = stats.ratio(above, below)
    assert plain.bounded and plain.method == "ratio of means" and plain.above(0.8) and plain.below(1.3)
    below[0], above[0] = 2000.0, 5000.0
    carried = stats.ratio(above, below)
    assert carried.value == pytest.approx(above.mean() / below.mean())
    assert (carried.low, carried.high) == (None, None) and carried.note == ratios.FEW_DECIDE


def test_an_unbounded_ratio_may_keep_its_lower_end() -> None:
    """A denominator that can't be told from 0 leaves "at least"."""
    below = np.array([0.0] * 25 + [1.0] * 5)
    above = np.full(30, 3.0) + np.linspace(0, 0.1, 30)
    found = stats.ratio(above, below)
    assert found.high is None and found.low is not None and 1 < found.low < found.value  # type: ignore[operator]
    assert (found.method, found.note) == ("at least", ratios.FEW_DECIDE_ABOVE)


def test_equal_pairs_keep_a_width() -> None:
    """The same factor in all pairs is no certainty; a numerator of zeros has no interval."""
    x = np.linspace(1, 2, 30)
    found = stats.ratio(1.5 * x, x)
    assert found.value == pytest.approx(1.5) and found.low is not None and found.high is not None
    assert found.high - found.low == pytest.approx(2 * scipy.stats.t.ppf(0.975, 29) * 1.5 / 32)
    nothing = stats.ratio(0 * x, x)
    assert (nothing.value, nothing.low, nothing.note) == (0.0, None, ratios.NOTHING_ABOVE)
    with pytest.raises(InvalidInput, match="numerator: 1 of 2 values are below 0"):
        stats.ratio([-1, 2], [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize("n", [16, 100])
def test_false_ratios_are_rare(tau: float, n: int) -> None:
    """Skewed pairs, a constant below: a false statement in at most 7 % of runs (v0.1 made up to 13 %)."""
    rng = np.random.default_rng(n)
    above = rng.lognormal(-(tau**2) / 2, tau, (2000, n))
    low, high = ratios.ratio_of_means_limits(np.ones_like(above), above, 0.95)
    assert np.mean((low > 1) | (high < 1)) <= 0.07
    old = continuous.ratio_limits(np.ones_like(above), above, 0.95)
    assert np.mean((low > 1) | (high < 1)) < np.mean((old[0] > 1) | (old[1] < 1)) + 1e-9


# ---- losses ---------------------------------------------------------------------------------------------------------


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
    assert (found.low, found.high, found.note) == (None, None, ratios.NO_LOSS_BELOW)
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
