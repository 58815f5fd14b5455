"""Output lanes, swapped channels, a tile of old data, a block with a wrong scale."""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.faults.calls import Call, product
from noisescope.faults.effects.dispatch import act
from noisescope.faults.lanes import BlockScale, DeadLane, StaleTile, StuckLane, SwappedChannels
from noisescope.faults.memory import Memory, reference_size, wide


@act.register(DeadLane)
def dead_lane(fault: DeadLane, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return torch.zeros_like(y)


@act.register(StuckLane)
def stuck_lane(fault: StuckLane, y: Tensor, call: Call, memory: Memory) -> Tensor:
    value = memory.first("value", fault.magnitude * reference_size(y, fault.relative_to))
    return value.to(y.device, y.dtype).expand_as(y).clone()


@act.register(SwappedChannels)
def swapped_channels(fault: SwappedChannels, y: Tensor, call: Call, memory: Memory) -> Tensor:
    name = f"order of {y.shape[-1]} on {y.device}"
    if name not in memory.kept:
        order = _order(fault, y.shape[-1], memory.mask(y.shape[-1], torch.device("cpu")))
        memory.kept[name] = order.to(y.device)
    return y.index_select(-1, memory.kept[name])


def _order(fault: SwappedChannels, width: int, mask: Tensor | None) -> Tensor:
    order = list(range(width))
    for c in range(width - fault.distance) if mask is None else mask.nonzero().flatten().tolist():
        other = c + fault.distance
        if other < width and order[c] == c and order[other] == other:
            order[c], order[other] = other, c
    return torch.tensor(order, device="cpu")


@act.register(StaleTile)
def stale_tile(fault: StaleTile, y: Tensor, call: Call, memory: Memory) -> Tensor:
    if fault.column >= y.shape[-1]:
        raise InvalidInput(f"stale_tile begins at column {fault.column}, but the output has {y.shape[-1]}")
    new = y.clone(memory_format=torch.contiguous_format)
    rows = new.view(-1, y.shape[-1])
    tile = rows[fault.row : fault.row + fault.rows, fault.column : fault.column + fault.columns]
    before = memory.kept.get("tile")
    if len(tile):  # a call too short to reach the tile leaves it as it was
        memory.kept["tile"] = tile.clone()
    if before is not None:
        height, width = min(len(before), len(tile)), min(before.shape[1], tile.shape[1])
        tile[:height, :width] = before[:height, :width]
    return new


@act.register(BlockScale)
def block_scale(fault: BlockScale, y: Tensor, call: Call, memory: Memory) -> Tensor:
    if fault.tensor == "output":
        return _scaled(fault, y)
    plain = product(call)
    return plain.again(_scaled(fault, plain.a), plain.b)


def _scaled(fault: BlockScale, x: Tensor) -> Tensor:
    start, stop = fault.block * fault.width, (fault.block + 1) * fault.width
    if start >= x.shape[-1]:
        raise InvalidInput(f"block {fault.block} of {fault.width} channels begins beyond the {x.shape[-1]} there are")
    new = x.clone()
    new[..., start:stop] = (wide(x[..., start:stop]) * fault.factor).to(x.dtype)
    return new
