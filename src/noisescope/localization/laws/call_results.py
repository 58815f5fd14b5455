"""What the laws of one call found: a judgement of each, and facts for classification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from noisescope.localization.error_pattern import Pattern
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.judge import Judgement, judge_law
from noisescope.localization.laws.output_statistics import Statistics
from noisescope.localization.laws.table import Law
from noisescope.localization.tensors import differing, host_rows

ANALYSED = 1 << 20  # numbers of an output that are examined, in whole rows
_RUNS = 4


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
    # fused attention and softmax
    ones: str = ""  # what breaks the sum of probabilities differs between "channels", or only between "rows"
    shift_overflows: bool = False
    read: tuple[Tensor, Tensor, Tensor, float] | None = None  # probabilities, q, k, scale
    activation: str = "silu"  # of an MLP
    pattern: Pattern | None = None  # of the errors, where the host knows the right numbers

    def to_dict(self) -> dict[str, Any]:
        """The facts that are known and can be printed."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, (bool, int, float, str, tuple)) and name != "read"
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

    results: dict[Law, Judgement] = field(default_factory=dict)
    facts: EvidenceFacts = field(default_factory=EvidenceFacts)
    skipped: list[str] = field(default_factory=list)

    @property
    def broken(self) -> dict[Law, Judgement]:
        return {law: result for law, result in self.results.items() if result.alarm}

    def add(self, result: Judgement) -> None:
        """Of several results of one law the strongest counts, with the largest tolerance."""
        law = cast(Law, result.test)
        known = self.results.setdefault(law, result)
        if known is result:
            return
        kept = result if result.strength > known.strength else known
        kept.visible_share = max(known.visible_share, result.visible_share)
        kept.tests = known.tests + result.tests
        self.results[law] = kept

    def check(self, law: Law, got: Tensor, expected: Tensor, bound: Tensor | None = None, **how: Any) -> Judgement:
        """Judge one law (judge.judge_law) and keep the result."""
        result = judge_law(law, got, expected, bound, **how)
        self.add(result)
        return result

    def add_statistics(self, found: Statistics, y: Tensor) -> None:
        """Broken if something was found that never happens by chance."""
        words = found.words(y.shape[-1])
        channels = (found.stuck_channels if found.stuck else ()) or found.dead
        channels = channels or (found.gap_channels if found.gap else ())
        result = Judgement({Law.OUTPUT_STATISTICS: math.inf if words else 0.0}, channels=set(channels))
        result.elements = result.tests = y.numel()
        result.said = f"{Law.OUTPUT_STATISTICS}: {words}"
        self.add(result)


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
