"""Precision plans against brute force: as good as there is, within the budget, and quick."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.section_types import FormatScore
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.plans.precision import Budget, Module, modules_of, optimal_plan, plan_of, random_plans, uniform_plan
from noisescope.plans.precision_results import coverage_notes, planned_share

BITS = {"int3": 3, "int4": 4, "int8": 8}


def made_up(count: int, *, seed: int = 0, formats: dict[str, int] = BITS, blocks: int = 4) -> list[Module]:
    """Modules whose costs fall with the bits, as rounding errors do, and differ a hundredfold."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        size, need = int(rng.integers(1, 9)) * 1000, 10.0 ** rng.uniform(-4, -2)
        choices = {f: FormatScore(bits, bits + 0.25, need * 4.0 ** (4 - bits), None) for f, bits in formats.items()}
        found.append(Module(f"layers.{i % blocks}.linear{i}", i % blocks, size, choices))
    return found


def best_by_trying(modules: list[Module], average_bits: float) -> float:
    weights = sum(m.parameters for m in modules)
    costs = []
    for names in itertools.product(BITS, repeat=len(modules)):
        chosen = [m.choices[name] for m, name in zip(modules, names, strict=True)]
        bits = sum(m.parameters * c.bits for m, c in zip(modules, chosen, strict=True)) / weights
        if bits <= average_bits + 1e-9:
            costs.append(sum(c.predicted_kl for c in chosen))
    return min(costs)


@given(st.integers(0, 1000), st.floats(3, 8))
def test_no_assignment_is_better(seed: int, average_bits: float) -> None:
    """Of all assignments within the budget, none has a lower predicted KL; the budget is kept."""
    modules = made_up(5, seed=seed)
    plan = optimal_plan(modules, Budget(average_bits))
    assert plan.average_bits <= average_bits + 1e-6
    assert plan.predicted_mean_kl <= best_by_trying(modules, average_bits) * (1 + 1e-3)


def test_more_bits_never_cost_more() -> None:
    """A larger budget gives a plan that is at least as good; the smallest possible one is the smallest format."""
    modules = made_up(40)
    costs = [optimal_plan(modules, Budget(bits)).predicted_mean_kl for bits in (3.0, 4.0, 5.0, 6.0, 8.0)]
    assert costs == sorted(costs, reverse=True) and costs[0] > 10 * costs[-1]
    assert set(optimal_plan(modules, Budget(3.0)).assignment.values()) == {"int3"}


def test_size_and_latency_are_budgets_too() -> None:
    """Megabytes count scales; milliseconds come from a table by module, or for a million weights."""
    modules = made_up(12)
    weights = sum(m.parameters for m in modules)
    plan = optimal_plan(modules, Budget(megabytes=weights * 5.25 / 8e6))
    assert plan.megabytes <= weights * 5.25 / 8e6 * (1 + 1e-6) and plan.average_bits == pytest.approx(5, abs=0.35)
    table = {"*": {"int3": 3.0, "int4": 1.0, "int8": 2.0}, modules[0].name: {"int3": 9.0, "int4": 9.0, "int8": 0.0}}
    quick = optimal_plan(modules, Budget(milliseconds=(weights - modules[0].parameters) / 1e6, latency=table))
    assert quick.assignment[modules[0].name] == "int8"
    assert {name for m, name in quick.assignment.items() if m != modules[0].name} == {"int4"}
    both = optimal_plan(modules, Budget(4.0, milliseconds=2 * weights / 1e6, latency=table))
    assert both.average_bits <= 4.0 + 1e-6


def test_layers_share_a_format() -> None:
    """With layer granularity a block has one format, at no lower cost than module by module."""
    modules = made_up(28, blocks=4)
    plan = optimal_plan(modules, Budget(5.0), granularity="layer")
    for place in range(4):
        assert len({plan.assignment[m.name] for m in modules if m.place == place}) == 1
    assert (
        plan.predicted_mean_kl >= optimal_plan(modules, Budget(5.0)).predicted_mean_kl
        and plan.average_bits <= 5.0 + 1e-6
    )


def test_three_hundred_modules_take_seconds() -> None:
    """300 modules x 5 formats are solved in under 5 s."""
    modules = made_up(300, formats={**BITS, "int5": 5, "bf16": 16}, blocks=30)
    started = time.process_time()
    plan = optimal_plan(modules, Budget(4.7))
    assert time.process_time() - started < 5 and plan.note == "" and plan.average_bits <= 4.7 + 1e-6


def test_random_plans_have_the_bits_of_the_plan() -> None:
    """They are within 0.02, differ from each other, and a seed gives the same ones again."""
    modules = made_up(100)
    plans = random_plans(modules, 4.6, 32, seed=3)
    assert all(abs(plan.average_bits - 4.6) <= 0.02 for plan in plans)
    assert len({tuple(plan.assignment.values()) for plan in plans}) == 32
    assert [p.assignment for p in random_plans(modules, 4.6, 32, seed=3)] == [p.assignment for p in plans]
    assert optimal_plan(modules, Budget(4.6)).predicted_mean_kl < 0.5 * np.median([p.predicted_mean_kl for p in plans])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_random_plans_of_few_large_modules_are_the_nearest_there_are(count: int) -> None:
    """Where none comes within 0.02, they are within half a step of the largest module, and most are the nearest."""
    made = made_up(count)
    modules = [replace(m, choices={f: m.choices[f] for f in ("int4", "int8")}) for m in made]
    share = np.array([m.parameters for m in modules]) / sum(m.parameters for m in modules)
    reachable = [4 + 4 * float(share @ np.array(high)) for high in itertools.product((0, 1), repeat=count)]
    least = max(min(abs(bits - 4.7) for bits in reachable), 0.02)
    off = [abs(plan.average_bits - 4.7) for plan in random_plans(modules, 4.7, 16)]
    assert max(off) <= max(2 * float(share.max()), 0.02) and np.median(off) <= least + 1e-9


def test_sums_of_a_plan() -> None:
    """Averages are weighted by parameters, and a plan is JSON."""
    modules = [
        Module("a", 0, 3000, {"int4": FormatScore(4, 4.25, 0.5, None), "int8": FormatScore(8, 8.25, 0.1, None)}),
        Module("b", 1, 1000, {"int4": FormatScore(4, 4.25, 0.2, None), "int8": FormatScore(8, 8.25, 0.0, None)}),
    ]
    plan = plan_of(modules, {"a": "int4", "b": "int8"}, "by hand")
    assert (plan.average_bits, plan.effective_bits, plan.predicted_mean_kl) == (5.0, 5.25, 0.5)
    assert plan.megabytes == pytest.approx(4000 * 5.25 / 8e6) and plan.counts() == {"int4": 1, "int8": 1}
    assert json.loads(json.dumps(to_json(plan)))["assignment"] == {"a": "int4", "b": "int8"}
    assert uniform_plan(modules, "int8").average_bits == 8.0


def diagnosis(made: Any, **costs: float) -> Diagnosis:
    """One module, whose formats cost so much."""
    offered = costs or {"int3": 0.1 / 3, "int4": 0.025, "int8": 0.0125}
    module = made.module_scores("a", 0, {name: (cost, None) for name, cost in offered.items()})
    return made.diagnosis(format_scores=made.scores(module))


def test_modules_come_from_the_diagnosis(made: Any) -> None:
    """With the formats that are wanted."""
    (module,) = modules_of(diagnosis(made), ["int4", "int8"])
    choices = {"int4": FormatScore(4, 4.25, 0.025, None), "int8": FormatScore(8, 8.25, 0.0125, None)}
    assert module == Module("a", 0, 10, choices, 64, "Linear")


def test_noise_in_scores_takes_no_bits(made: Any) -> None:
    """A narrower integer that scored better by chance counts as no better, and a wider one that fits is taken."""
    noisy = diagnosis(made, int8=0.01, int4=0.03, int3=0.02)
    (module,) = modules_of(noisy)
    assert {name: choice.predicted_kl for name, choice in module.choices.items()} == {
        "int8": 0.01, "int4": 0.03, "int3": 0.03,
    }  # fmt: skip
    assert optimal_plan([module], Budget(5.0)).assignment == {"a": "int4"}
    assert modules_of(noisy, ["int3", "int8"])[0].choices["int3"].predicted_kl == 0.03  # whatever else is offered


def test_coverage_is_reported_where_it_is_low(made: Any) -> None:
    """Average bits are of the planned weights alone."""
    module = made.module_scores("a", 0, {"int4": (0.1, None)})
    nearly, half = (made.diagnosis(format_scores=made.scores(module, weights=w)) for w in (10, 40))
    assert planned_share(nearly) == 1.0 and coverage_notes(nearly) == []
    (note,) = coverage_notes(half)
    assert planned_share(half) == 0.25 and "covers 10 of the 40 weights in the blocks (25 %)" in note
    assert planned_share(made.diagnosis(format_scores=made.scores(module, weights=0))) is None


def test_formats_that_cost_the_same_get_the_bits_that_are_left() -> None:
    """Within every limit, and in no other order than that of the modules."""
    choices = {name: FormatScore(bits, bits, 0.5, None) for name, bits in BITS.items()}
    modules = [Module(f"m{i}", i, 100, choices) for i in range(3)]
    plan = optimal_plan(modules, Budget(6.5))
    assert sorted(plan.assignment.values()) == ["int3", "int8", "int8"] and plan.average_bits <= 6.5


def with_latency(module: str, time: Any) -> Budget:
    return Budget(milliseconds=1.0, latency={module: {"int3": time}})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda made: modules_of(made.diagnosis()), "no format scores: make one with the layer level"),
        (lambda made: modules_of(made.diagnosis(format_scores=made.scores(error="out of memory"))), "out of memory"),
        (lambda made: modules_of(diagnosis(made), ["int5"]), "'int5'"),
        (lambda made: modules_of(diagnosis(made), []), "no formats selected"),
        (lambda _: Budget(), "needs a limit"),
        (lambda _: Budget(-1.0), "above 0"),
        (lambda _: Budget(milliseconds=3.0), "needs both"),
        (lambda _: optimal_plan(made_up(4), Budget(2.0)), r"average_bits = 2 can't be reached.*3"),
        (lambda _: optimal_plan(made_up(4), Budget(5.0), granularity="block"), "granularity"),
        (lambda _: optimal_plan(made_up(4), Budget(milliseconds=1.0, latency={"*": {"int3": 1}})), "no 'int4'"),
        (lambda _: with_latency("*", "fast"), "'fast' for '\\*', 'int3'.*numbers of at least 0"),
        (lambda _: with_latency("a", None), "None for 'a'"),
        (lambda _: with_latency("a", float("nan")), "nan for 'a'"),
        (lambda _: with_latency("a", -1), "-1 for 'a'"),
        (
            lambda _: optimal_plan(made_up(4), Budget(milliseconds=1.0, latency={"*": dict(BITS), "layer.0": {}})),
            "a row for 'layer.0', which is not in the plan.*'layers.0.linear0'",
        ),
        (lambda _: random_plans(made_up(4), 9.0, 1), "can't average 9"),
    ],
)
def test_mistakes_are_explained(made: Any, call: Any, words: str) -> None:
    """What came, what is allowed, what to do."""
    with pytest.raises(InvalidInput, match=words):
        call(made)
