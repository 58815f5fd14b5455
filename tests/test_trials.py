"""Trials are known by their content."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import noisescope
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.probe.noise import Gaussian
from noisescope.trials import Conditions, Result, Slice, Trial, canonical, content_id, missing, slices

CONDITIONS = Conditions("weights", "float32", "cpu", "sdpa", 1)
PART = Slice("tokens", 0, 4)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def trial(**changes: Any) -> Trial:
    injection = Injection(Gaussian(0.05), operators=frozenset({"linear", "softmax"}), layers=frozenset({1, 2}), seed=3)
    fields = {"conditions": CONDITIONS, "measure": "score", "slice": PART, "injection": injection, "settings": {}}
    return Trial(**{**fields, **changes})


CHANGED_CONDITIONS = [
    {"conditions": dataclasses.replace(CONDITIONS, **{field.name: 2 if field.name == "engine" else "x"})}
    for field in dataclasses.fields(Conditions)
]
CHANGED_AIMS: list[dict[str, Any]] = [
    {"seed": 4},
    {"layers": {1}},
    {"channels": (0,)},
    {"layer_multipliers": {1: 2.0}},
    {"perturbation": Gaussian(0.0500001)},
    {"perturbation": Gaussian(0.05, "rms")},
]
CHANGED_INJECTIONS = [
    {"injection": dataclasses.replace(trial().injection, **change)}  # type: ignore[type-var]
    for change in CHANGED_AIMS
]


@given(values, values)
def test_equal_ids_mean_equal_content(a: Any, b: Any) -> None:
    """Two values share an id exactly where they are equal in value and in type."""
    same = repr(canonical(a)) == repr(canonical(b))
    assert (content_id(a) == content_id(b)) == same
    if type(a) is type(b) and not isinstance(a, (list, dict)):
        assert same == (a == b)


@given(st.dictionaries(st.text(max_size=3), st.integers(), min_size=2, max_size=5))
def test_order_does_not_matter(value: dict[str, int]) -> None:
    """A dictionary is the same in any order, and so is a set."""
    assert content_id(value) == content_id(dict(reversed(value.items())))
    assert content_id(set(value)) == content_id(frozenset(reversed(list(value))))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_digit_of_a_float_is_lost(value: float) -> None:
    """The next float has another id; zero has one sign."""
    assert content_id(value) != content_id(math.nextafter(value, -math.inf if value > 0 else math.inf))
    assert content_id(0.0) == content_id(-0.0)


def test_kinds_are_kept_apart() -> None:
    """1, 1.0, True and "1" are four things; a list is no set."""
    assert len({content_id(v) for v in (1, 1.0, True, "1", [1], {1}, {"1": 1}, {1: 1})}) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [-math.inf]}])
def test_nan_is_refused(value: Any) -> None:
    """NaN equals nothing, so it can't identify a trial."""
    with pytest.raises(InvalidInput, match="can't be part of a trial"):
        content_id(value)


def test_what_has_no_name_is_refused() -> None:
    """A lambda can't be told from another lambda; an object without fields neither."""
    with pytest.raises(InvalidInput, match="define it with `def`"):
        content_id(lambda y, draw: y)
    with pytest.raises(InvalidInput, match="can't be part of a trial"):
        content_id(object())
    with pytest.raises(InvalidInput, match="keys"):
        content_id({(1, 2): 3})
    assert canonical(trial) == {"callable": f"{__name__}.trial"}


@pytest.mark.parametrize(
    "change",
    [
        {"measure": "screen"},
        {"slice": Slice("tokens", 0, 5)},
        {"slice": Slice("other tokens", 0, 4)},
        {"injection": None},
        {"settings": {"draws": 2}},
        *CHANGED_CONDITIONS,
        *CHANGED_INJECTIONS,
    ],
    ids=lambda change: next(iter(change)),  # a set has no one text: two processes would not agree on the names
)
def test_everything_that_may_change_a_number_changes_the_id(change: dict[str, Any]) -> None:
    """Model, dtype, device, attention, engine, samples, noise, aim and seed are all in it."""
    assert trial(**change).id != trial().id


def test_ids_are_the_same_in_every_process() -> None:
    """Hash randomisation changes the order of sets, never an id."""
    code = "import tests.test_trials as t; print(t.trial().id)"
    root = Path(noisescope.__file__).parents[2]
    ids = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        ids.add(out.stdout.strip())
    assert ids == {trial().id}


def test_slices_cover_the_samples_once() -> None:
    """Fixed sizes, a shorter last one."""
    parts = slices("d", 10, 4)
    assert [(p.start, p.stop) for p in parts] == [(0, 4), (4, 8), (8, 10)]


def test_missing_keeps_order_and_asks_once() -> None:
    """A trial proposed twice, or known already, is not run again."""
    a, b, c = (trial(slice=Slice("tokens", i, i + 1)) for i in range(3))
    assert missing([c, a, c, b], {b.id: Result()}) == [c, a]


def test_an_id_does_not_follow_the_callers_dictionary() -> None:
    """Settings are taken over when a trial is made: what is stored is what its id says."""
    given = {"draws": 2}
    asked = trial(settings=given)
    before = asked.id
    given["draws"] = 3
    assert asked.settings == {"draws": 2} and content_id(asked) == before == asked.id
