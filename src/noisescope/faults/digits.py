"""Faults in how a result is written: bits, a short mantissa, flushed subnormals, NaN as 0, and a plain gain."""

from __future__ import annotations

from dataclasses import dataclass

from noisescope.faults.values import RELATIVE_TO, Fault, choice, indices, number, put, truth, whole

HIGHEST_BIT = 63


@dataclass(frozen=True)
class Gain(Fault):
    """y (1 + m)."""

    magnitude: float = 0.01

    family = "gain"
    fault_class = "gain"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude")


@dataclass(frozen=True)
class StuckBit(Fault):
    """One bit of the result's own dtype is held at 0 or 1.

    Bit 0 is the lowest of the mantissa, the highest is the sign.
    """

    bit: int = 12
    value: int = 1

    family = "stuck_bit"
    fault_class = "stuck bit"
    sized_by = "bit"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "bit", at_least=0, at_most=HIGHEST_BIT)
        whole(self, "value", at_least=0, at_most=1)


@dataclass(frozen=True)
class BitFlip(Fault):
    """A bit is turned over in elements hit by chance (`share`), or in given ones (`elements`, flat indices).

    `bit` None takes any bit of the dtype by chance. Other elements are hit in every call, unless `persistent`: then the
    same ones in every call of one shape. duration=1 is a single event. Elements beyond the tensor are not hit.
    """

    share: float = 1e-3
    bit: int | None = None
    elements: tuple[int, ...] | None = None
    persistent: bool = False

    family = "bit_flip"
    fault_class = "spike"
    sized_by = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "share", at_least=0, at_most=1)
        if self.bit is not None:
            whole(self, "bit", at_least=0, at_most=HIGHEST_BIT)
        if self.elements is not None:
            put(self, "elements", indices(self.elements, "elements"))
        truth(self, "persistent")


@dataclass(frozen=True)
class Truncation(Fault):
    """The lowest `cut` bits of the result's mantissa are 0: a short output path that rounds toward zero."""

    cut: int = 4

    family = "truncation"
    fault_class = "truncation"
    sized_by = "cut"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "cut", at_least=1, at_most=52)


@dataclass(frozen=True)
class FlushToZero(Fault):
    """Results below a size become 0 and keep their sign; magnitude 0: those subnormal in their own dtype."""

    magnitude: float = 0.0
    relative_to: str = "absolute"

    family = "flush_to_zero"
    fault_class = "flush to zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0)
        choice(self, "relative_to", RELATIVE_TO)


@dataclass(frozen=True)
class NanToZero(Fault):
    """NaN becomes 0 and Inf the largest finite number, as on devices that only saturate: overflow goes unseen."""

    family = "nan_to_zero"
    fault_class = "nan to zero"
    sized_by = None
