"""Faults inside a product, computed again from its operands: lost terms, short sums, short operands, wrong rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.faults import bits
from noisescope.faults.calls import Call, product, softmax_scores
from noisescope.faults.lanes import ONE_OF_32
from noisescope.faults.memory import Memory, exact_dtype
from noisescope.faults.values import PRODUCTS, Channels, Fault, choice, whole

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        plain = product(call)
        mask = memory.mask(plain.inner, plain.a.device)
        a = torch.zeros_like(plain.a) if mask is None else plain.a.masked_fill(mask, 0)
        return plain.again(a, plain.b)


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
            choice(self, "precision", _FORMATS)
        else:
            whole(self, "precision", at_least=1, at_most=52)

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        exact = exact_dtype(y)
        if call.operator == "softmax":
            scores, dim = softmax_scores(call)
            wide = scores.to(exact).transpose(dim, -1)
            powers = (wide - wide.amax(-1, keepdim=True)).exp()
            total = powers.new_zeros((*powers.shape[:-1], 1))
            for start in range(0, powers.shape[-1], self.chunk):
                total = self._rounded(total + powers[..., start : start + self.chunk].sum(-1, keepdim=True))
            return (powers / total).transpose(dim, -1).to(y.dtype)
        plain = product(call)
        total = y.new_zeros((), dtype=exact)
        for start in range(0, plain.inner, self.chunk):
            total = self._rounded(total + plain.part(start, min(start + self.chunk, plain.inner), exact))
        return plain.finished(total).to(y.dtype)

    def _rounded(self, total: Tensor) -> Tensor:
        if isinstance(self.precision, str):
            return total.to(_FORMATS[self.precision]).to(total.dtype)
        return bits.round_mantissa(total.double(), self.precision).to(total.dtype)


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        plain = product(call)
        return plain.again(self._cut(plain.a), self._cut(plain.b))

    def _cut(self, x: Tensor) -> Tensor:
        return bits.cut_mantissa(x, max(0, bits.mantissa_bits(x.dtype) - self.keep))


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

    def act(self, y: Tensor, call: Call, memory: Memory) -> Tensor:
        exact = exact_dtype(y)
        if y.dtype == exact:
            raise InvalidInput(f"rounding_mode needs a wider dtype to round from, and {call.name} computes in {exact}")
        return bits.round_towards(product(call).exact(exact), y.dtype, self.mode)
