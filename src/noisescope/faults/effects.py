"""`act`: computes the faulty output of an operator, with one function per fault family.

The fault values (families.py) do not import torch, so a wrong fault specification is rejected before torch is loaded.
"""

from __future__ import annotations

import math
from functools import singledispatch

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.faults import bit_patterns, families
from noisescope.faults.fault import Fault
from noisescope.faults.fault_state import Memory, exact_dtype, reference_size, wide
from noisescope.faults.operand_extraction import computed_for, input_of, product, softmax_scores
from noisescope.probe.recorded_call import RecordedCall


@singledispatch
def act(fault: Fault, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    """The faulty output, as a new tensor of y's shape and dtype; y itself is unchanged."""
    raise NotImplementedError(f"no effect is registered for {type(fault).__name__}")


# The six fault families of the original method notes.


_JITTER = 0.01  # of std(h): the run-to-run variation that non-determinism alters
_OFFSET = 0.05  # of std(h), times the variance factor


@act.register
def dead_zone(fault: families.DeadZone, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return y.masked_fill(wide(y).abs() < fault.magnitude * reference_size(y, fault.relative_to), 0)


@act.register
def saturation(fault: families.Saturation, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    share = 1 - fault.magnitude if fault.relative_to == "max" else fault.magnitude
    limit = share * reference_size(y, fault.relative_to)
    if fault.absolute:
        limit = memory.first("limit", limit).to(y.device)
    return wide(y).clamp(-limit, limit).to(y.dtype)


@act.register
def bias(fault: families.Bias, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    size = -fault.magnitude if fault.negative else fault.magnitude
    return (wide(y) + size * reference_size(y, fault.relative_to)).to(y.dtype)


@act.register
def noise(fault: families.Noise, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return (wide(y) + memory.normal(y) * (fault.magnitude * reference_size(y, fault.relative_to))).to(y.dtype)


@act.register
def spike(fault: families.Spike, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    hit = memory.uniform(y) < 0.01 * fault.magnitude
    spikes = memory.normal(y) * (fault.height * reference_size(y, fault.relative_to))
    return torch.where(hit, spikes.to(y.dtype), y)


@act.register
def non_determinism(fault: families.NonDeterminism, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
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


# How a result is written: bits, a short mantissa, flushed subnormals, NaN as 0, and a plain gain.


@act.register
def gain(fault: families.Gain, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return (wide(y) * (1 + fault.magnitude)).to(y.dtype)


@act.register
def stuck_bit(fault: families.StuckBit, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return bit_patterns.stick_bit(y, fault.bit, fault.value)


@act.register
def bit_flip(fault: families.BitFlip, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
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
        which = torch.randint(bit_patterns.width(y.dtype), y.shape, generator=stream, device=y.device)
    return torch.where(hit, bit_patterns.flip_bits(y, which), y)


@act.register
def truncation(fault: families.Truncation, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return bit_patterns.cut_mantissa(y, fault.cut)


@act.register
def flush_to_zero(fault: families.FlushToZero, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    x = wide(y)
    limit: float | Tensor = torch.finfo(y.dtype).smallest_normal
    if fault.magnitude:
        limit = fault.magnitude * reference_size(y, fault.relative_to)
    return torch.where(x.abs() < limit, torch.copysign(torch.zeros_like(x), x).to(y.dtype), y)


@act.register
def nan_to_zero(fault: families.NanToZero, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return torch.nan_to_num(y, nan=0.0)


# Output lanes, swapped channels, a tile of old data, a block with a wrong scale.


@act.register
def dead_lane(fault: families.DeadLane, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return torch.zeros_like(y)


@act.register
def stuck_lane(fault: families.StuckLane, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    value = memory.first("value", fault.magnitude * reference_size(y, fault.relative_to))
    return value.to(y.device, y.dtype).expand_as(y).clone()


@act.register
def swapped_channels(fault: families.SwappedChannels, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    name = f"order of {y.shape[-1]} on {y.device}"
    if name not in memory.kept:
        order = _order(fault, y.shape[-1], memory.mask(y.shape[-1], torch.device("cpu")))
        memory.kept[name] = order.to(y.device)
    return y.index_select(-1, memory.kept[name])


def _order(fault: families.SwappedChannels, width: int, mask: Tensor | None) -> Tensor:
    order = list(range(width))
    for c in range(width - fault.distance) if mask is None else mask.nonzero().flatten().tolist():
        other = c + fault.distance
        if other < width and order[c] == c and order[other] == other:
            order[c], order[other] = other, c
    return torch.tensor(order, device="cpu")


@act.register
def stale_tile(fault: families.StaleTile, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    if fault.column >= y.shape[-1]:
        raise InvalidInput(f"stale_tile starts at column {fault.column}, but the output has {y.shape[-1]} columns")
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


@act.register
def block_scale(fault: families.BlockScale, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    if fault.tensor == "output":
        return _block_scaled(fault, y)
    plain = product(call)
    return plain.again(_block_scaled(fault, plain.a), plain.b)


def _block_scaled(fault: families.BlockScale, x: Tensor) -> Tensor:
    start, stop = fault.block * fault.width, (fault.block + 1) * fault.width
    if start >= x.shape[-1]:
        raise InvalidInput(
            f"block {fault.block} of {fault.width} channels starts beyond the tensor's {x.shape[-1]} channels"
        )
    new = x.clone()
    new[..., start:stop] = (wide(x[..., start:stop]) * fault.factor).to(x.dtype)
    return new


# Faults inside a product, recomputed from its operands.


_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@act.register
def dead_k_lane(fault: families.DeadKLane, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    plain = product(call)
    mask = memory.mask(plain.inner, plain.a.device)
    a = torch.zeros_like(plain.a) if mask is None else plain.a.masked_fill(mask, 0)
    return plain.again(a, plain.b)


@act.register
def accumulation(fault: families.Accumulation, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
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


def _rounded(fault: families.Accumulation, total: Tensor) -> Tensor:
    if isinstance(fault.precision, str):
        return total.to(_FORMATS[fault.precision]).to(total.dtype)
    return bit_patterns.round_mantissa(total.double(), fault.precision).to(total.dtype)


@act.register
def input_truncation(fault: families.InputTruncation, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    plain = product(call)
    return plain.again(_cut(fault, plain.a), _cut(fault, plain.b))


def _cut(fault: families.InputTruncation, x: Tensor) -> Tensor:
    return bit_patterns.cut_mantissa(x, max(0, bit_patterns.mantissa_bits(x.dtype) - fault.keep))


@act.register
def rounding_mode(fault: families.RoundingMode, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    exact = exact_dtype(y)
    if y.dtype == exact:
        raise InvalidInput(f"rounding_mode needs a wider dtype to round from, but {call.name} computes in {exact}")
    return bit_patterns.round_towards(product(call).exact(exact), y.dtype, fault.mode)


# Faults of the function units: exp, the gates of silu and gelu, rsqrt, and the gains they may have.
#
# A table holds N numbers for each octave, the middle of each step, so its relative error is at most e:
#
# table(v) = 2^((floor(N log2 v) + 1/2) / N), N = ceil(ln 2 / (2 ln(1 + e)))


def table(log2: Tensor, error: float) -> Tensor:
    """2^log2 as read from a table of relative error `error`; 0 reads the exact value."""
    if error == 0:
        return torch.exp2(log2)
    steps = math.ceil(math.log(2) / (2 * math.log1p(error)))
    read = torch.exp2((torch.floor(log2 * steps) + 0.5) / steps)
    return torch.where(log2 == -math.inf, torch.zeros_like(read), read)


@act.register
def exp_table(fault: families.ExpTable, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    scores, dim = softmax_scores(call)
    t = scores.to(exact_dtype(y))
    t = t - t.amax(dim, keepdim=True)
    if fault.clip is not None:
        t = torch.where(t == -math.inf, t, t.clamp_min(-fault.clip))
    powers = table(t / math.log(2), fault.magnitude)
    return (powers / powers.sum(dim, keepdim=True)).to(y.dtype)


@act.register
def activation_table(fault: families.ActivationTable, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    z = input_of(call).to(exact_dtype(y))
    gate = computed_for(call, z) / z
    gate = torch.where(gate > 0, gate, torch.zeros_like(gate))  # 0 / 0, and a gate that underflowed
    return (z * table(gate.log2(), fault.magnitude)).to(y.dtype)


@act.register
def activation_cut_off(fault: families.ActivationCutOff, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    z = input_of(call)
    return torch.where(z < -fault.limit, torch.zeros_like(y), torch.where(z > fault.limit, z.to(y.dtype), y))


@act.register
def rsqrt_table(fault: families.RsqrtTable, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    x = input_of(call).to(exact_dtype(y))
    if _centres(call):
        x = x - x.mean(-1, keepdim=True)
    log2 = -0.5 * (x.square().mean(-1, keepdim=True) + _eps(call)).log2()  # of the reciprocal root, [..., 1]
    return _scaled(y, call, table(log2, fault.magnitude) / torch.exp2(log2))


@act.register
def norm_gain(fault: families.NormGain, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    return _scaled(y, call, 1 + fault.magnitude)


def _bias(call: RecordedCall) -> Tensor | None:
    """What a norm adds at its end: F.layer_norm(x, shape, weight, bias, eps), F.rms_norm(x, shape, weight, eps)."""
    if isinstance(call.callee, nn.Module):
        bias = getattr(call.callee, "bias", None)
    else:
        bias = call.argument(3, "bias") if call.callee.__name__ == "layer_norm" else None
    return bias if isinstance(bias, Tensor) else None


def _centres(call: RecordedCall) -> bool:
    """Whether a norm subtracts the mean (LayerNorm) or not (RMSNorm)."""
    name = type(call.callee).__name__ if isinstance(call.callee, nn.Module) else call.callee.__name__
    return "rms" not in name.lower() and name != "T5LayerNorm"


def _eps(call: RecordedCall) -> float:
    if isinstance(call.callee, nn.Module):
        found = [getattr(call.callee, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
        return float(next((eps for eps in found if eps is not None), 0.0))
    if call.callee.__name__ == "layer_norm":
        return float(call.argument(4, "eps", default=1e-5))
    eps = call.argument(3, "eps")
    return float(torch.finfo(input_of(call).dtype).eps if eps is None else eps)


def _scaled(y: Tensor, call: RecordedCall, factor: float | Tensor) -> Tensor:
    """A norm's output with what it is before the bias scaled."""
    wide, bias = y.to(exact_dtype(y)), _bias(call)
    if bias is None:
        return (wide * factor).to(y.dtype)
    return ((wide - bias.to(wide.dtype)) * factor + bias.to(wide.dtype)).to(y.dtype)
