"""What a ledger holds: alarms, what the looks could have seen, fingerprints of calls."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.locators.floors import INTEGERS
from noisescope.locators.judge import Judgement
from noisescope.locators.pattern import Evidence, Pattern
from noisescope.sites import Site


@dataclass
class Alarm:
    """The strongest alarm at one site."""

    site: Site
    batch: int
    order: int
    judgement: Judgement
    pattern: Pattern
    evidence: Evidence  # what belongs there: another call may hold it
    stale: bool = False

    def says_as_much_as(self, other: Judgement) -> bool:
        return (self.judgement.strength, self.judgement.bad) >= (other.strength, other.bad)


@dataclass
class Power:
    """What the looks at one kind of operator could have seen; the worst site counts."""

    sites: set[Site] = field(default_factory=set)
    element: float = 0.0
    mean: float = 0.0
    gain: float = 0.0

    def add(self, site: Site, judgement: Judgement) -> None:
        self.sites.add(site)
        self.element = max(self.element, judgement.visible_element)
        self.mean = max(self.mean, judgement.visible_mean)
        self.gain = max(self.gain, judgement.visible_gain)

    def to_dict(self) -> dict[str, Any]:
        return {
            "sites": len(self.sites),
            "element_ulp": _finite(round(self.element, 2)),
            "mean_ulp": _finite(round(self.mean, 3)),
            "gain": _finite(float(f"{self.gain:.2g}")),
        }


def _finite(number: float) -> float | None:
    """None where nothing of the kind could be seen (the mean of one row), as JSON has no infinity."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Print:
    """A call by the hashes of its bits: the same inputs again must give the same output."""

    given: bytes
    output: bytes
    weights: tuple[int, ...]

    @classmethod
    def of(cls, given: tuple[Any, ...], y: Tensor, callee: Any) -> Print:
        return cls(_hash(given), _hash((y,)), _weights(callee))


def _weights(callee: Any) -> tuple[int, ...]:
    """The bits of a module's own parameters, summed where they lie."""
    own = callee._parameters.values() if isinstance(callee, nn.Module) else ()
    plain = [p.detach() for p in own if type(p) is nn.Parameter and not p.is_meta]
    return tuple(int(p.contiguous().view(INTEGERS[p.itemsize]).sum(dtype=torch.int64)) for p in plain)


def _hash(values: tuple[Any, ...]) -> bytes:
    """Of the tensors among some values."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            plain = value.detach().to("cpu").contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()
