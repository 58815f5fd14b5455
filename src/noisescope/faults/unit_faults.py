"""Faults with an address: output lanes, swapped channels, a tile of old data, a block with a wrong scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from noisescope.faults.fault import PRODUCTS, RELATIVE_TO, Channels, Fault, Lanes, choice, number, whole
from noisescope.faults.value_faults import Gain

ONE_OF_32 = Lanes(32)  # one lane of a unit 32 wide


@dataclass(frozen=True)
class DeadLane(Fault):
    """Output channels that are 0."""

    channels: Channels = field(default=ONE_OF_32, kw_only=True)

    family = "dead_lane"
    fault_class = "dead lane"
    sized_by = None


@dataclass(frozen=True)
class StuckLane(Fault):
    """Output channels that always give one constant: `magnitude` times the rms (or max ...) of the first call."""

    magnitude: float = 1.0
    relative_to: str = "rms"
    channels: Channels = field(default=ONE_OF_32, kw_only=True)

    family = "stuck_lane"
    fault_class = "dead lane"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude")
        choice(self, "relative_to", RELATIVE_TO)


@dataclass(frozen=True)
class SwappedChannels(Fault):
    """Each chosen channel changes places with the one `distance` further on; a channel moves at most once."""

    distance: int = 1
    channels: Channels = field(default=ONE_OF_32, kw_only=True)

    family = "swapped_channels"
    fault_class = "swapped channels"
    sized_by = None
    places_itself = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "distance", at_least=1)


@dataclass(frozen=True)
class StaleTile(Fault):
    """A tile of the output is read before it is written: it holds what the previous call computed there.

    The output is taken as rows [R, C]; the first call of a scope is right. Of a call with other shapes the tile is as
    large as both calls have it.
    """

    rows: int = 16
    columns: int = 32
    row: int = 0
    column: int = 0

    family = "stale_tile"
    fault_class = "stale data"
    sized_by = None
    remembers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "columns"):
            whole(self, name, at_least=1)
        for name in ("row", "column"):
            whole(self, name, at_least=0)


@dataclass(frozen=True)
class BlockScale(Fault):
    """One block of channels that share a scale (32 in MX formats, 16 in NVFP4) is scaled by a wrong factor.

    The factor of a wrong shared exponent is a power of two, that of a wrong E4M3 scale any. With tensor="input" the
    block lies along the inner dimension of a product, as the blocks of quantised operands do.
    """

    factor: float = 2.0
    width: int = 32
    block: int = 0
    tensor: str = "output"

    family = "block_scale"
    fault_class = "block scale"
    sized_by = "factor"

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "factor")
        whole(self, "width", at_least=1)
        whole(self, "block", at_least=0)
        choice(self, "tensor", ("output", "input"))


# Faults inside a product, computed again from its operands: lost terms, short sums, short operands, wrong rounding.


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


# Faults of the function units: exp, the gates of silu and gelu, rsqrt, and the gains they may have.


@dataclass(frozen=True)
class ExpTable(Fault):
    """A softmax whose exp is read from a table of this relative error, and `clip`: exp(t) for t < -clip is exp(-clip).

    What a mask shut out (-inf) stays out.
    """

    magnitude: float = 0.005
    clip: float | None = None

    family = "exp_table"
    fault_class = "function table"
    operators = ("softmax",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)
        if self.clip is not None:
            number(self, "clip", at_least=0)


@dataclass(frozen=True)
class ActivationTable(Fault):
    """silu or gelu z g(z) with the gate g (the sigmoid, Phi) read from a table of this relative error."""

    magnitude: float = 0.02

    family = "activation_table"
    fault_class = "function table"
    operators = ("silu", "gelu")

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)


@dataclass(frozen=True)
class ActivationCutOff(Fault):
    """silu or gelu that gives 0 below -limit and z above it, as if the gate were shut or open there."""

    limit: float = 4.0

    family = "activation_cut_off"
    fault_class = "function table"
    sized_by = "limit"
    operators = ("silu", "gelu")

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "limit", at_least=0)


@dataclass(frozen=True)
class RsqrtTable(Fault):
    """A norm whose 1 / sqrt(variance + eps) is read from a table of this relative error: a gain of each row's own."""

    magnitude: float = 0.02

    family = "rsqrt_table"
    fault_class = "function table"
    operators = ("norm",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)


@dataclass(frozen=True)
class NormGain(Gain):
    """A norm whose reciprocal root is too large by 1 + m; a bias is added after it."""

    family = "norm_gain"
    operators = ("norm",)


@dataclass(frozen=True)
class NormaliserGain(Gain):
    """A softmax whose rows sum to 1 + m."""

    family = "normaliser_gain"
    operators = ("softmax",)
