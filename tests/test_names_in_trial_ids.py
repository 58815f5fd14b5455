"""Names inside trial ids: one class, one name; a moved file changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import noisescope
from noisescope.demo.experiment_tasks import arithmetic, practice
from noisescope.diagnosis.stored_trials import noise_of, stored_injection
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.measures.format_costs import plan_injection
from noisescope.names_in_trial_ids import class_name, function_name, registered, short_name
from noisescope.probe.noise import Gaussian
from noisescope.runs.store import Store
from noisescope.training.phases_experiment import Arm, Design
from noisescope.trials import Conditions, Result, Slice, Trial, canonical, content_id, missing

TWIN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Gaussian:
    scale: float
    relative_to: str = "element"

    def __call__(self, y, draw):
        return y * {factor}
"""


def trial(perturbation: Any, **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "conditions": Conditions("weights", "float32", "cpu", "sdpa", 1),
        "measure": "score",
        "slice": Slice("tokens", 0, 4),
        "injection": Injection(perturbation, phases=frozenset({"forward"})),
    }
    return Trial(**{**fields, **changes})


@pytest.fixture
def twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two modules with a dataclass `Gaussian` each, of the same fields, that do different things."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ["twin_one", "twin_two"]
    for factor, name in enumerate(names, 2):
        (tmp_path / f"{name}.py").write_text(TWIN.format(factor=factor), encoding="utf-8")
    yield [importlib.import_module(name).Gaussian(0.05) for name in names]
    for name in names:
        del sys.modules[name]


def test_classes_of_one_name_share_no_results(twins: list[Any], tmp_path: Path) -> None:
    """What was measured with one is not taken for the other's, nor for noisescope's own Gaussian."""
    own, first, second = (trial(noise) for noise in (Gaussian(0.05), *twins))
    assert len({own.id, first.id, second.id}) == 3
    with Store(tmp_path / "run") as store:
        store.put(first, Result((0,), {"kl": (1.0,)}), 0.0)
        assert missing([own, first, second], store) == [own, second]


def test_people_read_the_short_name(twins: list[Any]) -> None:
    """The default noise needs no name; another class of that name has one."""

    def said(noise: Any) -> str:
        return noise_of(stored_injection(canonical(Injection(noise))))

    assert said(Gaussian(0.05)) == "at 0.05"
    assert said(Gaussian(0.05, "rms")) == "at Gaussian relative_to=rms 0.05"
    assert said(twins[0]) == "at Gaussian relative_to=element 0.05"
    assert short_name("noisescope.Gaussian") == "Gaussian" and short_name("plain") == "plain"


def types_in(value: Any) -> set[str]:
    """Every class name in a canonical value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = {value["type"]} if isinstance(value, dict) and "type" in value else set()
    return own.union(*map(types_in, inside))


def test_ids_hold_no_path_of_a_file() -> None:
    """What a trial of noisescope's own may hold is registered, so that moving a module changes no id."""
    plans = plan_injection({"model.layers.0.mlp.up_proj": "int4"})
    arms = tuple(Arm.of(text, 0.05) for text in ("forward:linear", "both:cosine", "norm:staged", "none", "forward"))
    falling = Arm.of("backward:exponential", 0.05)
    trials = [trial(noise) for noise in (Gaussian(0.1), noisescope.Uniform(0.1), noisescope.Bias(0.1))]
    trials += [trial(noise) for noise in (noisescope.Shrink(0.1), noisescope.Format("int8"))]
    trials += [trial(Gaussian(0.1), injection=plans)]
    for task in (arithmetic("bundled", steps=4), practice("bundled")):
        design = Design(task, (*arms, falling), (0,), (0.05,))
        trials += [found for found, _, _ in design.trials()]
    names = set().union(*(types_in(json.loads(found.content())) for found in trials))
    assert len(names) > 15
    for name in names:
        with pytest.raises(ModuleNotFoundError):  # no file of that name: noisescope.Gaussian, noisescope.demo.Settings
            importlib.import_module(name)
        assert name.startswith("noisescope.") and name.count(".") <= 2, name


def test_perturbations_of_the_package_are_registered() -> None:
    """Whoever adds a dataclass that can be injected gives it a name."""
    found = set()
    for module in pkgutil.walk_packages(noisescope.__path__, "noisescope."):
        if module.name.startswith(("noisescope.probe.", "noisescope.measures.", "noisescope.training.schedules")):
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type) and "__call__" in vars(m)
            }
    assert {Gaussian, noisescope.Format} <= found
    unnamed = [cls for cls in found if class_name(cls) == f"{cls.__module__}.{cls.__qualname__}"]
    assert not [cls for cls in unnamed if not cls.__name__.startswith("_")]


def test_an_id_is_what_it_was() -> None:
    """A stored result is found by this number: it changes only with SCHEMA_VERSION of the store."""
    noise = {"type": "noisescope.Gaussian", "scale": {"float": "0x1.999999999999ap-5"}, "relative_to": "element"}
    narrowed = dict.fromkeys(["operators", "layers", "places", "modules", "channels"])
    scales: dict[str, Any] = {"phase_scales": {}, "operator_multipliers": {}, "layer_multipliers": {}}
    conditions = {"model": "weights", "dtype": "float32", "device": "cpu", "attention": "sdpa", "engine": 1}
    content = {
        "type": "noisescope.Trial",
        "conditions": {"type": "noisescope.Conditions", **conditions},
        "measure": "score",
        "slice": {"type": "noisescope.Slice", "data": "tokens", "start": 0, "stop": 4},
        "injection": {
            "type": "noisescope.Injection",
            "perturbation": noise,
            "tensor": "output",
            "phases": {"set": ["forward"]},
            "renormalise": False,
            "seed": 0,
            **narrowed,
            **scales,
        },
        "settings": {},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert trial(Gaussian(0.05)).id == hashlib.sha256(text.encode()).hexdigest()


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match=r"noisescope.Gaussian is the registered name of noisescope.probe.noise"):
        registered("noisescope.Gaussian")(Design)

    @dataclasses.dataclass(frozen=True)
    class Sub(Gaussian):
        pass

    with pytest.raises(InvalidInput, match="top level of a module"):
        class_name(Sub)  # a subclass does not inherit the name


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self, y: Any, draw: Any) -> Any:
        return y * self.factor

    @classmethod
    def plain(cls, y: Any, draw: Any) -> Any:
        return y


class SubScaler(Scaler):
    pass


class Louder(Gaussian):
    """Not a dataclass itself: `gain` is no field."""

    def __init__(self, scale: float, gain: float) -> None:
        super().__init__(scale)
        object.__setattr__(self, "gain", gain)


def test_what_could_not_be_told_apart_is_refused() -> None:
    """Local classes, lambdas, methods of objects, partial functions, state besides fields: one line each."""

    @dataclasses.dataclass(frozen=True)
    class Local:
        scale: float

        def __call__(self, y: Any, draw: Any) -> Any:
            return y

    with pytest.raises(InvalidInput, match=r"no unique name.*top level of a module"):
        trial(Local(0.1)).id  # noqa: B018
    with pytest.raises(InvalidInput, match="no unique name"):
        trial(lambda y, draw: y).id  # noqa: B018
    with pytest.raises(InvalidInput, match="no unique name"):
        content_id(functools.partial(print, end=""))
    with pytest.raises(InvalidInput, match="a bound method, whose object has no stable name"):
        content_id(Scaler(2.0).scale)
    with pytest.raises(InvalidInput, match=r"has gain in addition to its fields.*make it a dataclass"):
        trial(Louder(0.1, 2.0)).id  # noqa: B018
    assert function_name(Scaler.plain) != function_name(SubScaler.plain)
    assert content_id(Scaler.plain) != content_id(SubScaler.plain)
    for several in (np.arange(3.0), torch.arange(3.0)):
        with pytest.raises(InvalidInput, match="can't be part of a trial"):
            content_id(several)


@dataclasses.dataclass(frozen=True)
class Typed:
    type: str
    float: str


def test_no_content_can_be_taken_for_another() -> None:
    """Keys that look like tags, fields called `type`, sets of floats, int keys."""
    alike: list[Any] = [
        [0.5, {"float": (0.5).hex()}],
        [{1, 2}, {"set": [1, 2]}],
        [{1: 2}, {"int:1": 2}, {"str:int:1": 2}],
        [Typed("a", "b"), Typed("c", "b"), {"type": "a", "float": "b"}],
        [function_name, {"callable": function_name(function_name)}],
        [{0.5, 0.25}, {0.5}, [0.25, 0.5]],
        [{(1, "a"), (2, 1)}, {(1, "a")}],
    ]
    for group in alike:
        assert len({content_id(value) for value in group}) == len(group), group
    assert content_id({0.5, 0.25}) == content_id({0.25, 0.5})
    assert content_id(Typed("a", "b")) == content_id(Typed("a", "b"))
