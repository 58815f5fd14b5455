"""What a run puts into the model, as sentences name it: noise, or a number format on weights, activations or KV cache.

A number format has no scale: nothing is divided by one, and no scale is searched for. It draws nothing, so one seed is
enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from noisescope.options.fields import FORMATS_ON, OUTPUTS
from noisescope.sites import CACHED

On = Literal["weights", "activations", "kv-cache"]
TENSOR: dict[str, str] = {OUTPUTS: "output", "weights": "weight", "activations": "input", "kv-cache": "output"}
OPERATORS: dict[str, tuple[str, ...]] = {  # of the operator level; the first is what a layer or a window is asked about
    "weights": ("linear",),
    "activations": ("linear",),
    "kv-cache": ("kv_cache", *CACHED),
}
_WHAT = {"weights": "weights", "activations": "activations", "kv-cache": "KV cache"}
_ROUNDED = {
    "weights": "{} weights",
    "activations": "{} inputs of linears",
    "kv-cache": "keys and values in {}",
}
_BLOCKS = ("mxfp4", "nvfp4")


@dataclass(frozen=True)
class Question:
    """A number format, the tensors that are rounded to it, and which values share a scale."""

    format: str
    on: On
    granularity: str | None  # "group", "channel" or "token"; None: no scale
    group_size: int | None
    asymmetric: bool

    @classmethod
    def of(cls, perturbation: Any, on: str) -> Question | None:
        """None for noise."""
        if on not in FORMATS_ON:
            return None
        fmt = perturbation
        return cls(fmt.name, cast(On, on), fmt.granularity, fmt.group_size, fmt.asymmetric)

    @property
    def short(self) -> str:
        """ "int4 weights", "fp8_e4m3 KV cache"."""
        return f"{self.format} {_WHAT[self.on]}"

    @property
    def name(self) -> str:
        """With its scales: "int4 weights, groups of 64"."""
        zero = " (asymmetric)" if self.asymmetric else ""
        return ", ".join([f"{self.short}{zero}", *self._scales()])

    def _scales(self) -> list[str]:
        if self.group_size is not None:
            return [f"{'blocks' if self.format in _BLOCKS else 'groups'} of {self.group_size}"]
        if self.granularity is None:
            return [] if self.format in ("bf16", "fp16") else ["no scale"]
        shared = {"channel": "output channel", "token": "token and head" if self.on == "kv-cache" else "token"}
        return [f"one scale per {shared.get(self.granularity, self.granularity)}"]

    @property
    def phrase(self) -> str:
        """For the middle of a sentence: "int4 weights (groups of 64)"."""
        details = [*(["asymmetric"] if self.asymmetric else []), *self._scales()]
        return f"{self.rounded} ({', '.join(details)})" if details else self.rounded

    @property
    def rounded(self) -> str:
        """As the subject of a sentence, in the plural: "keys and values in int8"."""
        return _ROUNDED[self.on].format(self.format)


@dataclass(frozen=True)
class Words:
    """The subject of sentences about an effect, and its verbs."""

    subject: str = "noise"
    plural: bool = False

    @classmethod
    def of(cls, question: Question | None) -> Words:
        return cls() if question is None else cls(question.rounded, plural=True)

    def verb(self, singular: str, plural: str) -> str:
        return plural if self.plural else singular

    @property
    def costs(self) -> str:
        """ "noise here costs"."""
        return f"{self.subject} here {self.verb('costs', 'cost')}"


NOISE = Words()
