"""What all laws of one call said, and the facts that tell one kind of fault from another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from noisescope.localization.host_products import Recomputed
from noisescope.localization.laws.law_result import LawResult
from noisescope.localization.laws.statistics import Statistics

Known = Recomputed | tuple[Tensor, Tensor, Tensor]  # or (output, expected, limit), [R, C]


@dataclass
class EvidenceFacts:
    """Found mostly by further calls of a suspect; the defaults say nothing."""

    # does it repeat itself?
    random: bool = False  # differs from call to call
    stale: bool = False  # differs only after a call with other data
    changed_share: float = 1.0  # of the elements that differ, of all
    changed_in_channels: float = 1.0  # and of those in channels where any does
    # something linear
    statistics: Statistics = field(default_factory=Statistics)
    gap_size: float = 1.0  # of its gap round 0, relative to the rms
    lost_inputs: tuple[int, ...] = ()  # inner indices that reach no output
    at_zero: str = ""  # f(0), where it is not 0: "one bit", "constant", "constant channel", "varied"
    even: str = ""  # (f(x) + f(-x)) / 2: "constant", "within an ulp", "sign stuck", "other"
    at_top: str = ""  # only the largest break additivity: "short" or "beyond"
    few: bool = False  # so do only a few elements, by much
    truncates: float = 0.0  # share of the error that looks like rounding toward zero
    mean_square: float = math.inf  # of the error of additivity, in variances of healthy round-off
    additivity: tuple[Tensor, list[Tensor]] | None = None  # that error, and the outputs it comes from
    adds_up_by_halves: bool = False  # additivity holds as long as no bits of the input change
    coarse_sums: bool = False
    wrong_columns: tuple[int, ...] = ()  # columns of W that are read back wrong
    # fused attention and softmax
    ones: str = ""  # what breaks the sum of probabilities differs between "channels", or only between "rows"
    ones_size: float = 0.0
    ones_spread: float = 0.0
    shift_overflows: bool = False
    read: tuple[Tensor, Tensor, Tensor, float] | None = None  # probabilities, q, k, scale
    # an MLP as a whole
    activation: str = "silu"
    # where the right numbers are known
    expected: Known | None = None

    def told(self) -> dict[str, Any]:
        """Those that say something and can be printed."""
        plain = (bool, int, float, str, tuple)
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, plain) and name not in ("expected", "additivity", "read")
        }


@dataclass
class LawEvidence:
    """The readings of one call of an operator, facts, and laws that could not be tried."""

    results: list[LawResult] = field(default_factory=list)
    facts: EvidenceFacts = field(default_factory=EvidenceFacts)
    skipped: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(result.broken for result in self.results)
