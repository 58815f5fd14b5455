"""How a result is written: bits, a short mantissa, flushed subnormals, NaN as 0, and a plain gain."""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.faults import bits
from noisescope.faults.calls import Call
from noisescope.faults.digits import BitFlip, FlushToZero, Gain, NanToZero, StuckBit, Truncation
from noisescope.faults.effects.dispatch import act
from noisescope.faults.memory import Memory, reference_size, wide


@act.register(Gain)
def gain(fault: Gain, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return (wide(y) * (1 + fault.magnitude)).to(y.dtype)


@act.register(StuckBit)
def stuck_bit(fault: StuckBit, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return bits.stick_bit(y, fault.bit, fault.value)


@act.register(BitFlip)
def bit_flip(fault: BitFlip, y: Tensor, call: Call, memory: Memory) -> Tensor:
    stream = memory.generator(y)
    if fault.persistent:
        stream = torch.Generator(y.device).manual_seed(fault.seed)
    if fault.elements is None:
        hit = torch.rand(y.shape, generator=stream, device=y.device, dtype=torch.float64) < fault.share
    else:
        name = f"elements of {y.numel()} on {y.device}"
        if name not in memory.kept:
            chosen = torch.zeros(y.numel(), dtype=torch.bool, device="cpu")
            chosen[[i for i in fault.elements if i < y.numel()]] = True
            memory.kept[name] = chosen.to(y.device)
        hit = memory.kept[name].view(y.shape)
    which: int | Tensor | None = fault.bit
    if which is None:
        which = torch.randint(bits.width(y.dtype), y.shape, generator=stream, device=y.device)
    return torch.where(hit, bits.flip_bits(y, which), y)


@act.register(Truncation)
def truncation(fault: Truncation, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return bits.cut_mantissa(y, fault.cut)


@act.register(FlushToZero)
def flush_to_zero(fault: FlushToZero, y: Tensor, call: Call, memory: Memory) -> Tensor:
    x = wide(y)
    limit: float | Tensor = torch.finfo(y.dtype).smallest_normal
    if fault.magnitude:
        limit = fault.magnitude * reference_size(y, fault.relative_to)
    return torch.where(x.abs() < limit, torch.copysign(torch.zeros_like(x), x).to(y.dtype), y)


@act.register(NanToZero)
def nan_to_zero(fault: NanToZero, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return torch.nan_to_num(y, nan=0.0)
