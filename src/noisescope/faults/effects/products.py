"""Faults inside a product, computed again from its operands."""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.faults import bits
from noisescope.faults.calls import Call, product, softmax_scores
from noisescope.faults.effects.dispatch import act
from noisescope.faults.memory import Memory, exact_dtype
from noisescope.faults.products import Accumulation, DeadKLane, InputTruncation, RoundingMode

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@act.register(DeadKLane)
def dead_k_lane(fault: DeadKLane, y: Tensor, call: Call, memory: Memory) -> Tensor:
    plain = product(call)
    mask = memory.mask(plain.inner, plain.a.device)
    a = torch.zeros_like(plain.a) if mask is None else plain.a.masked_fill(mask, 0)
    return plain.again(a, plain.b)


@act.register(Accumulation)
def accumulation(fault: Accumulation, y: Tensor, call: Call, memory: Memory) -> Tensor:
    exact = exact_dtype(y)
    if call.operator == "softmax":
        scores, dim = softmax_scores(call)
        wide = scores.to(exact).transpose(dim, -1)
        powers = (wide - wide.amax(-1, keepdim=True)).exp()
        total = powers.new_zeros((*powers.shape[:-1], 1))
        for start in range(0, powers.shape[-1], fault.chunk):
            total = _rounded(fault, total + powers[..., start : start + fault.chunk].sum(-1, keepdim=True))
        return (powers / total).transpose(dim, -1).to(y.dtype)
    plain = product(call)
    total = y.new_zeros((), dtype=exact)
    for start in range(0, plain.inner, fault.chunk):
        total = _rounded(fault, total + plain.part(start, min(start + fault.chunk, plain.inner), exact))
    return plain.finished(total).to(y.dtype)


def _rounded(fault: Accumulation, total: Tensor) -> Tensor:
    if isinstance(fault.precision, str):
        return total.to(_FORMATS[fault.precision]).to(total.dtype)
    return bits.round_mantissa(total.double(), fault.precision).to(total.dtype)


@act.register(InputTruncation)
def input_truncation(fault: InputTruncation, y: Tensor, call: Call, memory: Memory) -> Tensor:
    plain = product(call)
    return plain.again(_cut(fault, plain.a), _cut(fault, plain.b))


def _cut(fault: InputTruncation, x: Tensor) -> Tensor:
    return bits.cut_mantissa(x, max(0, bits.mantissa_bits(x.dtype) - fault.keep))


@act.register(RoundingMode)
def rounding_mode(fault: RoundingMode, y: Tensor, call: Call, memory: Memory) -> Tensor:
    exact = exact_dtype(y)
    if y.dtype == exact:
        raise InvalidInput(f"rounding_mode needs a wider dtype to round from, and {call.name} computes in {exact}")
    return bits.round_towards(product(call).exact(exact), y.dtype, fault.mode)
