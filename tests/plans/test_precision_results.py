"""A precision plan beside the plans it has to beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from noisescope.jsonform import from_json, to_json
from noisescope.plans.precision import Plan
from noisescope.plans.precision_results import (
    PlanData,
    PlanRow,
    PlanScores,
    PrecisionPlan,
    Prediction,
    measured_plan,
    predicted_plan,
    without_random,
)
from noisescope.stats import Estimate

PLAN = Plan("optimal by module", {"a": "int4", "b": "int8"}, 6.0, 6.25, 1.5, 0.02)
PREDICTION = Prediction(0.02, 0.01, 0.03, 16, 0.95, 0.004, 100)
DATA = PlanData(64, 900, "abc")


def row(made: Any, name: str, kind: Any, bits: float, kl: float, form: str | None = None) -> PlanRow:
    accuracy, over = Estimate(0.9, 0.8, 0.95, 64), None if kind == "plan" else Estimate(2.0, 1.5, 3.0, 64)
    return PlanRow(name, kind, form, bits, bits + 0.25, 0.02, made.divergence(kl), accuracy, 0.95, over)


@pytest.fixture
def rows(made: Any) -> list[PlanRow]:
    """A uniform plan named like a random one: kinds decide, not names."""
    return [
        row(made, "plan", "plan", 6.0, 0.02),
        row(made, "uniform int8", "uniform", 8.0, 0.001, "int8"),
        row(made, "uniform int4", "uniform", 4.0, 0.08, "int4"),
        row(made, "random format nf4", "uniform", 4.0, 0.06, "nf4"),
        row(made, "bit rule", "bit rule", 5.5, 0.05),
        *(row(made, f"random {i}", "random", 6.0, kl) for i, kl in enumerate((0.1, 0.2, 0.9))),
    ]


def test_modules_of_several_layers_are_named_together() -> None:
    """In ranges of layers; another number in a name, and a name without one, stay as they are."""
    names = {f"layers.{i}.mlp.up": "int8" for i in (0, 1, 2, 5)} | {"layers.1.experts.7.up": "int8", "head": "int8"}
    plan = predicted_plan(replace(PLAN, assignment={**names, "layers.3.mlp.up": "int4"}), PREDICTION, planned_share=1.0)
    assert plan.named("int8") == ["layers.{0-2, 5}.mlp.up", "layers.1.experts.7.up", "head"]
    assert plan.named("int4") == ["layers.3.mlp.up"] and plan.named("bf16") == []


def test_a_predicted_plan_has_no_measurement() -> None:
    """And says so."""
    plan = predicted_plan(PLAN, PREDICTION, planned_share=0.9, notes=["n"])
    assert (
        not plan.verified
        and plan.typical_kl is plan.mean_kl is None
        and plan.rows == ()
        and plan.counts == {"int4": 1, "int8": 1}
    )
    assert from_json(PrecisionPlan, to_json(plan)) == plan


def test_a_measured_plan_is_compared_by_medians(rows: list[PlanRow]) -> None:
    """With the best uniform plan that fits, the bit rule, and the median of the random ones."""
    plan = measured_plan(predicted_plan(PLAN, PREDICTION, planned_share=0.9, notes=["n"]), rows, DATA, notes=["m"])
    assert plan.verified and (plan.mean_kl, plan.typical_kl) == (0.04, 0.02)  # the mean is twice the typical KL here
    assert plan.notes == ("m", "n")
    assert (plan.uniform_typical_kl, plan.uniform_format) == (
        0.06,
        "nf4",
    )  # of the formats of 4 bits the one that costs less
    assert (plan.bit_rule_typical_kl, plan.bit_rule_bits) == (0.05, 5.5)
    assert (plan.random.n, plan.random.median_typical_kl) == (3, 0.2)
    plain = to_json(plan)
    assert from_json(PrecisionPlan, plain) == plan
    assert plain["bit_rule_typical_kl"] == 0.05 and not any("seeds_rule" in key for key in plain)
    assert [one.kind for one in without_random(plan).rows].count("random") == 0 and len(without_random(plan).rows) == 5
    assert without_random(plan).random == plan.random


def test_plans_are_compared_sample_by_sample() -> None:
    """The typical ratio of KL: a few huge samples on both sides change nothing; 0 on both sides says nothing."""
    rng = np.random.default_rng(0)
    kl = rng.lognormal(-3, 2.5, 64)
    scores = np.ones(64)
    mine, other = PlanScores(kl, scores, scores), PlanScores(3 * kl, scores, scores)
    over = other.over(mine)
    assert over.value == pytest.approx(3) and over.low == pytest.approx(3) and over.n == 64
    middle = np.sort(kl)[12:52]  # a fifth of 64 is cut off at either end
    assert mine.divergence.typical.value == pytest.approx(float(np.exp(np.log(middle).mean())))
    assert mine.divergence.mean.value == pytest.approx(kl.mean())
    nothing = PlanScores(np.full(64, np.nan), scores, scores)
    assert nothing.over(mine).value is None and nothing.divergence.typical.value is None
    clean = PlanScores(np.zeros(64), scores, scores)
    assert clean.over(clean).note == "not measurable" and clean.divergence.typical.value == 0.0
