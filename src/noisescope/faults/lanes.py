"""Faults with an address: output lanes, swapped channels, a tile of old data, a block with a wrong scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from noisescope.faults.values import RELATIVE_TO, Channels, Fault, Lanes, choice, number, whole

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
