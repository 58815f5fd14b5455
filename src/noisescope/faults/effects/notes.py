"""The six fault families of the original method notes."""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.faults.calls import Call
from noisescope.faults.effects.dispatch import act
from noisescope.faults.memory import Memory, reference_size, wide
from noisescope.faults.notes import Bias, DeadZone, Noise, NonDeterminism, Saturation, Spike

_JITTER = 0.01  # of std(h): the run-to-run variation that non-determinism alters
_OFFSET = 0.05  # of std(h), times the variance factor


@act.register(DeadZone)
def dead_zone(fault: DeadZone, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return y.masked_fill(wide(y).abs() < fault.magnitude * reference_size(y, fault.relative_to), 0)


@act.register(Saturation)
def saturation(fault: Saturation, y: Tensor, call: Call, memory: Memory) -> Tensor:
    share = 1 - fault.magnitude if fault.relative_to == "max" else fault.magnitude
    limit = share * reference_size(y, fault.relative_to)
    if fault.absolute:
        limit = memory.first("limit", limit).to(y.device)
    return wide(y).clamp(-limit, limit).to(y.dtype)


@act.register(Bias)
def bias(fault: Bias, y: Tensor, call: Call, memory: Memory) -> Tensor:
    size = -fault.magnitude if fault.negative else fault.magnitude
    return (wide(y) + size * reference_size(y, fault.relative_to)).to(y.dtype)


@act.register(Noise)
def noise(fault: Noise, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return (wide(y) + memory.normal(y) * (fault.magnitude * reference_size(y, fault.relative_to))).to(y.dtype)


@act.register(Spike)
def spike(fault: Spike, y: Tensor, call: Call, memory: Memory) -> Tensor:
    hit = memory.uniform(y) < 0.01 * fault.magnitude
    spikes = memory.normal(y) * (fault.height * reference_size(y, fault.relative_to))
    return torch.where(hit, spikes.to(y.dtype), y)


@act.register(NonDeterminism)
def non_determinism(fault: NonDeterminism, y: Tensor, call: Call, memory: Memory) -> Tensor:
    std = reference_size(y, "std")
    factor: float | Tensor = 1.0
    if fault.mode == "amplified":
        factor = fault.variance_factor
    elif fault.mode == "suppressed":
        factor = 1 / fault.variance_factor
    elif fault.mode == "inconsistent":
        factor = 0.1 + 5.0 * memory.uniform(y, ())
    shape = (*(1,) * (y.dim() - 1), y.shape[-1]) if fault.mode == "correlated" else None
    error = memory.normal(y, shape) * (_JITTER * factor * std)
    if fault.mode == "biased":
        error = error + _OFFSET * fault.variance_factor * std
    return (wide(y) + error).to(y.dtype)
