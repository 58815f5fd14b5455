"""The values of the field benchmark: a fault case, what counts as naming it, the input it needs, the fixed split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

Place = int | str
Fault = Callable[[nn.Module], AbstractContextManager[None]]  # makes a model faulty and restores it on exit

HALVES = ("tune", "held-out")

# Operators that may rightly be named. A fault inside fused attention has no finer name than the whole kernel.
ATTENTION = frozenset({"attention", "matmul", "bmm", "softmax", "mask", "cache", "rotary"})
LINEAR = frozenset({"linear", "matmul"})
NORM = frozenset({"norm"})
ACTIVATION = frozenset({"silu", "gelu", "activation"})
EXPERTS = frozenset({"linear", "matmul", "bmm", "softmax", "silu", "gelu", "residual", "router", "experts", "mixture"})
ANY = frozenset({"linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual", "attention"})

# Classes in locate's vocabulary that describe each kind of damage. "unknown" is right only where no class fits.
GAIN = frozenset({"gain"})
BIAS = frozenset({"bias"})
DEAD_ZONE = frozenset({"dead zone", "flush to zero"})
SATURATION = frozenset({"saturation"})
STUCK = frozenset({"stuck bit"})
FLIPS = frozenset({"spike", "bit flip", "stuck bit", "noise"})
DEAD = frozenset({"dead lane", "dead tail", "tail", "nan to zero"})
LOST_INPUT = frozenset({"dead input lane", "lost part", "tail"})
SWAPPED = frozenset({"swapped channels", "head mapping", "unknown"})
SHORT = frozenset({"truncation", "rounding mode"})
SUMS = frozenset({"accumulation", "truncation", "rounding mode"})
TABLE = frozenset({"function table"})
STALE = frozenset({"stale data", "stale rows"})
TILE = frozenset({"tile", "rows", "gain", "spike", "unknown", "block scale"})
ROWS = frozenset({"rows", "tile", "tail", "batch", "gain", "bias", "spike", "dead lane", "stale data", "unknown"})
MASK = frozenset({"mask", "position", "unknown"})
POSITION = frozenset({"position", "rotary", "function table", "stale data", "unknown"})
CACHE = frozenset({"stale data", "cache", "position", "stale rows", "unknown"})
STRUCTURE = frozenset({"unknown", "gain", "swapped channels", "router", "structure"})


@dataclass(frozen=True)
class Shape:
    """The input on which a fault is visible. `decode` steps follow the prefill; `calls` repeats with other tokens."""

    batch: int = 2
    tokens: int = 32
    decode: int = 0
    padding: str = ""  # "left" or "right"
    calls: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """Words by which a verdict can name this phase or shape as not judged."""
        found = ["decode"] if self.decode else []
        found += ["padding", "padded"] if self.padding else []
        found += ["long", f"{self.tokens} tokens", "length"] if self.tokens not in (16, 32) else []
        found += ["batch"] if self.batch > 2 else []
        return tuple(found + (["rare", "rate"] if self.calls > 3 else []))


PLAIN = Shape()


@dataclass(frozen=True)
class Answer:
    """One right answer: any of these places (None: any) with any of these operators.

    An `edge` is what lies between two modules: blaming the output of a module there would be wrong, its input is right.
    """

    places: frozenset[Place] | None
    operators: frozenset[str]
    edge: bool = False

    def matches(self, place: Place, operator: str, tensor: str = "output") -> bool:
        here = self.places is None or place in self.places
        return here and operator in self.operators and not (self.edge and tensor == "output")


@dataclass(frozen=True)
class FaultCase:
    """A fault that noisescope's own simulator did not make."""

    name: str
    kind: str  # how it is made: forward, function, hook, cache, kernel ...
    model: str  # a key of field_models.MODELS
    dtype: str
    answers: tuple[Answer, ...]
    classes: frozenset[str]
    fault: Fault = field(compare=False)
    shape: Shape = PLAIN
    module: str = ""  # the module by which "not judged" can name it
    healthy: Fault | None = field(default=None, compare=False)  # the same kernel without the mistake

    @property
    def half(self) -> str:
        return half_of(self.name)

    @property
    def phase(self) -> str:
        return "decode" if self.shape.decode else "prefill"


def half_of(name: str) -> str:
    """The half that a name belongs to: a hash, so new cases never move old ones."""
    return HALVES[hashlib.sha256(name.encode()).digest()[0] % 2]


def order_of(name: str) -> str:
    """A fixed pseudo-random order, so that the first N of a half are a sample of it."""
    return hashlib.sha256(f"order {name}".encode()).hexdigest()


def at(place: Place | Iterable[Place] | None, operators: Iterable[str], *, edge: bool = False) -> Answer:
    """An answer: `at(2, LINEAR)`, `at((1, 2), NORM, edge=True)`, `at(None, ATTENTION)` for any block."""
    if place is None:
        return Answer(None, frozenset(operators), edge)
    places = (place,) if isinstance(place, (int, str)) else tuple(place)
    return Answer(frozenset(places), frozenset(operators), edge)
