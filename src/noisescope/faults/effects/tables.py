"""Faults of the function units: exp, the gates of silu and gelu, rsqrt, and the gains they may have.

A table holds N numbers for each octave, the middle of each step, so its relative error is at most e:

    table(v) = 2^((floor(N log2 v) + 1/2) / N),   N = ceil(ln 2 / (2 ln(1 + e)))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from noisescope.faults.calls import Call, softmax_scores
from noisescope.faults.effects.dispatch import act
from noisescope.faults.memory import Memory, exact_dtype
from noisescope.faults.tables import ActivationCutOff, ActivationTable, ExpTable, NormGain, RsqrtTable


def table(log2: Tensor, error: float) -> Tensor:
    """2^log2 as read from a table of relative error `error`; 0 reads the exact value."""
    if error == 0:
        return torch.exp2(log2)
    steps = math.ceil(math.log(2) / (2 * math.log1p(error)))
    read = torch.exp2((torch.floor(log2 * steps) + 0.5) / steps)
    return torch.where(log2 == -math.inf, torch.zeros_like(read), read)


@act.register(ExpTable)
def exp_table(fault: ExpTable, y: Tensor, call: Call, memory: Memory) -> Tensor:
    scores, dim = softmax_scores(call)
    t = scores.to(exact_dtype(y))
    t = t - t.amax(dim, keepdim=True)
    if fault.clip is not None:
        t = torch.where(t == -math.inf, t, t.clamp_min(-fault.clip))
    powers = table(t / math.log(2), fault.magnitude)
    return (powers / powers.sum(dim, keepdim=True)).to(y.dtype)


@act.register(ActivationTable)
def activation_table(fault: ActivationTable, y: Tensor, call: Call, memory: Memory) -> Tensor:
    z = call.x.to(exact_dtype(y))
    gate = call.repeated(z) / z
    gate = torch.where(gate > 0, gate, torch.zeros_like(gate))  # 0 / 0, and a gate that underflowed
    return (z * table(gate.log2(), fault.magnitude)).to(y.dtype)


@act.register(ActivationCutOff)
def activation_cut_off(fault: ActivationCutOff, y: Tensor, call: Call, memory: Memory) -> Tensor:
    z = call.x
    return torch.where(z < -fault.limit, torch.zeros_like(y), torch.where(z > fault.limit, z.to(y.dtype), y))


@act.register(RsqrtTable)
def rsqrt_table(fault: RsqrtTable, y: Tensor, call: Call, memory: Memory) -> Tensor:
    x = call.x.to(exact_dtype(y))
    if _centres(call):
        x = x - x.mean(-1, keepdim=True)
    log2 = -0.5 * (x.square().mean(-1, keepdim=True) + _eps(call)).log2()  # of the reciprocal root, [..., 1]
    return _scaled(y, call, table(log2, fault.magnitude) / torch.exp2(log2))


@act.register(NormGain)
def norm_gain(fault: NormGain, y: Tensor, call: Call, memory: Memory) -> Tensor:
    return _scaled(y, call, 1 + fault.magnitude)


def _bias(call: Call) -> Tensor | None:
    """What a norm adds at its end: F.layer_norm(x, shape, weight, bias, eps), F.rms_norm(x, shape, weight, eps)."""
    if isinstance(call.callee, nn.Module):
        bias = getattr(call.callee, "bias", None)
    else:
        bias = call.given(3, "bias") if call.callee.__name__ == "layer_norm" else None
    return bias if isinstance(bias, Tensor) else None


def _centres(call: Call) -> bool:
    """Whether a norm takes off the mean (LayerNorm) or not (RMSNorm)."""
    name = type(call.callee).__name__ if isinstance(call.callee, nn.Module) else call.callee.__name__
    return "rms" not in name.lower() and name != "T5LayerNorm"


def _eps(call: Call) -> float:
    if isinstance(call.callee, nn.Module):
        found = [getattr(call.callee, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
        return float(next((eps for eps in found if eps is not None), 0.0))
    if call.callee.__name__ == "layer_norm":
        return float(call.given(4, "eps", default=1e-5))
    eps = call.given(3, "eps")
    return float(torch.finfo(call.x.dtype).eps if eps is None else eps)


def _scaled(y: Tensor, call: Call, factor: float | Tensor) -> Tensor:
    """A norm's output with what it is before the bias scaled."""
    wide, bias = y.to(exact_dtype(y)), _bias(call)
    if bias is None:
        return (wide * factor).to(y.dtype)
    return ((wide - bias.to(wide.dtype)) * factor + bias.to(wide.dtype)).to(y.dtype)
