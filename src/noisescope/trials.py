"""A trial: what is done to the model x what is measured x which samples x which seed. A value; no torch here.

Its id is the SHA-256 of its canonical content, so the same question asked twice is one trial, wherever and in whatever
order it is asked. Paths, times and hosts are no part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.injection import Injection

MEASURES = ("score", "generate", "custom", "screen", "capture", "curvature", "gradients", "formats")


def canonical(value: Any) -> Any:
    """A JSON value with one spelling for each content.

    Floats are written by `float.hex()` under a tag, so that 1 and 1.0 differ and no digit is lost; sets are sorted;
    NaN and infinities are refused, for a NaN equals nothing and so identifies nothing.

    >>> canonical({"scale": 0.5, "layers": {2, 1}})
    {'layers': {'set': [1, 2]}, 'scale': {'float': '0x1.0000000000000p-1'}}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(f"{value} can't be part of a trial: it equals nothing, so the trial could not be found")
        return {"float": (value + 0.0).hex()}  # -0.0 is 0.0
    if isinstance(value, Mapping):
        if any(not isinstance(key, (str, int)) for key in value):
            raise InvalidInput(f"keys of a trial's settings are names or ints, got {sorted(map(repr, value))}")
        pairs = {f"{type(k).__name__}:{k}" if isinstance(k, int) else k: canonical(v) for k, v in value.items()}
        return dict(sorted(pairs.items()))
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((canonical(member) for member in value), key=lambda member: (str(type(member)), member))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **canonical(fields)}
    if isinstance(value, (list, tuple)):
        return [canonical(member) for member in value]
    if callable(value):
        return {"callable": _callable_name(value)}
    if hasattr(value, "item"):  # a numpy or torch number
        return canonical(value.item())
    raise InvalidInput(f"{value!r} ({type(value).__name__}) can't be part of a trial: use numbers, text, sets, lists")


def _callable_name(value: Any) -> str:
    """The dotted name of a function: all that can be said of it across processes. Its code is not looked at."""
    name = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", "")
    if not name or "<" in name:
        raise InvalidInput(
            f"{value!r} has no name of its own, so a stored trial could not be told from another: define it with `def` "
            "at the top level of a module, or make it a dataclass"
        )
    return f"{module}.{name}"


def content_id(value: Any) -> str:
    """SHA-256 of the canonical JSON."""
    text = json.dumps(canonical(value), separators=(",", ":"), ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Conditions:
    """What a number depends on besides the trial itself."""

    model: str  # fingerprint of the weights
    dtype: str
    device: str  # kind: "cpu", "cuda"
    attention: str
    engine: int  # version of the noise engine


@dataclass(frozen=True)
class Slice:
    """Samples `start` to `stop` of an encoded data set: a number from the settings, never what memory allowed."""

    data: str  # fingerprint of the token sequences
    start: int
    stop: int


@dataclass(frozen=True)
class Trial:
    """One question to the model. `injection` carries its seed."""

    conditions: Conditions
    measure: str
    slice: Slice
    injection: Injection | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        known = self.__dict__.get("_id")
        if known is None:
            known = content_id(self)
            object.__setattr__(self, "_id", known)
        return str(known)

    def content(self) -> str:
        """The canonical JSON, to be kept beside the result."""
        return json.dumps(canonical(self), separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Result:
    """What a trial gave: a value per sample for each metric, or other numbers that its measure defines."""

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
        """Whether it failed because the model never computed what the injection was aimed at."""
        return self.facts.get("error_type") == "NothingInjected"


Results = Mapping[str, Result]  # by trial id


def slices(data: str, count: int, size: int) -> tuple[Slice, ...]:
    """The fixed slices of the first `count` samples."""
    return tuple(Slice(data, start, min(start + size, count)) for start in range(0, count, size))


def missing(trials: Iterable[Trial], results: Results) -> list[Trial]:
    """Those without a result, each once, in order."""
    wanted = {trial.id: trial for trial in trials}
    return [trial for identity, trial in wanted.items() if identity not in results]
