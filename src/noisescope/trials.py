"""A trial: what is done to the model x what is measured x which samples x which seed. A value; no torch here.

Its id is the SHA-256 of its canonical content, so the same question asked twice is one trial, wherever and in whatever
order it is asked. Paths, times and hosts are not part of it. names_in_trial_ids.py names classes and functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.names_in_trial_ids import class_name, function_name, registered

_TAGS = ("float", "set", "type", "callable")  # keys that name the kind of value a JSON object stands for


def canonical(value: Any) -> Any:
    """A JSON value with one spelling for each content.

    Floats are written by `float.hex()` under a tag, so that 1 and 1.0 differ and no digit is lost; sets are sorted;
    NaN and infinities are refused, for a NaN equals nothing and so identifies nothing. Dataclasses and functions go by
    their qualified names, so that two classes called `Gaussian` are two.

    >>> canonical({"scale": 0.5, "layers": {2, 1}})
    {'layers': {'set': [1, 2]}, 'scale': {'float': '0x1.0000000000000p-1'}}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(
                f"{value} can't be part of a trial: it is not equal to itself, so the trial could not be found again"
            )
        return {"float": (value + 0.0).hex()}  # -0.0 is 0.0
    if isinstance(value, Mapping):
        if any(not isinstance(key, (str, int)) for key in value):
            raise InvalidInput(f"keys of a trial's settings must be names or ints, got {sorted(map(repr, value))}")
        return dict(sorted((_key(key), canonical(member)) for key, member in value.items()))
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((canonical(member) for member in value), key=_order)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": class_name(type(value)), **canonical(_fields(value))}
    if isinstance(value, (list, tuple)):
        return [canonical(member) for member in value]
    if callable(value):
        return {"callable": function_name(value)}
    if hasattr(value, "item"):  # a numpy or torch number
        with contextlib.suppress(ValueError, RuntimeError):  # an array of several
            return canonical(value.item())
    raise InvalidInput(f"{value!r} ({type(value).__name__}) can't be part of a trial: use numbers, text, sets, lists")


def _key(key: str | int) -> str:
    """A key as text: 1 and "1" differ, and no key can be taken for a tag."""
    if isinstance(key, int):
        return f"{type(key).__name__}:{key}"
    return f"str:{key}" if key in _TAGS or ":" in key else key


def _order(member: Any) -> tuple[str, Any]:
    """Sort key of a set's members in canonical form; objects and lists have no order of their own."""
    text = json.dumps(member, sort_keys=True) if isinstance(member, (dict, list)) else member
    return str(type(member)), text


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass; refused where a subclass keeps more than fields, which would be no part of the id.

    Nor is a field whose metadata say `identity=False`: where something lies on this machine.
    """
    known = dataclasses.fields(value)
    fields = {field.name: getattr(value, field.name) for field in known if field.metadata.get("identity", True)}
    more = sorted(getattr(value, "__dict__", {}).keys() - {field.name for field in known})
    if more and "__dataclass_fields__" not in vars(type(value)):
        raise InvalidInput(
            f"{type(value).__qualname__} inherits from a dataclass but has {', '.join(more)} in addition to its "
            f"fields, so trials with it can't be distinguished: make it a dataclass too"
        )
    return fields


def content_id(value: Any) -> str:
    """SHA-256 of the canonical JSON."""
    text = json.dumps(canonical(value), separators=(",", ":"), ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@registered("noisescope.Conditions")
@dataclass(frozen=True)
class Conditions:
    """What a number depends on besides the trial itself."""

    model: str  # fingerprint of the weights
    dtype: str
    device: str  # kind: "cpu", "cuda"
    attention: str
    engine: int  # version of the noise engine


@registered("noisescope.Slice")
@dataclass(frozen=True)
class Slice:
    """Samples `start` to `stop` of an encoded data set: a number from the settings, never what memory allowed."""

    data: str  # fingerprint of the token sequences
    start: int
    stop: int


@registered("noisescope.Trial")
@dataclass(frozen=True)
class Trial:
    """One question to the model. `injection` includes its seed."""

    conditions: Conditions
    measure: str
    slice: Slice
    injection: Injection | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", dict(self.settings))  # the id is kept: the caller's changes are not ours

    @property
    def id(self) -> str:
        known = self.__dict__.get("_id")
        if known is None:
            known = content_id(self)
            object.__setattr__(self, "_id", known)
        return str(known)

    def content(self) -> str:
        """The canonical JSON, stored with the result."""
        return json.dumps(canonical(self), separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Result:
    """The result of a trial: a value per sample for each metric, or other numbers defined by its measure."""

    samples: tuple[int, ...] = ()
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # None: not finite, or not defined
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON: injections counted, ...
    arrays: Mapping[str, Any] = field(default_factory=dict)  # numpy arrays by name
    error: str = ""  # a failed trial is a row, too

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def injected_nothing(self) -> bool:
        """Whether it failed because the model never computed what the injection targets."""
        return self.facts.get("error_type") == "NothingInjected"


Results = Mapping[str, Result]  # by trial id


def slices(data: str, count: int, size: int) -> tuple[Slice, ...]:
    """The fixed slices of the first `count` samples."""
    return tuple(Slice(data, start, min(start + size, count)) for start in range(0, count, size))


def missing(trials: Iterable[Trial], results: Results) -> list[Trial]:
    """Trials without a result, each once, in order."""
    wanted = {trial.id: trial for trial in trials}
    return [trial for identity, trial in wanted.items() if identity not in results]
