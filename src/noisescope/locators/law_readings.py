"""What one law said at one place: kept or broken, by how much, on which channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from noisescope.locators.laws import LAWS


@dataclass(frozen=True)
class Reading:
    """One law at one operator. `strength` above 1 is broken; an exact law that is broken has inf."""

    law: str
    strength: float
    size: float = 0.0  # largest discrepancy, relative to the rms of the output
    floor: float = 0.0  # the smallest discrepancy that would have broken the law, in the same unit
    share: float = 0.0  # of elements that break it
    channels: tuple[int, ...] = ()  # () where more than half do
    elements: int = 0
    within_round_off: bool = False  # broken bit for bit, but no more than another order of summation may do
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return self.strength > 1

    def words(self) -> str:
        """`R17 (scaling by 2) broken by 0.3 of the rms in 2.1 % of elements`."""
        title = f"{self.law} ({LAWS[self.law].title})"
        if not self.broken:
            return title
        told = self.facts.get("words")
        return f"{title}: {told}" if told else f"{title} off by {self.size:.2g} of the rms in {self.share:.2%}"


def rms(x: Tensor) -> float:
    return float(x[x.isfinite()].square().mean().sqrt()) if bool(x.isfinite().any()) else 0.0


def columns(beyond: Tensor) -> tuple[int, ...]:
    """Channels with broken elements; () where they are more than half of all."""
    found = beyond.reshape(-1, beyond.shape[-1]).any(0).nonzero().flatten().tolist()
    return tuple(found) if len(found) * 2 <= beyond.shape[-1] else ()


def differing(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors have other numbers (NaN equals itself, 0 equals -0)."""
    return (got != expected) & ~(got.isnan() & expected.isnan())


def exact(law: str, got: Tensor, expected: Tensor, allowed: Tensor | float = 0.0, **facts: Any) -> Reading:
    """A law that holds bit for bit; `allowed` is for numbers under the normal range of the dtype."""
    off = differing(got, expected)
    if not isinstance(allowed, float) or allowed > 0:
        off &= ~((got - expected).abs() <= allowed)
    if not bool(off.any()):
        return Reading(law, 0.0, elements=got.numel())
    gap = (got - expected)[off].abs()
    finite = gap[gap.isfinite()]
    size = float(finite.max()) / max(rms(expected), 1e-300) if len(finite) == len(gap) else math.inf
    return Reading(law, math.inf, size, 0.0, float(off.double().mean()), columns(off), got.numel(), facts=facts)


def floored(law: str, error: Tensor, limit: Tensor, scale: float, **facts: Any) -> Reading:
    """A law that holds within a limit for each element; `scale` is the rms of the output."""
    bad = ~(error.abs() <= limit)  # NaN is beyond every limit
    strength = error.abs() / limit.clamp_min(1e-300)
    worst = float(strength.nan_to_num(math.inf, posinf=math.inf).max()) if error.numel() else 0.0
    size = float(error.abs().nan_to_num(math.inf, posinf=math.inf).max()) / max(scale, 1e-300) if error.numel() else 0.0
    return Reading(
        law,
        worst,
        size,
        float(limit.median()) / max(scale, 1e-300) if error.numel() else 0.0,
        float(bad.double().mean()) if error.numel() else 0.0,
        columns(bad) if bool(bad.any()) else (),
        error.numel(),
        facts=facts,
    )


def worse(first: Reading, second: Reading) -> Reading:
    """Of two readings of one law at one site (several calls): the stronger one, with the larger floor."""
    one, other = (second, first) if second.strength > first.strength else (first, second)
    return replace(one, floor=max(one.floor, other.floor), elements=one.elements + other.elements)


def period(channels: Iterable[int], width: int) -> int | None:
    """The stride of a lane, if the channels are all those congruent modulo one number (at least three of them)."""
    found = sorted(channels)
    if len(found) < 3:
        return None
    step = found[1] - found[0]
    regular = all(b - a == step for a, b in zip(found, found[1:], strict=False))
    whole = found[0] < step and found[-1] + step >= width
    return step if regular and whole and step > 1 else None


def host(x: Tensor) -> Tensor:
    """Rows [R, C] on the host, in their own dtype."""
    return x.detach().to("cpu").reshape(-1, x.shape[-1])


@torch.no_grad()
def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not bool(differing(a, b).any())
