"""The results of the laws of one call: each law satisfied or broken and by how much, with facts for classification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import Recomputed
from noisescope.localization.laws.output_statistics import Statistics
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import Reference
from noisescope.localization.tensors import channels_with, differing, host_rows, rms

ANALYSED = 1 << 20  # numbers of an output that are examined, in whole rows
TINY = 1e-300
_RUNS = 4


@dataclass(frozen=True)
class LawResult:
    """One law at one operator. It is broken if `strength` exceeds 1; a broken exact law has inf."""

    law: Law
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
        """`scaling by 2 off by 0.3 of the rms in 2.10 %`."""
        if not self.broken:
            return self.law
        return (
            f"{self.law}: {self.words}"
            if self.words
            else (f"{self.law} off by {self.size:.2g} {self.unit} in {100 * self.share:.2f} %")
        )


def exact(
    law: Law,
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
    size = float(gap[off].max()) / max(rms(expected) if scale is None else scale, TINY)
    within = round_off is not None and bool((gap <= round_off)[off].all())
    share = float(off.double().mean())
    finite = size if math.isfinite(size) else math.inf
    return LawResult(law, math.inf, finite, 0.0, share, channels_with(off), got.numel(), within)


def floored(law: Law, error: Tensor, limit: Tensor, scale: float, unit: str = "of the rms") -> LawResult:
    """A law that holds within a tolerance per element [R, C]; sizes are relative to `scale`."""
    if not error.numel():
        return LawResult(law, 0.0)
    bad = ~(error.abs() <= limit)  # NaN is beyond every limit
    size = error.abs().nan_to_num(math.inf, posinf=math.inf)
    strength = float((size / limit.clamp_min(TINY)).nan_to_num(math.inf, posinf=math.inf).max())
    scale = max(scale, TINY)
    return LawResult(
        law,
        strength,
        float(size.max()) / scale,
        float(limit.median()) / scale,
        float(bad.double().mean()),
        channels_with(bad) if bool(bad.any()) else (),
        error.numel(),
        unit=unit,
    )


def worse(first: LawResult, second: LawResult) -> LawResult:
    """Of two results of one law at one site (several calls): the stronger one, with the larger tolerance."""
    one, other = (second, first) if second.strength > first.strength else (first, second)
    return replace(one, floor=max(one.floor, other.floor), elements=one.elements + other.elements)


@dataclass
class EvidenceFacts:
    """Facts about a suspect, mostly from further calls; the defaults mean "unknown"."""

    # does it repeat itself?
    random: bool = False  # differs from call to call
    stale: bool = False  # differs only after a call with other data
    changed_share: float = 1.0  # of the elements that differ, of all
    changed_in_channels: float = 1.0  # and of those in channels where any does
    # something linear
    statistics: Statistics = field(default_factory=Statistics)
    gap_size: float = 1.0  # of its gap around 0, relative to the rms
    lost_inputs: tuple[int, ...] = ()  # inner indices that reach no output
    at_zero: str = ""  # f(0), where it is not 0: "one bit", "constant", "constant channel", "varied"
    even: str = ""  # (f(x) + f(-x)) / 2: "constant", "within an ulp", "sign stuck", "other"
    at_top: str = ""  # only the largest break additivity: "short" or "beyond"
    few: bool = False  # only a few elements do, by a large amount
    truncates: float = 0.0  # share of the error that looks like rounding toward zero
    mean_square: float = math.inf  # of the error of additivity, in variances of healthy round-off
    additivity: tuple[Tensor, list[Tensor]] | None = None  # that error, and the outputs it comes from
    adds_up_by_halves: bool = False  # additivity holds as long as no bits of the input change
    coarse_sums: bool = False
    # fused attention and softmax
    ones: str = ""  # what breaks the sum of probabilities differs between "channels", or only between "rows"
    ones_size: float = 0.0
    ones_spread: float = 0.0
    shift_overflows: bool = False
    read: tuple[Tensor, Tensor, Tensor, float] | None = None  # probabilities, q, k, scale
    # an MLP as a whole
    activation: str = "silu"
    # where the right numbers are known
    expected: Recomputed | None = None

    def to_dict(self) -> dict[str, Any]:
        """The facts that are known and can be printed."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, (bool, int, float, str, tuple)) and name not in ("additivity", "read")
        }

    def count_changes(self, changed: Tensor) -> None:
        """How many elements [R, C] changed, of all and of the channels in which any did."""
        hit = changed.any(0)
        if bool(hit.any()):
            self.changed_share = float(changed.double().mean())
            self.changed_in_channels = float(changed[:, hit].double().mean())


@dataclass
class LawEvidence:
    """The results of one call of an operator, facts, and laws that could not be tested."""

    results: list[LawResult] = field(default_factory=list)
    facts: EvidenceFacts = field(default_factory=EvidenceFacts)
    skipped: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(result.broken for result in self.results)

    def add(self, *results: LawResult) -> None:
        self.results += results

    def add_statistics(self, found: Statistics, y: Tensor) -> None:
        """Broken if something was found that never happens by chance."""
        words = found.words(y.shape[-1])
        channels = (found.stuck_channels if found.stuck else ()) or found.dead
        channels = channels or (found.gap_channels if found.gap else ())
        size, strength = found.gap / max(rms(y.double()), TINY), math.inf if words else 0.0
        law = Law.OUTPUT_STATISTICS
        self.add(LawResult(law, strength, size, 0.0, found.gap_share, channels, y.numel(), words=words))


def known_values(y: Tensor, expected: Tensor, limit: Tensor) -> Recomputed:
    """An output, its expected value, and its tolerance, [R, C]."""
    return Recomputed(y, Reference(expected, (limit / 2,)))


def sampled_rows(y: Tensor, fewest: int = 2) -> Tensor:
    """Indices of the rows to examine: all, or as many as fit into ANALYSED numbers, evenly spaced."""
    width = max(1, y.shape[-1])
    total, most = y.numel() // width, max(fewest, ANALYSED // width)
    return torch.arange(total) if total <= most else torch.linspace(0, total - 1, most).long()


def check_repeatability(
    call: Callable[[Tensor], Tensor], x: Tensor, base: Tensor, other: Tensor | None, facts: EvidenceFacts
) -> Tensor:
    """Call a suspect again: is it `random`, is it `stale`, how many elements change? Returns the settled output.

    `other` is another input (rows shifted by one) called in between: a call after it that differs from those that agree
    with each other depends on what was computed before.
    """
    runs = [call(x) for _ in range(_RUNS)]
    if other is not None:
        call(other)
    after = None if other is None else call(x)
    with host_arithmetic():
        kept = [host_rows(run).double() for run in runs[1:]]  # the first may still hold what an earlier call left
        y, first = kept[-1], host_rows(base).double()
        changed = torch.stack([differing(run, y) for run in kept[:-1]]).any(0)
        facts.random = bool(changed.any())
        if not facts.random:
            remembers = after is not None and bool(differing(host_rows(after).double(), y).any())
            facts.stale = remembers or bool(differing(first, y).any())
        facts.count_changes(changed | differing(first, y))
        return y
