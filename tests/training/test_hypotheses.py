"""Verdicts of the experiment of phases: pure numbers in, words out."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.training.criteria import ceilings, criteria, main_arms, theory
from noisescope.training.hypotheses import (
    REFUTED,
    SUPPORTED,
    UNDECIDED,
    Criterion,
    Outcome,
    arm_row,
    crossed,
    deciding,
    judge,
)
from noisescope.training.phases import Arm

N = 400


def outcome(rng: np.random.Generator, clean: float, noisy: float, *, norm: float = 1.0, loss: float = 0.1) -> Outcome:
    """A model that answers shares `clean` and `noisy` of the problems; hard problems are hard for all models."""
    hard = np.linspace(0, 1, N, endpoint=False)
    jitter = rng.normal(0, 0.02, N)
    answers = {
        0.0: ((hard + jitter) < clean).astype(float)[:, None],
        0.05: np.stack([(hard + rng.normal(0, 0.05, N)) < noisy for _ in range(2)], axis=1).astype(float),
    }
    curve = [
        {"step": step, "loss": 1.0, "gradient_norm": norm * rng.lognormal(0, 0.02), "held_out": loss}
        for step in range(1, 11)
    ]
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
    assert row["verdict"] == verdict
    assert row["estimate"]["low"] <= row["estimate"]["value"] <= row["estimate"]["high"]
    assert row["estimate"]["value"] == pytest.approx(a - b, abs=0.03)
    assert (row["would_decide"] is None) == (verdict != UNDECIDED)


def test_more_criteria_make_wider_intervals() -> None:
    """Intervals hold for all criteria together."""
    data = experiment(a=0.8, b=0.7)
    alone, among = judge([better()], data)[0], judge([better()] * 20, data)[0]
    assert among["estimate"]["level"] == pytest.approx(0.9975)
    assert among["estimate"]["high"] - among["estimate"]["low"] > alone["estimate"]["high"] - alone["estimate"]["low"]


@pytest.mark.parametrize("parts", [(0.03, 0.0, 0.2), (0.0, 0.3, 0.2), (0.02, 0.3, 0.3)])
def test_intervals_cover_when_trainings_and_problems_are_both_drawn(parts: tuple[float, float, float]) -> None:
    """Simulated coverage of nominal 95 % over seeds x problems, whichever of the two varies."""
    rng = np.random.default_rng(1)
    seed_sd, problem_sd, rest_sd = parts
    hits = 0
    for _ in range(400):
        values = rng.normal(0, seed_sd, (5, 1)) + rng.normal(0, problem_sd, (1, 60)) + rng.normal(0, rest_sd, (5, 60))
        spread = crossed(values)
        hits += abs(spread.mean) <= spread.half_width(0.95)
    assert 0.92 <= hits / 400 <= 1.0


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
def test_half_widths_shrink_with_more_seeds(seeds: int, problems: int, seed: int) -> None:
    """Many trainings are surer than two, no width is 0, and the parts are never negative."""
    values = np.random.default_rng(seed).integers(0, 2, (seeds, problems)).astype(float)
    spread = crossed(values)
    few, many = (spread.half_width(0.95, count) for count in (2, 100))
    assert spread.of_seeds >= 0 and spread.of_problems >= 0
    assert 0 < many <= few


def test_nothing_changed_is_no_certainty() -> None:
    """Identical answers everywhere still leave an interval of some width."""
    assert crossed(np.zeros((5, 100))).half_width(0.95) > 0.01


def test_the_number_that_would_decide_does() -> None:
    """With as many seeds as it says, the interval would leave the edge out; with one fewer, not."""
    spread, criterion = crossed(np.random.default_rng(3).normal(0.07, 0.4, (4, 200))), better()
    needed = deciding(criterion, spread, 0.95)
    assert needed is not None and needed["seeds"] > 2
    times = needed["n"] / spread.problems
    distance = abs(spread.mean - 0.05)
    assert spread.half_width(0.95, needed["seeds"], times) <= distance
    assert spread.half_width(0.95, needed["seeds"] - 1, times) > distance


def test_retention_is_a_ratio_of_means() -> None:
    """Retention of an arm is accuracy under noise over accuracy without."""
    data = experiment(a=0.45)
    row = arm_row("a", data["a"], (0.0, 0.05))
    expected = row["accuracy"]["0.05"]["value"] / row["accuracy"]["0"]["value"]
    assert row["retention"]["0.05"]["value"] == pytest.approx(expected)
    assert row["retention"]["0.05"]["low"] < expected < row["retention"]["0.05"]["high"]


def test_accuracy_at_chance_is_not_measurable() -> None:
    """Models that learned nothing are never said to be equally robust."""
    rng = np.random.default_rng(4)
    data = {arm: {s: outcome(rng, 0.0, 0.0) for s in range(5)} for arm in "ab"}
    (row,) = judge([better(low=-0.01, high=0.01)], data)
    assert row["verdict"] == UNDECIDED and "no better than chance" in row["estimate"]["note"]
    assert arm_row("a", data["a"], (0.0, 0.05))["retention"] == {}


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
        assert row["verdict"] == verdict


def test_a_diverged_run_is_counted_and_not_compared() -> None:
    """A loss that is not finite, or worse than at first, is a diverged run."""
    rng = np.random.default_rng(6)
    fine, burst = outcome(rng, 0.9, 0.8), outcome(rng, 0.9, 0.8)
    lost = Outcome(burst.answers, [*burst.curve[:-1], {**burst.curve[-1], "held_out": None}], burst.injections)
    assert not fine.diverged and lost.diverged
    assert arm_row("a", {0: fine, 1: lost}, (0.0, 0.05))["training"]["diverged"] == 1
    (row,) = judge([Criterion("s", "s", "held_out", "a", "b")], {"a": {0: fine, 1: lost}, "b": {0: fine, 1: fine}})
    assert row["verdict"] == UNDECIDED and "diverged" in row["estimate"]["note"]


def test_criteria_need_their_arms() -> None:
    """Only what was trained is asked; the main arm of a kind is the constant one of the experiment's scale."""
    arms = [Arm.of(name, 0.05) for name in ("none", "forward", "forward@0.025", "both", "both:staged", "backward")]
    chosen = main_arms(arms, 0.05)
    assert chosen == {"none": "none", "forward": "forward@0.05", "both": "both@0.05", "backward": "backward@0.05",
                      "smaller": "forward@0.025", "falling": "both@0.05:staged"}  # fmt: skip
    names = [criterion.name for criterion in criteria(chosen, (0.0, 0.05, 0.1), 0.05)]
    assert "forward beats both" in names and "dose at 5 % noise" in names and not any("adaptive" in n for n in names)
    assert len(set(names)) == len(names)
    assert criteria({"none": "none"}, (0.0, 0.05), 0.05) == []


def test_a_gain_that_can_not_be_had_is_told() -> None:
    """Where the other arm answers 97 %, 5 points more are impossible, and the report says so."""
    rows = judge([better()], experiment(a=0.9, b=0.9))
    (note,) = ceilings(rows, {("b", 0.05): 0.97})
    assert "97.0 % already" in note
    assert not ceilings(rows, {("b", 0.05): 0.9}) and not ceilings(judge([better(low=0.0)], {}), {("b", 0.05): 1.0})


def test_the_theory_by_its_own_rule() -> None:
    """All predictions supported verifies it, a refuted main prediction falsifies it, all else leaves it open."""
    names = ("forward beats both", "backward is worse", "similar stability: gradients", "similar stability: loss")
    rows = [{"name": name, "verdict": SUPPORTED} for name in names]
    assert theory(rows)["verdict"] == SUPPORTED
    assert theory([{**rows[0], "verdict": REFUTED}, *rows[1:]])["verdict"] == REFUTED
    assert theory([*rows, {"name": "forward noise helps at 5 % noise", "verdict": REFUTED}])["verdict"] == REFUTED
    assert theory([{**rows[0], "verdict": UNDECIDED}, *rows[1:]])["verdict"] == UNDECIDED
    assert theory([])["verdict"] == UNDECIDED


def test_verdicts_need_no_torch() -> None:
    """Schedules, factors and verdicts import with torch blocked."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import noisescope.training.schedules, noisescope.training.adaptive\n"
        "import noisescope.training.criteria, noisescope.training.hypotheses, noisescope.reports.phases"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
