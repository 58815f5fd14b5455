"""Schedules: the scale of the noise as a pure function of the step."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.training.schedules import KINDS, TAIL, Constant, Cosine, Exponential, Linear, Staged, named

scales = st.floats(0, 1, allow_subnormal=False)
steps = st.integers(1, 60)


@given(scales, scales, steps, st.sampled_from([Linear, Cosine, Exponential]))
def test_ramps_go_from_start_to_end_and_stay(start: float, end: float, count: int, kind: type[Linear]) -> None:
    """The first step has the start, the last the end, all others lie between, and the end goes on for ever."""
    ramp = kind(start, end, count)
    values = [ramp(step) for step in range(count)]
    low, high = min(start, end), max(start, end)
    assert values[0] == start
    assert count == 1 or values[-1] == end
    assert all(low * (1 - 1e-12) <= value <= high * (1 + 1e-12) for value in values)
    assert ramp(count + 5) == end
    ordered = sorted(values, reverse=start > end)
    assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-300) for a, b in zip(values, ordered, strict=True))


def test_what_the_formulas_give() -> None:
    """Halfway: the arithmetic mean for linear and cosine, the geometric one for exponential."""
    assert Linear(0.1, 0.0, 3)(1) == pytest.approx(0.05)
    assert Cosine(0.1, 0.0, 3)(1) == pytest.approx(0.05)
    assert Exponential(0.1, 0.001, 3)(1) == pytest.approx(0.01)
    assert Constant(0.03)(10**9) == 0.03


def test_exponential_decay_to_zero_ends_in_zero_alone() -> None:
    """With an end of 0 there is noise up to the last step, which falls to a hundredth, and then none."""
    ramp = Exponential(0.1, 0.0, 11)
    assert [ramp(step) > 0 for step in range(12)] == [True] * 10 + [False] * 2
    assert ramp(9) == pytest.approx(0.1 * TAIL**0.9)


@given(scales, scales, steps, st.integers(1, 80), st.none() | st.floats(0, 0.99), st.integers(1, 5))
def test_staged_decay_injects_whatever_its_numbers_are(
    start: float, end: float, count: int, stages: int, warm_up: float | None, epochs: int
) -> None:
    """Every epoch has a step at the start scale and, given two noisy steps, one at the end scale."""
    schedule = Staged(start, end, count, stages, warm_up, epochs)
    values = [schedule(step) for step in range(count)]
    low, high = min(start, end), max(start, end)
    assert all(value == 0 or low * (1 - 1e-12) <= value <= high * (1 + 1e-12) for value in values)
    parts = min(epochs, count)
    for epoch in range(parts):
        within = values[epoch * count // parts : (epoch + 1) * count // parts]
        share = Fraction(1, stages + 1) if warm_up is None else Fraction(warm_up) + Fraction(1, 10**9 * len(within))
        quiet = min(math.floor(len(within) * share), len(within) - 1)
        noisy = within[quiet:]
        assert within[:quiet] == [0.0] * quiet
        assert noisy[0] == start
        assert min(stages, len(noisy)) == 1 or noisy[-1] == end
        plateaus = 1 + sum(a != b for a, b in itertools.pairwise(noisy))
        assert plateaus <= min(stages, len(noisy))
    assert schedule(count + 7) == values[-1]


def test_stages_of_qerl() -> None:
    """Four stages from 0.01 to 0.00001 over 50 steps: a fifth without noise, then plateaus a factor of ten apart."""
    schedule = Staged(0.01, 0.00001, steps=50, stages=4)
    values = [schedule(step) for step in range(50)]
    assert values[:10] == [0.0] * 10
    for stage, start in enumerate((10, 20, 30, 40)):
        assert values[start : start + 10] == pytest.approx([0.01 * 0.1**stage] * 10)


def test_edges_that_broke_elsewhere() -> None:
    """One stage is constant noise, not none; an end of 0 is no 0^0; more stages than steps still decay."""
    assert [Staged(0.05, 0.001, 10, stages=1, warm_up=0)(step) for step in range(10)] == [0.05] * 10
    to_zero = [Staged(0.05, 0.0, 10, stages=5, warm_up=0)(step) for step in range(10)]
    assert to_zero[:2] == [0.05, 0.05] and to_zero[-2:] == [0.0, 0.0] and all(to_zero[:8])
    many = [Staged(0.05, 0.0005, 3, stages=100, warm_up=0)(step) for step in range(3)]
    assert many == pytest.approx([0.05, 0.005, 0.0005])
    assert Staged(0.05, 0.0005, 1)(0) == 0.05


def test_a_warm_up_is_not_a_step_short() -> None:
    """Shares whose product with the steps is a whole number give that number, whatever floats make of it."""
    assert [Staged(0.05, 0.01, 49, stages=48)(step) > 0 for step in range(2)] == [False, True]
    assert [Staged(0.05, 0.01, 100, warm_up=0.29)(step) > 0 for step in (28, 29)] == [False, True]


def test_epochs_start_anew() -> None:
    """Two epochs repeat the warm-up and the stages; one long run does not."""
    twice = [Staged(0.08, 0.02, 20, stages=3, warm_up=0.1, epochs=2)(step) for step in range(20)]
    assert twice[:10] == twice[10:]
    assert twice[0] == 0 and twice[1] == 0.08 and twice[9] == 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_named_schedules(kind: str) -> None:
    """By name a schedule starts at the scale given and, unless constant, falls to a hundredth of it."""
    schedule = named(kind, 0.05, 100)
    values = [schedule(step) for step in range(100)]
    assert max(values) == 0.05
    assert values[-1] == pytest.approx(0.05 if kind == "constant" else 0.0005)


def test_refusals() -> None:
    """Numbers that make no sense are refused with what is allowed."""
    with pytest.raises(InvalidInput, match="steps must be an int of at least 1"):
        Linear(0.1, 0.0, 0)
    with pytest.raises(InvalidInput, match="warm_up must be a share"):
        Staged(0.1, 0.01, 10, warm_up=1.0)
    with pytest.raises(InvalidInput, match="start must be finite and at least 0"):
        Cosine(-0.1, 0.0, 5)
    with pytest.raises(InvalidInput, match="steps are numbered from 0"):
        Constant(0.1)(-1)
    with pytest.raises(InvalidInput, match="Did you mean 'cosine'"):
        named("cosin", 0.1, 5)
