"""Plans refined by measurement: on a KL known in closed form, where linears act against and with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from noisescope.diagnosis.section_types import FormatScore
from noisescope.errors import NoisescopeError
from noisescope.injection import Injection
from noisescope.plans.precision import Budget, Module, optimal_plan, plan_of
from noisescope.plans.refinement import Refinement
from noisescope.sites import Site
from noisescope.trials import Conditions, Result, Slice

FORMATS = ("int4", "int8")
FRAME: Any = type("Frame", (), {"conditions": Conditions("m", "float32", "cpu", "own", 1)})()


@dataclass(frozen=True)
class Held:
    """Stands for the injection of a plan, so that trials of different plans differ."""

    plan: tuple[tuple[str, str], ...]

    def at(self, site: Site) -> Any:
        return self

    def __call__(self, tensor: Any, draw: Any) -> Any:
        return tensor


def injection(assignment: Any) -> Injection:
    return Injection(Held(tuple(sorted(assignment.items()))))


def modules_with(errors: np.ndarray) -> list[Module]:
    """Linears with these errors [modules, tokens] at int4, a hundredth of them at int8; scored one at a time."""
    return [
        Module(
            f"m{i}", i, 100,
            {"int4": FormatScore(4, 4.25, float(row @ row) / 2, None),
             "int8": FormatScore(8, 8.25, float(row @ row) / 2e4, None)},
        )
        for i, row in enumerate(errors)
    ]  # fmt: skip


def answered(errors: np.ndarray, question: Refinement) -> tuple[Any, int]:
    """The conclusion where KL = 1/2 |sum of errors|^2, with exact slopes; and the trials it took."""
    results: dict[str, Result] = {}
    size = {"int4": 1.0, "int8": 0.01}
    while trials := [t for t in question.propose(FRAME, results) if t.id not in results]:
        for trial in trials:
            assert trial.injection is not None
            plan = dict(trial.injection.perturbation.plan)  # type: ignore[attr-defined]
            total = sum(size[plan[f"m{i}"]] * row for i, row in enumerate(errors))
            slopes = {
                f"m{i}": [float((size[f] - size[plan[f"m{i}"]]) * (row @ total)) for f in FORMATS]
                for i, row in enumerate(errors)
            }
            facts = {"slopes": slopes, "formats": list(FORMATS)}
            results[trial.id] = Result((0,), {"kl": (float(total @ total) / 2,)}, facts)
    return question.conclude(FRAME, results), len(results)


def refinement(modules: list[Module], rounds: int = 12, bits: float = 6.0) -> Refinement:
    budget = Budget(bits)
    return Refinement(modules, budget, optimal_plan(modules, budget), rounds, Slice("d", 0, 4), injection)


def cancelling() -> np.ndarray:
    """Twice four linears. One at a time m0 looks worst, but at int4 its error cancels that of m2."""
    four = np.array([[3.0, 0, 0], [0, 3.0, 0], [-2.8, 0, 0], [0, 0, 2.9]])
    return np.kron(np.eye(2), four)


def test_errors_that_cancel_are_found() -> None:
    errors = cancelling()
    question = refinement(modules_with(errors))
    assert question.start.counts() == {"int4": 4, "int8": 4} and question.start.assignment["m0"] == "int8"
    found, _ = answered(errors, question)
    assert [found.plan.assignment[f"m{i}"] for i in range(8)] == ["int4", "int8", "int4", "int8"] * 2
    assert found.kl < 0.1 < found.measured[0]
    assert found.plan.average_bits <= 6


def test_independent_errors_leave_the_plan_as_it_is() -> None:
    errors = np.diag([4.0, 3.0, 2.0, 1.0])
    question = refinement(modules_with(errors))
    found, _ = answered(errors, question)
    assert found.plan.assignment == question.start.assignment
    assert found.kl == found.measured[0]


def test_rounds_bound_the_trials_and_none_is_asked_twice() -> None:
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(24, 6))
    question = refinement(modules_with(errors), rounds=3, bits=5.0)
    found, trials = answered(errors, question)
    assert trials == len(found.measured) <= 4
    assert found.kl == min(found.measured) < found.measured[0]
    assert found.plan.average_bits <= 5.0


def test_no_round_measures_the_plan_alone() -> None:
    errors = cancelling()
    question = refinement(modules_with(errors), rounds=0)
    found, trials = answered(errors, question)
    assert trials == 1 and found.plan.assignment == question.start.assignment


def test_a_failed_trial_is_reported() -> None:
    modules = modules_with(np.eye(3))
    question = refinement(modules)
    [trial] = question.propose(FRAME, {})
    results = {trial.id: Result(error="RuntimeError: no")}
    assert question.propose(FRAME, results) == []
    with pytest.raises(NoisescopeError, match="could not be refined: RuntimeError: no"):
        question.conclude(FRAME, results)


def test_the_plan_keeps_its_own_totals() -> None:
    """Costs of changes never become predictions."""
    errors = cancelling()
    modules = modules_with(errors)
    found, _ = answered(errors, refinement(modules))
    again = plan_of(modules, found.plan.assignment, "x")
    assert found.plan.predicted_mean_kl == again.predicted_mean_kl > 0
