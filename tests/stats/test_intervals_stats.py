"""Intervals against their nominal coverage, slow references and published formulas."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.stats import continuous, counted

Array = NDArray[np.float64]


def flips(
    n: int, *, accuracy: float, loss: float, gain: float = 0.0, seeds: int = 3, runs: int = 1, seed: int = 0
) -> tuple[Array, Array]:
    """Simulated 0/1 pairs (runs, n) and (runs, n, seeds): each sample has its own probability of change, from Beta."""
    rng = np.random.default_rng(seed)
    clean = rng.random((runs, n)) < accuracy
    chance = np.zeros((runs, n))
    for side, mean in ((clean, loss), (~clean, gain)):
        if mean:
            chance[side] = rng.beta(2 * mean, 2 * (1 - mean), int(side.sum()))
    changed = rng.random((runs, n, seeds)) < chance[..., np.newaxis]
    return clean.astype(float), (clean[..., np.newaxis] ^ changed).astype(float)


def coverage(limits: tuple[Array, Array], truth: float) -> float:
    low, high = limits
    return float(np.mean((low <= truth) & (truth <= high)))


# ---- coverage -------------------------------------------------------------------------------------------------------

RUNS = 6000  # a simulated coverage of 95 % then has a standard error of 0.28 points
COUNTS = [  # clean accuracy, degradation, gains as a share of the degradation, seeds
    (accuracy, lost, gained, seeds)
    for accuracy in (0.75, 0.97)
    for lost in (0.005, 0.05, 0.20)
    for gained in (0.0, 0.3)
    for seeds in (1, 3)
    if gained * lost * accuracy / (1 - accuracy) < 1
]


@pytest.mark.slow
@pytest.mark.parametrize(("accuracy", "lost", "gained", "seeds"), COUNTS)
def test_coverage_of_counts(accuracy: float, lost: float, gained: float, seeds: int) -> None:
    """Difference, retention and accuracy of 0/1 scores hold the truth in 93 to 97 % of runs, rare changes in more."""
    gain = gained * lost * accuracy / (1 - accuracy)
    clean, noisy = flips(
        100, accuracy=accuracy, loss=lost * (1 + gained), gain=gain, seeds=seeds, runs=RUNS, seed=11 + seeds
    )
    noisy = noisy.mean(axis=2)
    table = counted.Table.of(clean, noisy)
    difference = coverage(counted.difference_limits(table, 0.95), accuracy * lost)
    kept = coverage(counted.ratio_limits(table, 0.95), 1 - lost)
    mean = coverage(counted.proportion_limits(noisy, 0.95), accuracy * (1 - lost))
    assert 0.93 <= mean <= 0.98  # Wilson's interval itself has 97.5 % at p = 0.965 and n = 100
    # Whole counts are coarser with one seed; a change in fewer than one sample can only be covered too often.
    most = 1.0 if lost < 0.01 else 0.975 if seeds == 1 else 0.97
    assert 0.93 <= difference <= most
    assert 0.93 <= kept <= most


CONTINUOUS = {
    "normal": (lambda rng, shape: rng.normal(0.1, 0.5, shape), 0.1),
    "heavy tails": (lambda rng, shape: rng.standard_t(3, shape), 0.0),
    "lognormal 0.5": (lambda rng, shape: rng.lognormal(0, 0.5, shape), math.exp(0.125)),
    "lognormal 1": (lambda rng, shape: rng.lognormal(0, 1, shape), math.exp(0.5)),
    "paired, seeds averaged": (
        lambda rng, shape: rng.normal(0.2, 0.3, shape) + rng.normal(0, 1, (*shape, 3)).mean(axis=-1),
        0.2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTINUOUS)
def test_coverage_of_continuous_means(case: str) -> None:
    """Means of symmetric, heavy-tailed and skewed scores are covered in 93 to 97 % of runs."""
    draw, truth = CONTINUOUS[case]
    values = draw(np.random.default_rng(5), (RUNS, 100))
    assert 0.93 <= coverage(continuous.mean_limits(values, 0.95), truth) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_coverage_of_ratios(sigma: float, spread: float) -> None:
    """The ratio of two skewed means is covered in 93 to 97 % of runs, also where only one of the two varies."""
    rng = np.random.default_rng(8)
    below = rng.lognormal(0, sigma, (RUNS, 100)) if spread else np.ones((RUNS, 100))
    above = 1.3 * below * rng.lognormal(-((spread or sigma) ** 2) / 2, spread or sigma, below.shape)
    assert 0.93 <= coverage(continuous.ratio_limits(below, above, 0.95), 1.3) <= 0.97


def test_the_public_functions_are_what_was_simulated() -> None:
    """One run through the public functions has the ends that the simulation checks."""
    clean, noisy = flips(100, accuracy=0.75, loss=0.1, gain=0.1)
    table = counted.Table.of(clean, noisy.mean(axis=2))
    for public, inner in (
        (stats.difference(clean[0], noisy[0]), counted.difference_limits(table, 0.95)),
        (stats.retention(clean[0], noisy[0]), counted.ratio_limits(table, 0.95)),
        (stats.mean(noisy[0]), counted.proportion_limits(noisy.mean(axis=2), 0.95)),
    ):
        assert (public.low, public.high) == pytest.approx((inner[0][0], inner[1][0]))
        assert public.n == 100
    values = np.random.default_rng(0).lognormal(size=(2, 40))
    mean, inner = stats.mean(values[0]), continuous.mean_limits(values, 0.95)
    assert (mean.low, mean.high) == pytest.approx((inner[0][0], inner[1][0]))


# ---- slow references ------------------------------------------------------------------------------------------------


def constrained_variance(cells: Array, weights: tuple[float, float], shift: float) -> float:
    """Variance of w1 y - w0 x - shift at the likeliest table (both, lost, gained, neither) with that mean 0."""
    x, y = np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
    scores = weights[1] * y - weights[0] * x - shift

    def surprise(p: Array) -> float:
        return float(-np.sum(cells * np.log(np.maximum(p, 1e-12))))

    constraints = [
        {"type": "eq", "fun": lambda p: p.sum() - 1},
        {"type": "eq", "fun": lambda p: float(p @ scores)},
    ]
    found = scipy.optimize.minimize(
        surprise, np.full(4, 0.25), bounds=[(1e-9, 1)] * 4, constraints=constraints, options={"ftol": 1e-13}
    )
    assert found.success
    return float(found.x @ scores**2)


@pytest.mark.parametrize("cells", [(20, 12, 2, 16), (60, 9, 3, 28), (40, 5, 7, 8)])
@pytest.mark.parametrize("point", [-0.15, 0.02, 0.1, 0.3])
def test_score_statistics_match_a_numeric_likelihood(cells: tuple[int, ...], point: float) -> None:
    """Closed forms of the difference and the ratio agree with the likeliest table found by an optimiser."""
    x, y = np.repeat([1.0, 1, 0, 0], cells), np.repeat([1.0, 0, 1, 0], cells)
    table = counted.Table.of(x, y)
    shares = np.array(cells) / sum(cells)
    by_hand = (x - y).mean() - point
    variance = constrained_variance(shares, (1.0, 1.0), -point)
    assert float(counted.difference_statistic(table)(point)) == pytest.approx(
        by_hand / math.sqrt(variance / table.effective_n()), rel=1e-3
    )
    theta = 1 - point
    variance = constrained_variance(shares, (theta, 1.0), 0.0)
    assert float(counted.ratio_statistic(table)(theta)) == pytest.approx(
        (y.mean() - theta * x.mean()) / math.sqrt(variance / table.effective_n(theta)), rel=1e-3
    )


def test_single_seed_proportion_is_wilson() -> None:
    """With one seed the interval of an accuracy is Wilson's, up to the n - 1 in the variance."""
    values = np.repeat([1.0, 0.0], [730, 270])
    theirs = scipy.stats.binomtest(730, 1000).proportion_ci(method="wilson")
    ours = stats.mean(values)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=2e-5)


def test_zeros_of_a_divergence_are_no_wrong_answers() -> None:
    """Nats have no Wilson interval: of zeros alone there is none, and one number above 0 gives the usual one."""
    assert stats.mean([0.0] * 4).high == pytest.approx(0.49, abs=0.01)
    assert stats.mean([0.0] * 4, countable=False) == stats.Estimate(0.0, None, None, 4)
    some = stats.mean([0.0, 1.0, 0.0, 1.0, 1.0], countable=False)
    nearly = stats.mean([1e-9, 1.0, 0.0, 1.0, 1.0])
    assert (some.low, some.high) == pytest.approx((nearly.low, nearly.high))


def test_shares_are_counted_like_answers() -> None:
    """0/1 shares have Wilson's interval; shares that are nearly all 1 keep a width that Student's has not."""
    values = np.repeat([1.0, 0.0], [70, 30])
    assert stats.proportion(values) == stats.mean(values)
    alike, nearly = np.full(16, 0.95), np.array([1.0] * 29 + [0.5])
    wide, none, high = stats.proportion(alike), stats.mean(alike), stats.proportion(nearly).high
    assert wide.low is not None and wide.high is not None and none.low is not None and none.high is not None
    assert wide.high - wide.low > 0.02 > 1e-9 > none.high - none.low
    assert high is not None and high <= 1 < (stats.mean(nearly).high or 0)
    assert (wide.method, none.method) == ("wilson", "mean")


def test_an_estimate_answers_questions() -> None:
    """Above and below need a known end; a bound on one side is neither bounded nor nothing."""
    both, least, nothing = (stats.Estimate(1.0, *ends, 10) for ends in ((0.5, 2.0), (0.5, None), (None, None)))
    assert both.bounded and not both.one_sided and both.above(0.4) and both.below(2.1)
    assert not both.above(0.5) and not both.below(2.0)
    assert least.one_sided and not least.bounded and least.above(0.4) and not least.below(1e9)
    assert not nothing.bounded and not nothing.one_sided and not nothing.above(-1e9) and not nothing.below(1e9)


@pytest.mark.parametrize("wrong", [{"n": -5}, {"level": 7.0}, {"low": 0.9, "high": 0.1}])
def test_an_estimate_that_can_not_be_is_refused(wrong: dict[str, float]) -> None:
    """As it may come from a file: fewer samples than none, a level that is none, ends the wrong way round."""
    with pytest.raises(InvalidInput, match=r"an estimate needs n samples|an interval must go from low to high"):
        stats.Estimate(**{"value": 0.5, "low": None, "high": None, "n": 3, **wrong})  # type: ignore[arg-type]


def test_single_seed_p_is_mcnemar() -> None:
    """With one seed the p of no difference is McNemar's: (lost - gained)^2 / (lost + gained)."""
    x, y = np.repeat([1.0, 1, 0, 0], [600, 30, 14, 356]), np.repeat([1.0, 0, 1, 0], [600, 30, 14, 356])
    assert stats.p_no_difference(x, y) == pytest.approx(scipy.stats.chi2.sf((30 - 14) ** 2 / 44, 1), rel=0.02)


def test_symmetric_scores_give_students_interval() -> None:
    """Without skewness nothing is added to Student's t, in the interval and in the p."""
    half = np.random.default_rng(0).normal(size=20)
    d = np.concatenate([half, -half]) + 0.3
    clean = np.full(40, 5.0)
    ours, theirs = stats.difference(clean, clean - d), scipy.stats.ttest_1samp(d, 0)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert stats.p_no_difference(clean, clean - d) == pytest.approx(theirs.pvalue)


def test_skewed_scores_widen_the_long_side() -> None:
    """For KL-like scores the interval holds Student's and reaches further up."""
    kl = np.random.default_rng(1).lognormal(0, 1, 100)
    ours, theirs = stats.mean(kl), scipy.stats.ttest_1samp(kl, 0).confidence_interval(0.95)
    assert ours.low is not None and ours.high is not None
    assert ours.low <= theirs.low + 1e-12
    assert ours.high > theirs.high + 0.1 * (theirs.high - theirs.low)


# ---- what an interval must do ---------------------------------------------------------------------------------------


def width(estimate: stats.Estimate) -> float:
    assert estimate.low is not None and estimate.high is not None
    return estimate.high - estimate.low


def test_nothing_changed_is_no_certainty() -> None:
    """Without a single change the interval is [-3.7 %, 3.7 %] at n = 100, and p is 1."""
    clean = np.repeat([1.0, 0.0], [75, 25])
    unchanged = stats.difference(clean, np.repeat(clean[:, None], 3, axis=1))
    assert unchanged.value == 0
    assert (unchanged.low, unchanged.high) == pytest.approx((-0.037, 0.037), abs=1e-3)
    assert width(stats.degradation(clean, clean)) > 0.09
    assert stats.p_no_difference(clean, clean) == 1


def test_nothing_changed_in_continuous_scores() -> None:
    """A continuous score that no sample changed keeps a width, which shrinks with n."""
    clean = np.random.default_rng(0).normal(5, 1, 100)
    few, many = stats.difference(clean[:20], clean[:20]), stats.difference(clean, clean)
    assert few.value == many.value == 0
    assert 0 < width(many) < width(few)
    assert width(stats.retention(clean, clean)) > 0
    assert stats.p_no_difference(clean, clean) == 1
    assert stats.smallest_detectable(clean, clean) == pytest.approx(2.8 * clean.std() / 102, rel=1e-2)


def test_repeating_a_seed_is_no_evidence() -> None:
    """Three copies of one noisy run say no more than one; three different seeds do."""
    clean, noisy = flips(100, accuracy=0.75, loss=0.2, gain=0.2)
    clean, noisy = clean[0], noisy[0]
    once = stats.difference(clean, noisy[:, 0])
    copies = stats.difference(clean, np.repeat(noisy[:, :1], 3, axis=1))
    assert width(copies) == pytest.approx(width(once))
    assert copies.n == 100
    assert width(stats.difference(clean, noisy)) < 0.9 * width(once)


def test_one_sample_says_little() -> None:
    """One continuous pair has no interval and p = 1, and no loss is small enough to be found in it."""
    assert stats.p_no_difference([0.3], [0.2]) == 1
    assert stats.smallest_detectable([0.3], [0.2]) is None
    assert stats.mean([0.3]) == stats.Estimate(0.3, None, None, 1)


def test_pairing_is_used() -> None:
    """The same scores in another order are worse pairs and give a wider interval."""
    clean, noisy = flips(200, accuracy=0.6, loss=0.05, gain=0.02, seed=4)
    clean, noisy = clean[0], noisy[0]
    shuffled = np.random.default_rng(0).permutation(noisy)
    paired, unpaired = stats.difference(clean, noisy), stats.difference(clean, shuffled)
    assert paired.value == pytest.approx(unpaired.value)
    assert width(paired) < 0.6 * width(unpaired)
    assert width(stats.degradation(clean, noisy)) < 0.6 * width(stats.degradation(clean, shuffled))


def test_averaged_seeds_are_still_counts() -> None:
    """Shares of right answers that someone averaged already give the same as the single runs."""
    clean, noisy = flips(100, accuracy=0.75, loss=0.05)
    assert stats.difference(clean[0], noisy[0].mean(axis=1)) == stats.difference(clean[0], noisy[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(10, 60), st.integers(1, 3), st.integers(0, 10_000), st.booleans())
def test_p_interval_and_degradation_agree(n: int, seeds: int, seed: int, binary: bool) -> None:
    """p < 5 %, a difference clear of 0 and a degradation clear of 0 are one and the same statement."""
    rng = np.random.default_rng(seed)
    if binary:
        clean, noisy = (a[0] for a in flips(n, accuracy=0.8, loss=rng.random() * 0.6 + 0.01, seeds=seeds, seed=seed))
    else:
        clean = rng.lognormal(1, 0.4, n)
        noisy = clean[:, None] - rng.gamma(0.5, 0.5, (n, seeds)) + rng.random() * 0.3
    d, p = stats.difference(clean, noisy), stats.p_no_difference(clean, noisy)
    assert d.value is not None and d.low is not None and d.high is not None
    assert d.low <= d.value <= d.high
    if abs(p - 0.05) < 1e-6:
        return
    assert (p < 0.05) == (d.low > 0 or d.high < 0)
    lost = stats.degradation(clean, noisy)
    if lost.value is not None:
        assert (p < 0.05) == ((lost.low or -1.0) > 0 or (lost.high or 1.0) < 0)
        kept = stats.retention(clean, noisy)
        assert kept.value == pytest.approx(1 - lost.value)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(-1e6, 1e6, width=32)), st.floats(0.5, 100))
def test_intervals_follow_shift_and_scale(values: Array, factor: float) -> None:
    """The interval of a mean holds the mean and scales with the data."""
    if np.ptp(values) < 1e-3 or np.all((values == 0) | (values == 1)):
        return
    one, scaled = stats.mean(values), stats.mean(factor * values)
    assert one.low is not None and one.value is not None and one.high is not None
    assert one.low <= one.value <= one.high
    if not np.all((factor * values == 0) | (factor * values == 1)):
        assert (scaled.low, scaled.high) == pytest.approx((factor * one.low, factor * one.high), rel=1e-6, abs=1e-6)


def test_higher_level_is_wider() -> None:
    """Correcting for 26 comparisons widens every interval."""
    clean, noisy = (a[0] for a in flips(100, accuracy=0.75, loss=0.1))
    level = stats.simultaneous_level(26)
    assert level == pytest.approx(1 - 0.05 / 26)
    for function in (stats.difference, stats.degradation, stats.retention):
        assert width(function(clean, noisy, level=level)) > 1.3 * width(function(clean, noisy))


def test_measurable_asks_for_distance_from_chance() -> None:
    """30 % right of four choices is chance, 50 % is not; 3 right of 100 free answers are too few to lose a share of."""
    of = lambda right: np.repeat([1.0, 0.0], [right, 100 - right])  # noqa: E731
    assert not stats.measurable(of(30), 0.25)
    assert stats.measurable(of(50), 0.25)
    assert not stats.measurable(of(0))
    assert not stats.measurable(of(3))
    assert stats.measurable(of(4))
    assert not stats.measurable([1.0])
    lost = stats.degradation(of(30), of(10), chance=0.25)
    assert (lost.value, lost.low, lost.high, lost.note) == (None, None, None, stats.NOT_MEASURABLE)
    assert stats.degradation(of(30), of(10)).value == pytest.approx(2 / 3)


def test_noise_tolerance_turns_the_ends_round() -> None:
    """The index of a loss of 20 % [10 %, 25 %] is 5 [4, 10]; no loss is unbounded, and never infinity."""
    index = stats.noise_tolerance(stats.Estimate(0.2, 0.1, 0.25, 100))
    assert (index.value, index.low, index.high, index.note) == (5, 4, 10, "")
    open_end = stats.noise_tolerance(stats.Estimate(0.2, -0.1, 0.25, 100))
    assert (open_end.value, open_end.low, open_end.high) == (5, 4, None)
    none = stats.noise_tolerance(stats.Estimate(0.0, -0.05, 0.05, 100))
    assert (none.value, none.low, none.high, none.note) == (None, 20, None, stats.UNBOUNDED)
    dust = stats.noise_tolerance(stats.Estimate(1e-16, -0.05, 0.05, 100))
    assert (dust.value, dust.high, dust.note) == (None, None, stats.UNBOUNDED)
    better = stats.noise_tolerance(stats.Estimate(-0.2, -0.3, -0.1, 100))
    assert (better.value, better.low, better.high, better.note) == (None, None, None, stats.UNBOUNDED)
    unknown = stats.noise_tolerance(stats.Estimate(None, None, None, 9, note=stats.NOT_MEASURABLE))
    assert unknown.note == stats.NOT_MEASURABLE


def test_estimates_are_json() -> None:
    """Every estimate can be written as strict JSON, also one sample, total loss and an unbounded ratio."""
    right = np.ones(10)
    wild = np.array([0.0, 0, 0, 0, 0, 0, 0, 0, 0, 9.0])
    estimates: list[Any] = [
        stats.mean([0.3]),
        stats.difference([0.3], [0.2]),
        stats.difference([1], [0]),
        stats.degradation(right, 1 - right),
        stats.typical_ratio(np.linspace(1, 2, 10), wild),
        stats.typical_ratio(0 * right, 0 * right),
        stats.correlation(right, right),
    ]
    for estimate in estimates:
        assert json.loads(json.dumps(to_json(estimate), allow_nan=False))["n"] == estimate.n
    assert estimates[0].low is None and estimates[0].value == 0.3
    assert estimates[3].value == estimates[3].high == 1 and estimates[3].low < 0.8
    assert (estimates[4].value, estimates[4].low, estimates[4].high) == (None, None, None)
    assert estimates[5].note == stats.NOT_MEASURABLE


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.mean([]), "not be empty"),
        (lambda: stats.mean([1.0, math.nan]), "1 of 2 values are not finite"),
        (lambda: stats.mean(["a"]), "must be numbers"),
        (lambda: stats.mean([1.0, 0.0], level=95), "between 0 and 1"),
        (lambda: stats.difference([1, 0, 1], [[1, 0, 1], [1, 1, 1]]), "rows are samples, columns are seeds"),
        (lambda: stats.typical_ratio([-1, 2], [1, 2]), "at least 0"),
        (lambda: stats.holm([0.1, 1.2]), "between 0 and 1"),
        (lambda: stats.simultaneous_level(0), "at least 1"),
        (lambda: stats.correlation([1, 2], [1, 2], method="spearmen"), "Did you mean 'spearman'"),
        (lambda: stats.correlation([1, 2], [1, 2], every=0), "at least 1"),
        (lambda: stats.influence([1, 2], [1, 2], method="spearmen"), "Did you mean 'spearman'"),
        (lambda: stats.proportion([0.5, 1.5]), "between 0 and 1; got values from 0.5 to 1.5"),
    ],
)
def test_mistakes_are_named(call: Any, words: str) -> None:
    """Wrong data raise an error that says what came and what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        call()


# ---- many comparisons -----------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    """Holm multiplies the smallest p by m, the next by m - 1, never falls again and never passes 1."""
    assert stats.holm([0.03, 0.01, 0.02, 0.5]) == pytest.approx([0.06, 0.04, 0.06, 0.5])
    assert stats.holm([0.6, 0.9]) == [1, 1]
    assert stats.holm([]) == []


@pytest.mark.parametrize(
    ("accuracy", "gain", "seeds", "comparisons"),
    [(0.75, 0.0, 1, 1), (0.75, 0.2, 1, 1), (0.75, 0.2, 3, 1), (0.75, 0.0, 1, 26), (0.97, 0.0, 1, 1)],
)
def test_smallest_detectable_effect_is_detected(accuracy: float, gain: float, seeds: int, comparisons: int) -> None:
    """A loss of the stated size is found in about 80 % of runs, also where nothing had changed before."""
    loss = gain * (1 - accuracy) / accuracy
    clean, noisy = flips(100, accuracy=accuracy, loss=loss, gain=gain, seeds=seeds, runs=50, seed=1)
    sizes = [stats.smallest_detectable(x, y, comparisons=comparisons) for x, y in zip(clean, noisy, strict=True)]
    size = float(np.median([s for s in sizes if s is not None]))
    clean, noisy = flips(100, accuracy=accuracy, loss=loss + size / accuracy, gain=gain, seeds=seeds, runs=4000, seed=2)
    statistic = counted.difference_statistic(counted.Table.of(clean, noisy.mean(axis=2)))(0.0)
    found = float(np.mean(statistic > counted.normal_quantile(stats.simultaneous_level(comparisons))))
    assert 0.74 <= found <= 0.90


def test_smallest_detectable_follows_n_comparisons_and_scale() -> None:
    """More samples see less, more comparisons see less well; None where even a total loss would be missed."""
    clean = np.tile([1.0, 1.0, 1.0, 0.0], 100)
    size = stats.smallest_detectable(clean[:100], clean[:100])
    more = stats.smallest_detectable(clean, clean)
    comparisons = stats.smallest_detectable(clean[:100], clean[:100], comparisons=26)
    relative = stats.smallest_detectable(clean[:100], clean[:100], relative=True)
    assert size is not None and more is not None and comparisons is not None
    assert more < 0.3 * size < size < comparisons
    assert size == pytest.approx(0.058, abs=1e-3)
    assert relative == pytest.approx(size / 0.75)
    assert stats.smallest_detectable([1, 0, 1, 0], [1, 0, 1, 0]) is None
    scores = np.random.default_rng(0).normal(0.1, 1, 100)
    by_hand = (1.96 + 0.8416) * scores.std(ddof=1) / 10
    assert stats.smallest_detectable(5 + scores, np.full(100, 5.0)) == pytest.approx(by_hand, rel=1e-4)


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "theirs"), [("spearman", scipy.stats.spearmanr), ("pearson", scipy.stats.pearsonr)])
def test_correlations_match_scipy(method: str, theirs: Any) -> None:
    """Value (with ties) and p agree with scipy's; the interval is the wider of Fisher's and the jackknife's in z."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 12, 30).astype(float)
    y = 0.1 * x + rng.normal(size=30)
    for b in (y, np.where(x > 10, 40.0, y)):  # in the second a few points far out widen Pearson's
        ours, other = stats.correlation(x, b, method=method), theirs(x, b)
        assert ours.value == pytest.approx(other.statistic)
        assert ours.p == pytest.approx(other.pvalue, abs=0.02)
        z = math.atanh(other.statistic)
        fisher = 1.959964 * math.sqrt((1 + other.statistic**2 / 2 if method == "spearman" else 1) / 27)
        left = np.arctanh([theirs(np.delete(x, i), np.delete(b, i)).statistic for i in range(30)])
        half = max(fisher, scipy.stats.t.ppf(0.975, 28) * math.sqrt(29 / 30 * np.sum((left - left.mean()) ** 2)))
        step = 6 / (30**3 - 30) if method == "spearman" else 0.0
        assert (ours.low, ours.high) == pytest.approx((math.tanh(z - half) - step, math.tanh(z + half) + step))
        assert ours == stats.correlation(x, b, method=method)


def test_overlapping_windows_need_thinning() -> None:
    """Unrelated layer profiles seen through windows of 3 look related far too often, and not with every=3."""
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(2, 150, 30))
    windows = (layers[..., :-2] + layers[..., 1:-1] + layers[..., 2:]) / 3

    def false_alarms(every: int) -> float:
        ps = [stats.correlation(x, y, every=every, permutations=299).p for x, y in zip(*windows, strict=True)]
        return float(np.mean([p is not None and p < 0.05 for p in ps]))

    assert false_alarms(1) > 0.12
    assert false_alarms(3) < 0.10
    assert stats.correlation(windows[0, 0], windows[1, 0], every=3).n == 10


def test_perfect_ranks_and_few_points() -> None:
    """Five points in perfect order leave a wide interval; three points have none; a constant has no correlation."""
    five = stats.correlation([1, 2, 3, 4, 5], [2, 4, 8, 16, 32])
    assert five.value == five.high == 1
    assert five.low is not None and five.low < 0.8
    three = stats.correlation([1, 2, 3], [1, 2, 3])
    assert (three.low, three.high) == (None, None)
    assert three.p is not None and three.p > 0.25
    constant = stats.correlation([1, 1, 1, 1], [1, 2, 3, 4])
    assert (constant.value, constant.p, constant.note) == (None, None, stats.NOT_MEASURABLE)


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 14, 30])
@pytest.mark.parametrize("rho", [0.97, 0.99])
def test_spearman_near_one_is_covered(n: int, rho: float) -> None:
    """Ranks of normal values: at least 93 % (Fisher's interval alone 82 to 93)."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(1000, n))
    y = rho * x + math.sqrt(1 - rho**2) * rng.normal(size=x.shape)
    truth = 6 / math.pi * math.asin(rho / 2)
    found = [stats.correlation(a, b, permutations=1) for a, b in zip(x, y, strict=True)]
    assert np.mean([f.low is not None and f.high is not None and f.low <= truth <= f.high for f in found]) >= 0.93


@pytest.mark.parametrize(("method", "theirs"), [("spearman", scipy.stats.spearmanr), ("pearson", scipy.stats.pearsonr)])
def test_one_point_that_carries_a_correlation(method: str, theirs: Any) -> None:
    """The point whose removal brings the correlation nearest to 0 is named, also for a negative one."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12))
    x[3], y[3] = 30.0, 30.0
    for sign in (1, -1):
        found = stats.influence(x, sign * y, method=method)
        left = [theirs(np.delete(x, i), sign * np.delete(y, i)).statistic for i in range(12)]
        whole = theirs(x, sign * y).statistic
        worst = int(np.argmin(np.sign(whole) * np.array(left)))
        assert found is not None and found.index == worst
        assert found.without == pytest.approx(left[worst])
    assert method == "spearman" or (worst == 3 and abs(whole) > 0.9 and abs(left[3]) < 0.5)
    assert stats.influence([1, 1, 1, 1], [1, 2, 3, 4], method=method) is None
    assert stats.influence([1, 2, 3], [1, 2, 3], method=method) is None


def test_no_torch() -> None:
    """Statistics load without torch."""
    code = "import sys, noisescope.stats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
