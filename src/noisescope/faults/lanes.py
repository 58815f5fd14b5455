"""Faults with an address: output lanes, swapped channels, a tile of old data, a block with a wrong scale."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.faults.calls import Call, product
from noisescope.faults.memory import Memory, reference_size, wide
from noisescope.faults.values import RELATIVE_TO, Channels, Fault, Lanes, choice, number, whole

ONE_OF_32 = Lanes(32)  # one lane of a unit 32 wide


@dataclass(frozen=True)
class DeadLane(Fault):
    """Output channels that are 0."""

    channels: Channels = field(default=ONE_OF_32, kw_only=True)

    family = "dead_lane"
    fault_class = "dead lane"
    sized_by = None

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        return torch.zeros_like(y)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        value = memory.first("value", self.magnitude * reference_size(y, self.relative_to))
        return value.to(y.device, y.dtype).expand_as(y).clone()


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        name = f"order of {y.shape[-1]} on {y.device}"
        if name not in memory.kept:
            order = self._order(y.shape[-1], memory.mask(y.shape[-1], torch.device("cpu")))
            memory.kept[name] = order.to(y.device)
        return y.index_select(-1, memory.kept[name])

    def _order(self, width: int, mask: Tensor | None) -> Tensor:
        order = list(range(width))
        for c in range(width - self.distance) if mask is None else mask.nonzero().flatten().tolist():
            other = c + self.distance
            if other < width and order[c] == c and order[other] == other:
                order[c], order[other] = other, c
        return torch.tensor(order, device="cpu")


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        if self.column >= y.shape[-1]:
            raise InvalidInput(f"stale_tile begins at column {self.column}, but the output has {y.shape[-1]}")
        new = y.clone(memory_format=torch.contiguous_format)
        rows = new.view(-1, y.shape[-1])
        tile = rows[self.row : self.row + self.rows, self.column : self.column + self.columns]
        before = memory.kept.get("tile")
        if len(tile):  # a call too short to reach the tile leaves it as it was
            memory.kept["tile"] = tile.clone()
        if before is not None:
            height, width = min(len(before), len(tile)), min(before.shape[1], tile.shape[1])
            tile[:height, :width] = before[:height, :width]
        return new


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        if self.tensor == "output":
            return self._scaled(y)
        plain = product(call)
        return plain.again(self._scaled(plain.a), plain.b)

    def _scaled(self, x: Tensor) -> Tensor:
        start, stop = self.block * self.width, (self.block + 1) * self.width
        if start >= x.shape[-1]:
            raise InvalidInput(f"block {self.block} of {self.width} channels begins beyond the {x.shape[-1]} there are")
        new = x.clone()
        new[..., start:stop] = (wide(x[..., start:stop]) * self.factor).to(x.dtype)
        return new
