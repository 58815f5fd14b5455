"""What one law said at one place: kept or broken, by how much, on which channels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisescope.localization.laws.table import LAWS

ANALYSED = 1 << 20  # numbers of an output that are looked at, in whole rows
_TINY = 1e-300


@dataclass(frozen=True)
class LawResult:
    """One law at one operator. `strength` above 1 is broken; an exact law that is broken has inf."""

    law: str
    strength: float
    size: float = 0.0  # largest discrepancy, in `unit`
    floor: float = 0.0  # the smallest discrepancy that would have broken the law, in the same unit
    share: float = 0.0  # of elements that break it
    channels: tuple[int, ...] = ()  # () where more than half do
    elements: int = 0
    within_round_off: bool = False  # broken bit for bit, but no more than another order of summation may do
    unit: str = "of the rms"
    words: str = ""  # in place of the size, where there is none

    @property
    def broken(self) -> bool:
        return self.strength > 1

    def __str__(self) -> str:
        """`R17 (scaling by 2) off by 0.3 of the rms in 2.10 %`."""
        title = f"{self.law} ({LAWS[self.law].title})"
        if not self.broken:
            return title
        return (
            f"{title}: {self.words}"
            if self.words
            else f"{title} off by {self.size:.2g} {self.unit} in {self.share:.2%}"
        )


def exact(
    law: str,
    got: Tensor,
    expected: Tensor,
    *,
    allowed: Tensor | float = 0.0,
    scale: float | None = None,
    round_off: Tensor | None = None,
) -> LawResult:
    """A law that holds bit for bit, on float64 tensors [R, C].

    allowed: for numbers under the normal range of the dtype
    scale: the rms that sizes are relative to, where it is not that of `expected`
    round_off: what another order of summation may do; within it, the law is broken only on a stack that repeats itself
    """
    off = differing(got, expected)
    if isinstance(allowed, Tensor) or allowed > 0:
        off &= ~((got - expected).abs() <= allowed)
    if not bool(off.any()):
        return LawResult(law, 0.0, elements=got.numel())
    gap = (got - expected).abs()
    size = float(gap[off].max()) / max(rms(expected) if scale is None else scale, _TINY)
    within = round_off is not None and bool((gap <= round_off)[off].all())
    share = float(off.double().mean())
    finite = size if math.isfinite(size) else math.inf
    return LawResult(law, math.inf, finite, 0.0, share, columns(off), got.numel(), within)


def floored(law: str, error: Tensor, limit: Tensor, scale: float, unit: str = "of the rms") -> LawResult:
    """A law that holds within a limit for each element [R, C]; sizes are told relative to `scale`."""
    if not error.numel():
        return LawResult(law, 0.0)
    bad = ~(error.abs() <= limit)  # NaN is beyond every limit
    size = error.abs().nan_to_num(math.inf, posinf=math.inf)
    strength = float((size / limit.clamp_min(_TINY)).nan_to_num(math.inf, posinf=math.inf).max())
    scale = max(scale, _TINY)
    return LawResult(
        law,
        strength,
        float(size.max()) / scale,
        float(limit.median()) / scale,
        float(bad.double().mean()),
        columns(bad) if bool(bad.any()) else (),
        error.numel(),
        unit=unit,
    )


def worse(first: LawResult, second: LawResult) -> LawResult:
    """Of two readings of one law at one site (several calls): the stronger one, with the larger floor."""
    one, other = (second, first) if second.strength > first.strength else (first, second)
    return replace(one, floor=max(one.floor, other.floor), elements=one.elements + other.elements)


# -- tensors


def host(x: Tensor) -> Tensor:
    """Rows [R, C] on the host, in their own dtype."""
    return x.detach().to("cpu").reshape(-1, x.shape[-1])


def looked_at(y: Tensor, fewest: int = 2) -> Tensor:
    """Indices of the rows that are looked at: all, or as many as ANALYSED numbers hold, spread evenly."""
    width = max(1, y.shape[-1])
    total, most = y.numel() // width, max(fewest, ANALYSED // width)
    return torch.arange(total) if total <= most else torch.linspace(0, total - 1, most).long()


def rms(x: Tensor) -> float:
    finite = x.isfinite()
    return float(torch.where(finite, x, 0.0).square().mean().sqrt()) if x.numel() else 0.0


def differing(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors have other numbers (NaN equals itself, 0 equals -0)."""
    return (got != expected) & ~(got.isnan() & expected.isnan())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not bool(differing(a, b).any())


def columns(beyond: Tensor) -> tuple[int, ...]:
    """Channels with broken elements; () where they are more than half of all."""
    found = beyond.reshape(-1, beyond.shape[-1]).any(0).nonzero().flatten().tolist()
    return tuple(found) if len(found) * 2 <= beyond.shape[-1] else ()


def period(channels: Iterable[int], width: int) -> int | None:
    """The stride of a lane, if the channels are all those congruent modulo one number (at least three of them)."""
    found = sorted(channels)
    if len(found) < 3:
        return None
    step = found[1] - found[0]
    regular = all(b - a == step for a, b in itertools.pairwise(found))
    whole = found[0] < step and found[-1] + step >= width
    return step if regular and whole and step > 1 else None
