"""Differences of trimmed means: right size under heavy tails, sharper than plain means, honest where nothing varies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from scipy import stats as reference

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.stats import trimmed_shift


def test_agrees_with_yuens_test():
    """The interval leaves 0 out exactly where scipy's trimmed t test finds a difference."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_t(3, 40), draw.standard_t(3, 55) * 2 + 0.5
    expected = reference.ttest_ind(y, x, equal_var=False, trim=0.2)
    shift = trimmed_shift(x, y, paired=False)
    assert shift.value / shift.error == pytest.approx(expected.statistic)
    assert shift.freedom == pytest.approx(expected.df)
    barely = shift.estimate(1 - expected.pvalue)
    assert min(abs(barely.low), abs(barely.high)) < 1e-6 and shift.n == 40


def test_covers_under_heavy_skewed_tails():
    """Mixtures with a few values far out: 95 % of 500 intervals hold no difference, give or take."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(500):
        x, y = (draw.normal(0, 0.2, 50) + draw.exponential(1.5, 50) * (draw.random(50) < 0.05) for _ in range(2))
        found = trimmed_shift(x, y, paired=False).estimate()
        held += found.low <= 0 <= found.high
    assert 460 <= held <= 490


def test_pairs_are_sharper():
    """What differs between samples drops out; one value far out changes little."""
    draw = np.random.default_rng(2)
    x = draw.normal(0, 2, 50)
    y = x + 0.3 + draw.normal(0, 0.05, 50)
    y[0] += 100
    paired, apart = (trimmed_shift(x, y, paired=choice) for choice in (True, False))
    assert paired.value == pytest.approx(0.3, abs=0.03) and paired.error < apart.error / 10
    assert paired.smallest_detectable() < 0.1 < apart.smallest_detectable()


def test_nothing_that_varies():
    """Pairs that are all alike keep a width; constant sets, or single values, have no interval."""
    x = np.linspace(0, 1, 20)
    alike = trimmed_shift(x, x, paired=True).estimate()
    assert alike.value == 0 and alike.low < 0 < alike.high
    for sizes, paired in (((5, 6), False), ((1, 1), True)):
        a, b = (np.ones(size) for size in sizes)
        lone = trimmed_shift(a, b, paired=paired)
        assert lone.estimate().low is None and lone.smallest_detectable() is None


# ---- typical values -------------------------------------------------------------------------------------------------


def test_typical_is_yuens_interval_of_the_logs() -> None:
    """Value and ends are scipy's trimmed mean and its interval, of the logarithms."""
    values = np.random.default_rng(7).lognormal(-5, 2, 50)
    found = stats.typical(values)
    theirs = scipy.stats.mstats.trimmed_mean_ci(np.log(values), limits=(0.2, 0.2), alpha=0.05)
    assert found.value == pytest.approx(math.exp(scipy.stats.trim_mean(np.log(values), 0.2)))
    # scipy divides the winsorised deviation by kept sqrt(n) where Yuen has sqrt(kept (kept - 1) / (n - 1))
    centre = math.log(found.value)  # type: ignore[arg-type]
    assert found.low is not None and found.high is not None
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((theirs[0], theirs[1]), abs=0.03 * abs(centre))
    assert found.method == "typical" and found.n == 50


def test_typical_value_by_hand() -> None:
    """Ten values, two cut at either end: the geometric mean of six, t of five degrees of freedom, 1 + 2 / 10."""
    logs = np.array([-9.0, -2, -1, -1, 0, 0, 1, 1, 3, 50])
    found = stats.typical(np.exp(logs))
    winsorised = np.array([-1.0, -1, -1, -1, 0, 0, 1, 1, 1, 1])
    error = math.sqrt(9 * winsorised.var(ddof=1) / (6 * 5))
    half = 1.2 * scipy.stats.t.ppf(0.975, 5) * error
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((math.exp(-half), math.exp(half)))


def test_zeros_are_trimmed_or_leave_the_median() -> None:
    """A fifth of zeros changes nothing but the trimmed end; more leave the median, and the note says so."""
    values = np.arange(1.0, 21)
    some = stats.typical(np.where(values <= 4, 0.0, values))
    assert (some.value, some.low) == pytest.approx((stats.typical(values).value, stats.typical(values).low))
    many = stats.typical(np.where(values <= 5, 0.0, values))
    median = stats.median(np.where(values <= 5, 0.0, values))
    assert (many.value, many.low, many.high, many.method) == (median.value, median.low, median.high, "median")
    assert "exactly 0" in many.note
    assert stats.typical([0.0] * 9).value == 0


def test_typical_of_few_or_equal_values() -> None:
    """One value and equal values have no interval; a tail has no influence."""
    assert stats.typical([3.0]).value == pytest.approx(3) and stats.typical([3.0]).low is None
    assert stats.typical([3.0] * 20).low is None
    values = np.random.default_rng(8).lognormal(0, 1, 30)
    wild = np.where(values == values.max(), 1e12, values)
    found, other = stats.typical(values), stats.typical(wild)
    assert (found.value, found.low, found.high) == pytest.approx((other.value, other.low, other.high))
    with pytest.raises(InvalidInput, match="below 0"):
        stats.typical([1.0, -1.0])


def test_few_values_of_two_groups_are_covered() -> None:
    """Sixteen logarithms, three in ten of them far higher: plain Yuen intervals hold the truth in 90.6 % of runs."""
    draw = np.random.default_rng(3)

    def logs(*shape: int) -> np.ndarray:
        return draw.normal(size=shape) + 4 * (draw.random(shape) < 0.3)

    truth = math.exp(scipy.stats.trim_mean(logs(1_000_000), 0.2))
    found = [stats.typical(values) for values in np.exp(logs(4000, 16))]
    assert 0.92 <= np.mean([f.low <= truth <= f.high for f in found]) <= 0.97  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("n", [16, 50, 300])
@pytest.mark.parametrize("alpha", [1.1, 2.5])
def test_typical_values_of_pareto_tails_are_covered(n: int, alpha: float) -> None:
    """93 to 99 % where the mean is covered in half of the runs; truth by numeric integration of the quantiles."""
    shares = (np.arange(200_000) + 0.5) / 200_000 * 0.6 + 0.2
    truth = math.exp(float(np.mean(-np.log1p(-shares) / alpha)))
    runs = 1 + np.random.default_rng(n).pareto(alpha, (3000, n))
    found = [stats.typical(values) for values in runs]
    covered = np.mean([f.low is not None and f.high is not None and f.low <= truth <= f.high for f in found])
    assert 0.93 <= covered <= 0.99
