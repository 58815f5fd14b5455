"""What noisescope needs from an engine: names, tensors, recorded calls, log-probabilities, facts.

An adapter gives all of it in one form, whatever the engine does inside. Modules have the names that transformers gives
them: a merged q, k, v projection is three sites, and a norm that is given (hidden, residual) has their sum as its
input. Tensors are those of one prompt, [tokens, channels]. `open_engine("vllm", model, arguments)` starts one by name;
its adapter is NAME_engine.py in this folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from noisescope.comparison.system_comparison import EngineFacts as EngineFacts
from noisescope.comparison.system_comparison import Sampling as Sampling
from noisescope.comparison.system_comparison import Setting as Setting
from noisescope.data.dataset import DataSet
from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.faults.parsing import number_or_text
from noisescope.options.fields import ENGINES
from noisescope.sites import WHOLE, Site

Ids = tuple[int, ...]


@dataclass(frozen=True)
class EngineCall:
    """One call at a site: `inputs` [T, C] (token ids [T] of an embedding), `output` [T, C].

    `again(x)` returns the same module's output for other inputs.
    """

    site: Site
    inputs: Tensor
    output: Tensor
    again: Callable[[Tensor], Tensor]


OnCall = Callable[[EngineCall], Tensor | None]  # receives a call, may return the output that the engine continues with


@dataclass(frozen=True)
class Reported:
    """Log-probabilities as an engine reports them: row t belongs to token t + 1 of the ids.

    `rows` [T - 1, vocabulary] are NaN where the engine names no value and -inf where it says that a token is
    impossible. `tokens` [T - 1] are the values that it gives the tokens themselves.
    """

    tokens: Tensor
    rows: Tensor


class Engine(Protocol):
    """An adapter. `sites` are in module order; a site with operator `WHOLE` is a module that contains others."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def sites(self) -> tuple[Site, ...]: ...

    def encode(self, data: DataSet, max_tokens: int) -> tuple[Ids, ...]:
        """Token ids of each item, by the engine's own tokenizer and template."""
        ...

    def logits(self, ids: Ids, on_call: OnCall | None = None, *, modules: Collection[str] | None = None) -> Tensor:
        """Logits [T, vocabulary] of one prompt; `on_call` receives the calls of `modules`, by default of all sites."""
        ...

    def reported(self, ids: Ids) -> Reported:
        """The log-probabilities that the engine's users receive for a prompt."""
        ...

    def generate(self, ids: Ids, count: int) -> Ids:
        """The greedy continuation of that many tokens; an end-of-text token does not stop it."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers by name, as the engine uses them, with merged projections split."""
        ...

    def write(self, name: str, value: Tensor) -> None:
        """Overwrite one of the tensors."""
        ...

    def settings(self) -> Mapping[str, Setting]:
        """Plain attributes that a forward depends on, such as `model.layers.0.self_attn.scaling`."""
        ...

    def set(self, name: str, value: Setting) -> None:
        """Change one of the settings."""
        ...

    def apply(self, site: Site, x: Tensor) -> Tensor | None:
        """A module's output for x, with everything else as in the last prompt; None if it can't be called alone."""
        ...


def is_leaf(site: Site) -> bool:
    """Whether a site is a single operator that contains no others."""
    return site.operator not in (WHOLE, "residual")


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
