"""Faults inside a product, computed again from its operands: lost terms, short sums, short operands, wrong rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

from noisescope.faults.lanes import ONE_OF_32
from noisescope.faults.values import PRODUCTS, Channels, Fault, choice, whole

FORMATS = ("bf16", "fp16")
ROUNDING = ("toward_zero", "down", "up")


@dataclass(frozen=True)
class DeadKLane(Fault):
    """A part of the inner dimension is not summed: `channels` are those of the input."""

    channels: Channels = field(default=ONE_OF_32, kw_only=True)

    family = "dead_k_lane"
    fault_class = "dead input lane"
    sized_by = None
    operators = PRODUCTS
    places_itself = True


@dataclass(frozen=True)
class Accumulation(Fault):
    """The sum is kept in too few bits: s = round(s + sum over the next `chunk` terms), the chunk's own sum exact.

    `precision` is "bf16", "fp16" (Inf from 65520 on, as the format has it) or a number of mantissa bits. At a softmax
    it is the denominator that is summed so.
    """

    chunk: int = 32
    precision: str | int = "bf16"

    family = "accumulation"
    fault_class = "accumulation"
    sized_by = "chunk"
    operators = (*PRODUCTS, "softmax")

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "chunk", at_least=1)
        if isinstance(self.precision, str):
            choice(self, "precision", FORMATS)
        else:
            whole(self, "precision", at_least=1, at_most=52)


@dataclass(frozen=True)
class InputTruncation(Fault):
    """Both operands of a product are cut to `keep` mantissa bits (10: TF32) toward zero before they are multiplied."""

    keep: int = 10

    family = "input_truncation"
    fault_class = "truncation"
    sized_by = "keep"
    operators = PRODUCTS

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "keep", at_least=0, at_most=52)


@dataclass(frozen=True)
class RoundingMode(Fault):
    """The exact product rounded "toward_zero", "down" or "up" to the output's dtype, not to nearest."""

    mode: str = "toward_zero"

    family = "rounding_mode"
    fault_class = "rounding mode"
    sized_by = None
    operators = PRODUCTS

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self, "mode", ROUNDING)
