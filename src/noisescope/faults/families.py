"""All fault families, in listing order. Does not import torch: effects.py implements them.

The first six are those of the original method notes, as they define them, at a tensor h of any operator's output:

==================  ==========================================================================================
dead_zone           h = 0 where |h| < m max|h|
saturation          clamp(h, -t, t), t = (1 - m) max|h| of this call (dynamic) or of the first one (absolute)
bias                h + m std(h)
noise               h + m mean|h| z,  z ~ N(0, 1) per element and call
spike               with chance 0.01 m per element: h = 10 max|h| z
non_determinism     amplified   h + 0.01 v std(h) z          suppressed   h + 0.01 / v std(h) z
                    biased      h + 0.01 std(h) z + 0.05 v std(h)
                    inconsistent  h + 0.01 u std(h) z, u ~ U(0.1, 5.1) once per call
                    correlated  h + 0.01 std(h) z_c, one z per channel, the same in every row
==================  ==========================================================================================

m = 0.3 and v (the variance factor) = 5 by default. max, std and mean are those of the whole tensor, massive activations
and all, and `relative_to` may name another of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.faults.fault import (
    CHANNELS,
    PRODUCTS,
    RELATIVE_TO,
    Channels,
    Fault,
    Lanes,
    checked,
    choice,
    flag,
    indices,
    number,
    precision,
    whole,
)

MODES = ("amplified", "suppressed", "inconsistent", "biased", "correlated")
FORMATS = ("bf16", "fp16")
ROUNDING = ("toward_zero", "down", "up")
HIGHEST_BIT = 63
ONE_OF_32 = Lanes(32)  # one lane of a unit 32 wide


def _relative_to(default: str) -> Any:
    return choice(default, RELATIVE_TO, mean="mean_abs")


@dataclass(frozen=True)
class _Sized(Fault):
    """A fault whose size is a share of max, std, mean or rms of the tensor."""

    magnitude: float = number(0.3, at_least=0)
    relative_to: str = _relative_to("max")


@dataclass(frozen=True)
class DeadZone(_Sized, family="dead_zone", fault_class="dead zone"):
    """Small values become 0."""


@dataclass(frozen=True)
class Saturation(_Sized, family="saturation", fault_class="saturation"):
    """Large values are clipped. Unless relative to max, the limit is m times it (`saturation:3,relative_to=rms`)."""

    absolute: bool = flag(False)  # the limit is that of the first call

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative_to == "max" and self.magnitude > 1:
            raise InvalidInput(f"magnitude of saturation must be from 0 to 1, got {self.magnitude!r}")


@dataclass(frozen=True)
class Spike(_Sized, family="spike", fault_class="spike"):
    """A few elements, different ones in every call, become far too large."""

    magnitude: float = number(0.3, at_least=0, at_most=100)
    height: float = number(10.0, at_least=0)


@dataclass(frozen=True)
class Noise(_Sized, family="noise", fault_class="noise"):
    """Gaussian noise that differs from call to call."""

    relative_to: str = _relative_to("mean_abs")


@dataclass(frozen=True)
class Bias(_Sized, family="bias", fault_class="bias"):
    """One constant is added to every element; a negative one with negative=True."""

    relative_to: str = _relative_to("std")
    negative: bool = flag(False)


@dataclass(frozen=True)
class NonDeterminism(Fault, family="non_determinism", fault_class="noise", sized_by="variance_factor"):
    """Run-to-run variation of a different size or kind than a healthy device shows."""

    variance_factor: float = number(5.0, at_least=1e-6)
    mode: str = choice("amplified", MODES)


@dataclass(frozen=True)
class StuckBit(Fault, family="stuck_bit", fault_class="stuck bit", sized_by="bit"):
    """One bit of the result's own dtype is held at 0 or 1.

    Bit 0 is the lowest of the mantissa, the highest is the sign.
    """

    bit: int = whole(12, at_least=0, at_most=HIGHEST_BIT)
    value: int = whole(1, at_least=0, at_most=1)


@dataclass(frozen=True)
class BitFlip(Fault, family="bit_flip", fault_class="spike", sized_by="share"):
    """A bit is flipped in random elements (`share`) or in given ones (`elements`, flat indices).

    `bit` None takes any bit of the dtype by chance. Other elements are hit in every call, unless `persistent`: then the
    same ones in every call of one shape. duration=1 is a single event. Elements beyond the tensor are not hit.
    """

    share: float = number(1e-3, at_least=0, at_most=1)
    bit: int | None = whole(None, at_least=0, at_most=HIGHEST_BIT)
    elements: tuple[int, ...] | None = checked(None, lambda value, label: indices(value, "elements"))
    persistent: bool = flag(False)


@dataclass(frozen=True)
class DeadLane(Fault, family="dead_lane", fault_class="dead lane", sized_by=None):
    """Output channels that are 0."""

    channels: Channels = field(default=ONE_OF_32, kw_only=True, metadata=CHANNELS)


@dataclass(frozen=True)
class StuckLane(Fault, family="stuck_lane", fault_class="dead lane"):
    """Output channels that always return one constant: `magnitude` times the rms (or max ...) of the first call."""

    magnitude: float = number(1.0)
    relative_to: str = choice("rms", RELATIVE_TO)
    channels: Channels = field(default=ONE_OF_32, kw_only=True, metadata=CHANNELS)


@dataclass(frozen=True)
class DeadKLane(
    Fault, family="dead_k_lane", fault_class="dead input lane", sized_by=None, operators=PRODUCTS, places_itself=True
):
    """Part of the inner dimension is left out of the sum: `channels` are those of the input."""

    channels: Channels = field(default=ONE_OF_32, kw_only=True, metadata=CHANNELS)


@dataclass(frozen=True)
class SwappedChannels(
    Fault, family="swapped_channels", fault_class="swapped channels", sized_by=None, places_itself=True
):
    """Each chosen channel changes places with the one `distance` further on; a channel moves at most once."""

    distance: int = whole(1, at_least=1)
    channels: Channels = field(default=ONE_OF_32, kw_only=True, metadata=CHANNELS)


@dataclass(frozen=True)
class Gain(Fault, family="gain", fault_class="gain"):
    """y (1 + m)."""

    magnitude: float = number(0.01)


@dataclass(frozen=True)
class Truncation(Fault, family="truncation", fault_class="truncation", sized_by="cut"):
    """The lowest `cut` bits of the result's mantissa are 0: a short output path that rounds toward zero."""

    cut: int = whole(4, at_least=1, at_most=52)


@dataclass(frozen=True)
class RoundingMode(Fault, family="rounding_mode", fault_class="rounding mode", sized_by=None, operators=PRODUCTS):
    """The exact product rounded "toward_zero", "down" or "up" to the output's dtype, not to nearest."""

    mode: str = choice("toward_zero", ROUNDING)


@dataclass(frozen=True)
class FlushToZero(Fault, family="flush_to_zero", fault_class="flush to zero"):
    """Results below a size become 0 and keep their sign; magnitude 0: those subnormal in their own dtype."""

    magnitude: float = number(0.0, at_least=0)
    relative_to: str = choice("absolute", RELATIVE_TO)


@dataclass(frozen=True)
class Accumulation(
    Fault, family="accumulation", fault_class="accumulation", sized_by="chunk", operators=(*PRODUCTS, "softmax")
):
    """The sum is kept in too few bits: s = round(s + sum over the next `chunk` terms), the chunk's own sum exact.

    `precision` is "bf16", "fp16" (Inf from 65520 on, as in the format) or a number of mantissa bits. In a softmax, this
    applies to the denominator.
    """

    chunk: int = whole(32, at_least=1)
    precision: str | int = precision("bf16", FORMATS)


@dataclass(frozen=True)
class InputTruncation(Fault, family="input_truncation", fault_class="truncation", sized_by="keep", operators=PRODUCTS):
    """Both operands of a product are cut to `keep` mantissa bits (10: TF32) toward zero before they are multiplied."""

    keep: int = whole(10, at_least=0, at_most=52)


@dataclass(frozen=True)
class ExpTable(Fault, family="exp_table", fault_class="function table", operators=("softmax",)):
    """A softmax whose exp is read from a table of this relative error, and `clip`: exp(t) for t < -clip is exp(-clip).

    What a mask shut out (-inf) stays out.
    """

    magnitude: float = number(0.005, at_least=0, at_most=1)
    clip: float | None = number(None, at_least=0)


@dataclass(frozen=True)
class ActivationTable(Fault, family="activation_table", fault_class="function table", operators=("silu", "gelu")):
    """silu or gelu z g(z) with the gate g (the sigmoid, Phi) read from a table of this relative error."""

    magnitude: float = number(0.02, at_least=0, at_most=1)


@dataclass(frozen=True)
class ActivationCutOff(
    Fault, family="activation_cut_off", fault_class="function table", sized_by="limit", operators=("silu", "gelu")
):
    """silu or gelu that gives 0 below -limit and z above it, as if the gate were shut or open there."""

    limit: float = number(4.0, at_least=0)


@dataclass(frozen=True)
class RsqrtTable(Fault, family="rsqrt_table", fault_class="function table", operators=("norm",)):
    """A norm whose 1 / sqrt(variance + eps) comes from a table of this relative error: each row has its own gain."""

    magnitude: float = number(0.02, at_least=0, at_most=1)


@dataclass(frozen=True)
class NormGain(Gain, family="norm_gain", operators=("norm",)):
    """A norm whose reciprocal root is too large by 1 + m; a bias is added after it."""


@dataclass(frozen=True)
class NormaliserGain(Gain, family="normaliser_gain", operators=("softmax",)):
    """A softmax whose rows sum to 1 + m."""


@dataclass(frozen=True)
class StaleTile(Fault, family="stale_tile", fault_class="stale data", sized_by=None, remembers=True):
    """A tile of the output is read before it is written: it holds what the previous call computed there.

    The output is taken as rows [R, C]; the first call of a scope is right. Of a call with other shapes the tile is as
    large as both calls have it.
    """

    rows: int = whole(16, at_least=1)
    columns: int = whole(32, at_least=1)
    row: int = whole(0, at_least=0)
    column: int = whole(0, at_least=0)


@dataclass(frozen=True)
class NanToZero(Fault, family="nan_to_zero", fault_class="nan to zero", sized_by=None):
    """NaN becomes 0 and Inf the largest finite number, as on devices that saturate: overflow goes unnoticed."""


@dataclass(frozen=True)
class BlockScale(Fault, family="block_scale", fault_class="block scale", sized_by="factor"):
    """One block of channels that share a scale (32 in MX formats, 16 in NVFP4) is scaled by a wrong factor.

    The factor of a wrong shared exponent is a power of two, that of a wrong E4M3 scale any. With tensor="input" the
    block lies along the inner dimension of a product, as the blocks of quantised operands do.
    """

    factor: float = number(2.0)
    width: int = whole(32, at_least=1)
    block: int = whole(0, at_least=0)
    tensor: str = choice("output", ("output", "input"))
