"""Verdicts of the experiment of phases: pure numbers in, words out."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from noisescope.reports.experiment import JudgedCriterion
from noisescope.stats import Estimate
from noisescope.training.criteria import criteria, theory
from noisescope.training.hypotheses import (
    REFUTED,
    SUPPORTED,
    UNDECIDED,
    UNMEASURABLE,
    Criterion,
    CurvePoint,
    Outcome,
    Spread,
    arm_row,
    chance,
    crossed,
    deciding,
    judge,
)
from noisescope.training.phases_experiment import Arm

N = 400


def outcome(rng: np.random.Generator, clean: float, noisy: float, *, norm: float = 1.0, loss: float = 0.1) -> Outcome:
    """A model that answers shares `clean` and `noisy` of the problems; hard problems are hard for all models."""
    hard = np.linspace(0, 1, N, endpoint=False)
    jitter = rng.normal(0, 0.02, N)
    answers = {
        0.0: ((hard + jitter) < clean).astype(float)[:, None],
        0.05: np.stack([(hard + rng.normal(0, 0.05, N)) < noisy for _ in range(2)], axis=1).astype(float),
    }
    curve = [CurvePoint(step, norm * rng.lognormal(0, 0.02), loss) for step in range(1, 11)]
    return Outcome(answers, curve, {"forward": 5, "backward": 0})


def experiment(seeds: int = 6, **noisy: float) -> dict[str, dict[int, Outcome]]:
    rng = np.random.default_rng(0)
    return {arm: {s: outcome(rng, 0.9, share) for s in range(seeds)} for arm, share in noisy.items()}


def better(low: float = 0.05, high: float = math.inf) -> Criterion:
    return Criterion("c", "c", "accuracy", "a", "b", 0.05, low, high)


@pytest.mark.parametrize(("a", "b", "verdict"), [(0.85, 0.6, SUPPORTED), (0.7, 0.7, REFUTED), (0.7, 0.64, UNDECIDED)])
def test_inside_outside_or_across_the_region(a: float, b: float, verdict: str) -> None:
    """At least 5 points better: a gap of 25 supports, none refutes, one of about 6 can't be decided."""
    (row,) = judge([better()], experiment(a=a, b=b))
    assert row.verdict == verdict
    assert row.estimate.low <= row.estimate.value <= row.estimate.high
    assert row.estimate.value == pytest.approx(a - b, abs=0.03)
    assert (row.would_decide is None) == (verdict != UNDECIDED)


def test_a_difference_of_shares_is_at_most_100_points() -> None:
    """With two seeds the quantile is large; the model's own draws are a share, too."""
    runs = experiment(2, a=0.7)["a"]
    own = {seed: replace(run, same={0.05: np.full((N, 1), float(seed))}) for seed, run in runs.items()}
    (row,) = judge([replace(better(), quantity="same_noise", b="a")], {"a": own})
    assert (row.estimate.low, row.estimate.high) == (-1, 1)


def test_more_criteria_make_wider_intervals() -> None:
    """Intervals hold for all criteria together."""
    data = experiment(a=0.8, b=0.7)
    alone, among = judge([better()], data)[0], judge([better()] * 20, data)[0]
    assert among.estimate.level == pytest.approx(0.9975)
    assert among.estimate.high - among.estimate.low > alone.estimate.high - alone.estimate.low


def satterthwaite(spread: Spread, level: float) -> float:
    """Half an interval with one t quantile for both parts of the variance."""
    size = spread.seeds * spread.problems
    a, b = spread.ms_seed / size, max(spread.ms_problem - spread.ms_rest, 0.0) / size
    freedom = (a + b) ** 2 / (a**2 / (spread.seeds - 1) + b**2 / (spread.problems - 1))
    return float(special.stdtrit(max(freedom, 1.0), (1 + level) / 2)) * math.sqrt(a + b)


def simulated(seeds: int, seed_sd: float, times: int = 1000) -> list[Spread]:
    """Experiments whose true mean is 0, with problems that differ and a rest."""
    rng = np.random.default_rng(seeds)
    parts = ((seed_sd, (seeds, 1)), (0.3, (1, 100)), (0.3, (seeds, 100)))
    return [crossed(sum(rng.normal(0, sd, shape) for sd, shape in parts)) for _ in range(times)]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed_sd", [0.005, 0.1])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_when_trainings_and_problems_are_both_drawn(seeds: int, seed_sd: float) -> None:
    """Simulated: intervals miss no more often than they say, alone and as one of twenty, also with two seeds."""
    drawn = simulated(seeds, seed_sd)
    for level, most in ((0.95, 0.065), (0.9975, 0.0075)):  # what they say and three standard errors
        assert np.mean([abs(spread.mean) > spread.half_width(level) for spread in drawn]) <= most


def test_one_quantile_for_both_parts_would_be_too_sure() -> None:
    """With two seeds a spread that is small by chance gets many degrees of freedom: ten times the misses it allows."""
    drawn = simulated(2, 0.1)
    assert np.mean([abs(spread.mean) > satterthwaite(spread, 0.95) for spread in drawn]) > 0.1
    assert np.mean([abs(spread.mean) > satterthwaite(spread, 0.9975) for spread in drawn]) > 0.025


def test_two_seeds_that_agree_exactly_decide_nothing() -> None:
    """All right against all wrong on eight problems, twice: no spread was met, and two seeds can't rule one out."""
    assert crossed(np.ones((2, 8))).half_width(0.975) > 1
    assert crossed(np.ones((2, 8))).half_width(0.95) > 3 * crossed(np.ones((5, 8))).half_width(0.95)


def test_a_mean_over_seeds_alone_would_be_too_sure() -> None:
    """Where problems differ, an interval over seed means leaves the truth out far too often: hence two ways."""
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        values = rng.normal(0, 0.3, (1, 40)) + rng.normal(0, 0.05, (5, 40))
        means = values.mean(axis=1)
        hits += abs(means.mean()) <= 2.776 * means.std(ddof=1) / math.sqrt(5)
    assert hits / 200 < 0.5


@given(st.integers(2, 8), st.integers(20, 40), st.integers(0, 10**6))
def test_more_seeds_and_problems_are_surer(seeds: int, problems: int, seed: int) -> None:
    """No width is 0, more of either never widens, and a plan with what there is promises no more than was measured."""
    values = np.random.default_rng(seed).integers(0, 2, (seeds, problems)).astype(float)
    spread = crossed(values)
    now = spread.planned(seeds, problems, 0.95)[0]
    assert 0 < spread.half_width(0.95) <= now * (1 + 1e-9)
    assert spread.planned(100, problems, 0.95)[0] < now
    assert spread.planned(seeds, 64 * problems, 0.95)[0] < now


def test_nothing_changed_is_no_certainty() -> None:
    """Identical answers everywhere still leave an interval of some width."""
    assert crossed(np.zeros((5, 100))).half_width(0.95) > 0.01


def test_the_number_that_would_decide_does() -> None:
    """Experiments of the size it names decide in about four of five, were the estimate true; half as large ones not."""
    rng = np.random.default_rng(3)

    def drawn(seeds: int, problems: int, mean: float) -> Spread:
        return crossed(mean + rng.normal(0, 0.05, (seeds, 1)) + rng.normal(0, 0.4, (seeds, problems)))

    criterion, first = better(), drawn(4, 200, 0.09)
    needed = deciding(criterion, first, 0.95)
    assert needed is not None and needed.seeds > 2
    seeds, problems = int(needed.seeds), int(needed.n)
    truth = Spread(0.09, seeds, problems, problems * 0.05**2 + 0.16, 0.16, 0.16)
    planned = deciding(criterion, truth, 0.95)
    assert planned is not None and planned.power == 0.8
    for share, low, high in ((1.0, 0.7, 0.95), (0.5, 0.0, 0.6)):
        size = max(round(share * int(planned.seeds)), 2)
        runs = [drawn(size, int(planned.n), 0.09) for _ in range(200)]
        assert low <= np.mean([run.mean - run.half_width(0.95) >= 0.05 for run in runs]) <= high


def test_more_problems_are_asked_for_where_trainings_agree() -> None:
    """What varies from problem to problem, alone or with the seed, falls with problems, which cost less than seeds."""
    seed_wise = Spread(0.09, 5, 100, ms_seed=100 * 0.2**2, ms_problem=0.0, ms_rest=0.0)
    rest = Spread(0.09, 5, 100, ms_seed=4.0, ms_problem=4.0, ms_rest=4.0)
    by_seeds, by_problems = deciding(better(), seed_wise, 0.95), deciding(better(), rest, 0.95)
    assert by_seeds is not None and by_seeds.n == 100 and by_seeds.seeds > 100
    assert by_problems is not None and by_problems.n > 1000 and by_problems.seeds < 20
    one_column = Spread(0.06, 5, 1, ms_seed=0.05**2, ms_problem=0.0, ms_rest=0.0)
    found = deciding(better(), one_column, 0.95)
    assert found is not None and found.n == 1


def test_the_chance_to_decide() -> None:
    """A half-width equal to the distance decides every other time; inside a band both edges count."""
    assert chance(better(0.05), 0.07, 0.02, 0.01) == pytest.approx(0.5)
    assert chance(better(0.05), 0.03, 0.02, 0.01) == pytest.approx(0.5)
    assert chance(better(-0.01, 0.01), 0.0, 0.005, 0.005) == pytest.approx(0.6827, abs=1e-3)
    assert chance(better(-0.01, 0.01), 0.0, 0.02, 0.005) < 0.5


def test_retention_is_a_ratio_of_means() -> None:
    """Retention of an arm is accuracy under noise over accuracy without."""
    data = experiment(a=0.45)
    row = arm_row("a", data["a"], (0.0, 0.05))
    expected = row.accuracy["0.05"].value / row.accuracy["0"].value
    assert row.retention["0.05"].value == pytest.approx(expected)
    assert row.retention["0.05"].low < expected < row.retention["0.05"].high


def test_accuracy_at_chance_is_not_measurable() -> None:
    """Models that learned nothing are never called equally robust."""
    rng = np.random.default_rng(4)
    data = {arm: {s: outcome(rng, 0.0, 0.0) for s in range(5)} for arm in "ab"}
    (row,) = judge([better(low=-0.01, high=0.01)], data)
    assert row.verdict == UNDECIDED and "no better than chance" in row.estimate.note
    assert arm_row("a", data["a"], (0.0, 0.05)).retention == {}


def test_stability_compares_logs_by_seed() -> None:
    """Gradient norms a factor of 1.5 apart are not similar; the same within 2 % are."""
    rng = np.random.default_rng(5)
    region = {"low": -math.log(1.1), "high": math.log(1.1)}
    for factor, verdict in ((1.5, REFUTED), (1.0, SUPPORTED)):
        data = {
            "a": {s: outcome(rng, 0.9, 0.8, norm=factor) for s in range(5)},
            "b": {s: outcome(rng, 0.9, 0.8) for s in range(5)},
        }
        (row,) = judge([Criterion("s", "s", "gradient_norm", "a", "b", **region)], data)
        assert row.verdict == verdict


def test_a_diverged_run_is_counted_and_not_compared() -> None:
    """A loss that is not finite, or worse than at first, is a diverged run."""
    rng = np.random.default_rng(6)
    fine, burst = outcome(rng, 0.9, 0.8), outcome(rng, 0.9, 0.8)
    lost = Outcome(burst.answers, [*burst.curve[:-1], replace(burst.curve[-1], held_out=None)], burst.injections)
    assert not fine.diverged and lost.diverged
    assert arm_row("a", {0: fine, 1: lost}, (0.0, 0.05)).training.diverged == 1
    (row,) = judge([Criterion("s", "s", "held_out", "a", "b")], {"a": {0: fine, 1: lost}, "b": {0: fine, 1: fine}})
    assert row.verdict == UNDECIDED and "diverged" in row.estimate.note


def asked(*arms: str, levels: tuple[float, ...] = (0.0, 0.05, 0.1), scale: float = 0.05) -> dict[str, Criterion]:
    found = criteria([Arm.of(name, scale) for name in arms], levels, scale)
    named = {criterion.name: criterion for criterion in found}
    assert len(named) == len(found)
    return named


def test_criteria_need_their_arms() -> None:
    """Only what was trained is asked; the arm of a kind is the constant one of the experiment's scale."""
    found = asked("none", "forward", "forward@0.025", "both", "both:staged", "backward")
    compared = {name: (criterion.a, criterion.b) for name, criterion in found.items()}
    assert compared["forward beats both"] == ("forward@0.05", "both@0.05")
    assert compared["dose at 5 % noise"] == ("forward@0.05", "forward@0.025")
    assert compared["constant beats falling at 5 % noise"] == ("both@0.05", "both@0.05:staged")
    assert compared["backward is poor"] == ("backward@0.05", "none")
    assert not any("adaptive" in name for name in found)
    assert asked("none") == asked("forward") == {}


def test_an_arm_is_compared_at_its_own_scale() -> None:
    """Kinds are paired at one scale, an arm is no dose of itself, and levels are those nearest to the pair's scale."""
    assert not any(name.startswith("dose") for name in asked("none", "forward@0.025"))
    assert not any(name.startswith("adaptive") for name in asked("both@0.05", "adaptive@0.025"))
    assert asked("both@0.05", "both@0.025", "adaptive@0.025")["adaptive beats uniform at 5 % noise"].b == "both@0.025"
    assert "forward beats both" not in asked("forward@0.05", "both@0.1")
    assert asked("forward@0.1", "both@0.1")["forward beats both"].level == 0.1
    assert asked("both@0.05", "both@0.1:linear") == {}


def test_without_noise_nothing_is_said_of_noise() -> None:
    """Asked at level 0 alone, only what concerns clean training is left."""
    assert set(asked("none", "both", "forward", "backward", levels=(0.0,))) == {
        "similar training",
        "similar stability: gradients",
        "similar stability: loss",
    }


def test_no_criterion_no_row() -> None:
    """An experiment of one arm ends with a report without verdicts."""
    assert judge([], {}) == []


def test_what_the_scale_decides_is_not_measurable() -> None:
    """At 96 % no arm can be 5 points better, nor could one fail to stay below that: neither is a verdict."""
    full, room = experiment(a=0.97, b=0.97), experiment(a=0.7, b=0.7)
    for region in ({"low": 0.05}, {"low": -math.inf, "high": 0.05}):
        (row,) = judge([better(**region)], full)
        assert row.verdict == UNMEASURABLE and row.would_decide is None
        assert "b answers 96.1 % correctly already, so 5 points more are out of reach" in row.estimate.note
        assert judge([better(**region)], room)[0].verdict != UNMEASURABLE
    assert judge([better(-0.05, 0.05)], full)[0].verdict == SUPPORTED  # it could have been lower
    assert judge([better(0.05)], experiment(a=0.5, b=0.97))[0].verdict == REFUTED  # no ceiling did that
    assert judge([better(0.0)], experiment(a=0.6, b=0.0))[0].verdict == SUPPORTED


def test_a_gradient_of_0_is_no_divergence() -> None:
    """Where groups of GRPO all agree there is no gradient: not comparable by a ratio, and said as it is."""
    fine = outcome(np.random.default_rng(7), 0.9, 0.8)
    still = Outcome(fine.answers, [*fine.curve[:-1], replace(fine.curve[-1], gradient_norm=0.0)], fine.injections)
    (row,) = judge([Criterion("s", "s", "gradient_norm", "a", "b")], {arm: {0: fine, 1: still} for arm in "ab"})
    assert "gradient_norm was 0" in row.estimate.note and "diverged" not in row.estimate.note
    assert arm_row("a", {0: still}, (0.0, 0.05)).training.gradient_norm is None


def test_which_criteria_falsify_the_theory() -> None:
    """That forward noise beats both, and that it helps at all, whatever the level: no other criterion."""
    found = asked("none", "forward", "both", "backward")
    assert {name for name, criterion in found.items() if criterion.falsifies} == {
        "forward beats both",
        "forward noise helps at 5 % noise",
        "forward noise helps at 10 % noise",
    }


def judged(name: str, verdict: str, *, falsifies: bool = False) -> JudgedCriterion:
    found = Estimate(0.1, 0.0, 0.2, N)
    return JudgedCriterion(name, name, "accuracy", ("a", "b"), 0.05, (0.0, None), found, 5, verdict, None, falsifies)


def test_the_theory_by_its_own_rule() -> None:
    """All predictions supported verifies it, a refuted main prediction falsifies it, all else leaves it open."""
    names = ("forward beats both", "backward is worse", "similar stability: gradients", "similar stability: loss")
    rows = [judged(name, SUPPORTED) for name in names]
    assert theory(rows).verdict == SUPPORTED
    assert theory([judged(names[0], REFUTED, falsifies=True), *rows[1:]]).verdict == REFUTED
    assert theory([*rows, judged("forward noise helps at 5 % noise", REFUTED, falsifies=True)]).verdict == REFUTED
    assert theory([*rows, judged("noise both ways helps at 5 % noise", REFUTED)]).verdict == SUPPORTED
    assert theory([judged(names[0], UNDECIDED), *rows[1:]]).verdict == UNDECIDED
    assert theory([]).verdict == UNDECIDED
    beyond = theory([judged(names[0], UNMEASURABLE), *rows[1:]])
    assert beyond.verdict == UNMEASURABLE and "forward beats both" not in beyond.because


def test_verdicts_need_no_torch() -> None:
    """Schedules, factors and verdicts import with torch blocked."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import noisescope.training.schedules, noisescope.training.schedules\n"
        "import noisescope.training.criteria, noisescope.training.hypotheses, noisescope.reports.experiment"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
