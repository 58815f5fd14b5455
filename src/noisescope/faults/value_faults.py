"""The six fault families of the original method notes, as they define them, at a tensor h of any operator's output.

==================  ==========================================================================================
dead_zone           h = 0 where |h| < m max|h|
saturation          clamp(h, -t, t), t = (1 - m) max|h| of this call (dynamic) or of the first one (absolute)
bias                h + m std(h)
noise               h + m mean|h| z,  z ~ N(0, 1) per element and call
spike               with chance 0.01 m per element: h = 10 max|h| z
non_determinism     amplified   h + 0.01 v std(h) z          suppressed   h + 0.01 / v std(h) z
                    biased      h + 0.01 std(h) z + 0.05 v std(h)
                    inconsistent  h + 0.01 u std(h) z, u ~ U(0.1, 5.1) once a call
                    correlated  h + 0.01 std(h) z_c, one z per channel, the same in every row
==================  ==========================================================================================

m = 0.3 and v (the variance factor) = 5 by default. max, std and mean are those of the whole tensor, massive activations
and all, and `relative_to` may name another of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from noisescope.faults.fault import RELATIVE_TO, Fault, choice, indices, number, put, truth, whole

MODES = ("amplified", "suppressed", "inconsistent", "biased", "correlated")


@dataclass(frozen=True)
class _Sized(Fault):
    """A fault whose size is a share of max, std, mean or rms of the tensor."""

    magnitude: float = 0.3
    relative_to: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative_to == "mean":
            put(self, "relative_to", "mean_abs")
        choice(self, "relative_to", RELATIVE_TO)
        number(self, "magnitude", at_least=0)


@dataclass(frozen=True)
class DeadZone(_Sized):
    """Small values become 0."""

    family = "dead_zone"
    fault_class = "dead zone"


@dataclass(frozen=True)
class Saturation(_Sized):
    """Large values are cut. Relative to anything but max, the limit is m times it (`saturation:3,relative_to=rms`)."""

    absolute: bool = False  # the limit is that of the first call

    family = "saturation"
    fault_class = "saturation"

    def __post_init__(self) -> None:
        super().__post_init__()
        truth(self, "absolute")
        if self.relative_to == "max":
            number(self, "magnitude", at_least=0, at_most=1)


@dataclass(frozen=True)
class Bias(_Sized):
    """One constant is added to every element; a negative one with negative=True."""

    relative_to: str = "std"
    negative: bool = False

    family = "bias"
    fault_class = "bias"

    def __post_init__(self) -> None:
        super().__post_init__()
        truth(self, "negative")


@dataclass(frozen=True)
class Noise(_Sized):
    """Gaussian noise that differs from call to call."""

    relative_to: str = "mean_abs"

    family = "noise"
    fault_class = "noise"


@dataclass(frozen=True)
class Spike(_Sized):
    """A few elements, others in every call, become far too large."""

    height: float = 10.0

    family = "spike"
    fault_class = "spike"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=100)
        number(self, "height", at_least=0)


@dataclass(frozen=True)
class NonDeterminism(Fault):
    """Run-to-run variation of another size or kind than a healthy device has."""

    variance_factor: float = 5.0
    mode: str = "amplified"

    family = "non_determinism"
    fault_class = "noise"
    sized_by = "variance_factor"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self, "mode", MODES)
        number(self, "variance_factor", at_least=1e-6)


# Faults in how a result is written: bits, a short mantissa, flushed subnormals, NaN as 0, and a plain gain.


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
