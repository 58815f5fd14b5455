"""Opens an engine by name: `open_engine("vllm", model, arguments)`. Its adapter is NAME_engine.py in this folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

from noisescope.comparison.system_comparison import Sampling, Setting
from noisescope.engines.protocol import Engine
from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.faults.parsing import number_or_text
from noisescope.options.fields import ENGINES

Arguments = Mapping[str, Setting]
_WORDS: dict[str, Setting] = {"true": True, "false": False, "none": None}


def open_engine(name: str, model: str, arguments: Arguments | None = None) -> Engine:
    """Start an engine with a model; `Sampling` settings among the arguments say what it reports."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    given = dict(arguments or {})
    chosen = {field.name: given.pop(field.name) for field in fields(Sampling) if field.name in given}
    if any(key != "processed" for key in chosen):
        chosen.setdefault("processed", True)
    if model == "demo":
        given.setdefault("dtype", "float32")  # stored in bfloat16 to be small
    try:
        adapter = importlib.import_module(f"noisescope.engines.{name}_engine")
        engine: Engine = adapter.open_engine(model, _sampling(chosen), given)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "noisescope":
            raise
        raise MissingExtra(f"the engine {name} is not installed ({error.name} is missing): {ENGINES[name]}") from error
    return engine


def _sampling(chosen: Arguments) -> Sampling:
    try:
        return Sampling(
            float(chosen.get("temperature") or 1.0),
            float(chosen.get("top_p") or 1.0),
            int(chosen.get("top_k") or 0),
            bool(chosen.get("processed")),
        )
    except ValueError:
        raise InvalidInput(f"temperature, top_p and top_k must be numbers; got {dict(chosen)}") from None


def read_arguments(words: Sequence[str], side: str = "") -> dict[str, Setting]:
    """Parse arguments such as dtype=float32 (for both sides) or b.temperature=0.7 (for one)."""
    found: dict[str, Setting] = {}
    for word in words:
        key, equals, value = word.partition("=")
        which, dot, name = key.partition(".")
        if not equals or not key or (dot and which not in ("a", "b")):
            raise InvalidInput(
                f"an engine argument must be NAME=VALUE, or a.NAME=VALUE or b.NAME=VALUE for one side; got {word!r}"
            )
        if not dot or which == side:
            found[name if dot else key] = _WORDS[value.lower()] if value.lower() in _WORDS else number_or_text(value)
    return found
