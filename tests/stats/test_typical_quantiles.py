"""Medians and typical ratios against binomial sums and exact enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.stats.typical import rank_limits


def at_most(k: int, n: int, p: float) -> float:
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@pytest.mark.parametrize("n", [1, 5, 6, 7, 8, 16, 37, 100, 301])
@pytest.mark.parametrize("level", [0.95, 0.5, 0.998])
def test_ranks_are_the_sharpest_that_binomial_sums_allow(n: int, level: float) -> None:
    """Each end errs with at most half of alpha, and the next rank inwards would err with more."""
    low, high = rank_limits(n, level) or (0, n + 1)
    tail = (1 - level) / 2
    assert low == 0 or at_most(low - 1, n, 0.5) <= tail + 1e-12
    assert at_most(low, n, 0.5) > tail - 1e-12  # the next rank errs too often
    assert high == n + 1 or 1 - at_most(high - 1, n, 0.5) <= tail + 1e-12
    assert 1 - at_most(high - 2, n, 0.5) > tail - 1e-12


def test_median_by_hand() -> None:
    """At n = 16 the ends are the 4th and the 13th value, which enclose the median in 97.9 % of sets."""
    values = np.random.default_rng(0).permutation(16) + 1.0
    found = stats.median(values)
    assert (found.value, found.low, found.high, found.n, found.method) == (8.5, 4, 13, 16, "median")
    assert 1 - 2 * at_most(3, 16, 0.5) == pytest.approx(0.9787, abs=1e-4)
    assert found.bounded and not found.one_sided
    assert found.above(3) and not found.above(4) and found.below(14) and not found.below(13)


def test_ties_are_covered_too() -> None:
    """Of values that are 0 with probability 0.52 the median is 0: the exact chance to leave it out is below 5 %."""
    n, p = 20, 0.52
    wrong = 0.0
    for zeros in range(n + 1):
        found = stats.median([0.0] * zeros + [1.0] * (n - zeros))
        assert found.low is not None and found.high is not None
        if not found.low <= 0.0 <= found.high:
            wrong += math.comb(n, zeros) * p**zeros * (1 - p) ** (n - zeros)
    assert 0.001 < wrong < 0.025


def test_an_end_that_n_does_not_allow_is_missing() -> None:
    """Five samples have no interval at 95 %, seven none at 99 %; the note says how many it takes."""
    five = stats.median([1, 2, 3, 4, 5])
    assert (five.value, five.low, five.high, five.method) == (3, None, None, "")
    assert five.note == "an interval at 95 % needs 6 samples"
    assert stats.median(range(6)).bounded
    assert stats.median(range(7), level=0.99).note == "an interval at 99 % needs 8 samples"
    assert stats.median(range(8), level=0.99).bounded


def test_seeds_are_averaged_first() -> None:
    """Three seeds of eight samples are eight values."""
    values = np.arange(24.0).reshape(8, 3)
    assert stats.median(values) == stats.median(values.mean(axis=1))
    assert stats.median(values).n == 8


def test_no_tail_moves_the_median() -> None:
    """Making the largest values a million times larger changes neither the median nor its interval."""
    values = np.random.default_rng(1).lognormal(0, 3, 50)
    wild = np.where(values > np.quantile(values, 0.8), 1e6 * values, values)
    assert stats.median(values) == stats.median(wild)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("n", [16, 100])
def test_simulated_coverage(sigma: float, n: int) -> None:
    """The median of lognormal values is covered as the binomial sum says."""
    runs = np.random.default_rng(n).lognormal(0, sigma, (3000, n))
    found = [stats.median(values) for values in runs]
    covered = np.mean([f.low is not None and f.high is not None and f.low <= 1 <= f.high for f in found])
    assert 0.95 <= covered <= 0.99


# ---- ratios of samples ----------------------------------------------------------------------------------------------


def test_typical_ratio_is_the_median_of_the_ratios() -> None:
    """Value and ends are those of the per-sample ratios, whatever the sizes of the samples."""
    rng = np.random.default_rng(2)
    below = rng.lognormal(0, 3, 40)
    factors = rng.lognormal(0.5, 1, 40)
    found, direct = stats.typical_ratio(below * factors, below), stats.median(factors)
    assert (found.value, found.low, found.high) == pytest.approx((direct.value, direct.low, direct.high))
    assert (found.n, found.method) == (40, "median ratio")


def test_zeros_in_a_ratio() -> None:
    """0 / 0 is left out and counted; x / 0 is larger than every number and can be an end that is not known."""
    above, below = np.arange(1.0, 13), np.ones(12)
    below[:3] = 0
    found = stats.typical_ratio([*above, 0.0], [*below, 0.0])
    assert found.n == 12 and found.note == "1 of 13 samples excluded: 0 on both sides"
    assert (found.value, found.low, found.high) == (9.5, 6, None)
    mostly = stats.typical_ratio(np.ones(12), [0.0] * 8 + [1.0] * 4)
    assert mostly.value is None and mostly.low == 1 and stats.UNBOUNDED in mostly.note
    nothing = stats.typical_ratio([0.0] * 4, [0.0] * 4)
    assert (nothing.value, nothing.n, nothing.note) == (None, 0, stats.NOT_MEASURABLE)


def test_mistakes_are_named() -> None:
    """Negative divergences are refused in plain words."""
    with pytest.raises(InvalidInput, match=r"below: 1 of 2 values are below 0 \(the lowest is -1\)"):
        stats.typical_ratio([1, 2], [-1, 2])
