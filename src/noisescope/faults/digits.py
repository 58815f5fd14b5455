"""Faults in how a result is written: bits, a short mantissa, flushed subnormals, NaN as 0, and a plain gain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.faults import bits
from noisescope.faults.calls import Call
from noisescope.faults.memory import Memory, reference_size, wide
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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        return (wide(y) * (1 + self.magnitude)).to(y.dtype)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        return bits.stick_bit(y, self.bit, self.value)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        stream = memory.generator(y)
        if self.persistent:
            stream = torch.Generator(y.device).manual_seed(self.seed)
        if self.elements is None:
            hit = torch.rand(y.shape, generator=stream, device=y.device, dtype=torch.float64) < self.share
        else:
            name = f"elements of {y.numel()} on {y.device}"
            if name not in memory.kept:
                chosen = torch.zeros(y.numel(), dtype=torch.bool, device="cpu")
                chosen[[i for i in self.elements if i < y.numel()]] = True
                memory.kept[name] = chosen.to(y.device)
            hit = memory.kept[name].view(y.shape)
        which: int | Tensor | None = self.bit
        if which is None:
            which = torch.randint(bits.width(y.dtype), y.shape, generator=stream, device=y.device)
        return torch.where(hit, bits.flip_bits(y, which), y)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        return bits.cut_mantissa(y, self.cut)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        x = wide(y)
        limit: float | Tensor = torch.finfo(y.dtype).smallest_normal
        if self.magnitude:
            limit = self.magnitude * reference_size(y, self.relative_to)
        return torch.where(x.abs() < limit, torch.copysign(torch.zeros_like(x), x).to(y.dtype), y)


@dataclass(frozen=True)
class NanToZero(Fault):
    """NaN becomes 0 and Inf the largest finite number, as on devices that only saturate: overflow goes unseen."""

    family = "nan_to_zero"
    fault_class = "nan to zero"
    sized_by = None

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        return torch.nan_to_num(y, nan=0.0)
