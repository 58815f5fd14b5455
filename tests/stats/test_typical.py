"""The mean of values of at least 0: a bound that holds for every tail, an upper end that may be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from numpy.typing import NDArray

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.stats.typical import lower_bound

Array = NDArray[np.float64]


def slow_bound(values: Array, alpha: float) -> float:
    """The mean at which the average product reaches 1 / alpha, by a root finder on plain products."""
    n = len(values)
    bets = [0.75 / 2**k for k in range(math.ceil(math.log2(n)) + 1)]

    def excess(m: float) -> float:
        return sum(math.prod(1 + bet * (x / m - 1) for x in values) for bet in bets) / len(bets) - 1 / alpha

    return float(scipy.optimize.brentq(excess, values.mean() * 1e-6, values.mean(), xtol=1e-14))


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_the_bound_is_where_the_products_reach_the_limit(n: int, alpha: float) -> None:
    """Bisection on logarithms finds the root of the plain definition."""
    values = np.random.default_rng(n).lognormal(0, 1.5, n)
    assert float(lower_bound(values, alpha)) == pytest.approx(slow_bound(values, alpha), rel=1e-6)


@pytest.mark.parametrize("n", [5, 16, 60])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.02])
def test_the_bound_errs_rarely_enough_for_rare_large_values(n: int, p: float) -> None:
    """Values are 1 with probability p, else 0: summed over all sets, the bound passes the mean p in at most 5 %."""
    wrong = 0.0
    for ones in range(n + 1):
        if float(lower_bound(np.array([1.0] * ones + [0.0] * (n - ones)), 0.05)) > p:
            wrong += scipy.stats.binom.pmf(ones, n, p)
    assert wrong <= 0.05


def test_the_bound_does_not_depend_on_order_and_follows_scale() -> None:
    """Any order gives the same bound, and c times the values give c times the bound."""
    values = np.random.default_rng(3).pareto(1.1, 30)
    bound = float(lower_bound(values, 0.05))
    assert float(lower_bound(values[::-1].copy(), 0.05)) == pytest.approx(bound)
    assert float(lower_bound(1e-9 * values, 0.05)) == pytest.approx(1e-9 * bound)
    assert 0 < bound < values.mean()


def test_light_tails_have_both_ends() -> None:
    """Exponential values at n = 100 give an interval that allows for a part twice the mean that no sample showed."""
    values = np.random.default_rng(4).exponential(size=100)
    found = stats.nonnegative_mean(values)
    assert found.bounded and found.method == "mean" and found.note == ""
    assert found.high is not None and found.low is not None
    assert found.high > 2 * values.mean()  # 1 % of the values, 100 times larger, are in no set of 100 out of three
    assert found.low < values.mean()
    assert float(lower_bound(values, 0.025)) == pytest.approx(found.low)


def test_heavy_tails_are_refused_an_upper_end() -> None:
    """One value that makes up most of the mean, or few samples, leave "at least"."""
    values = np.random.default_rng(5).lognormal(0, 1, 50)
    assert stats.nonnegative_mean(values).bounded
    values[7] = 5e3
    found = stats.nonnegative_mean(values)
    assert found.high is None and found.low is not None and found.one_sided
    assert (found.method, found.note) == (
        "at least",
        "a few large values dominate the mean, so only a lower bound can be given",
    )
    assert found.low == pytest.approx(float(lower_bound(values, 0.05)))  # the whole of alpha
    few = stats.nonnegative_mean([0.1, 0.2, 0.15])
    assert few.high is None and few.low is not None and 0 < few.low < 0.15


def test_zeros_and_one_sample() -> None:
    """Zeros alone bound nothing from above; one sample has a small lower bound."""
    zeros = stats.nonnegative_mean([0.0] * 20)
    assert (zeros.value, zeros.low, zeros.high) == (0.0, 0.0, None)
    one = stats.nonnegative_mean([2.0])
    assert one.value == 2.0 and one.low is not None and 0 < one.low < 0.2 and one.high is None
    with pytest.raises(InvalidInput, match="1 of 2 values are below 0"):
        stats.nonnegative_mean([1.0, -0.5])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "refused"), [(50, 0.10), (100, 0.05)])
def test_false_statements_and_refusals(n: int, refused: float) -> None:
    """Lognormal sigma 1 is rarely refused; sigma 3 makes a false statement in at most 7 % of runs."""
    rng = np.random.default_rng(n)
    mild = [stats.nonnegative_mean(values) for values in rng.lognormal(0, 1, (200, n))]
    assert np.mean([found.high is None for found in mild]) <= refused
    truth = math.exp(4.5)
    wild = [stats.nonnegative_mean(values) for values in rng.lognormal(0, 3, (400, n))]
    wrong = [found.above(truth) or found.below(truth) for found in wild]
    assert np.mean(wrong) <= 0.07 + 2 * math.sqrt(0.07 * 0.93 / 400)
