"""The faults that relations are measured by: twenty of a linear, fifteen of attention, rotary angles, MLP and norm.

Sizes are those of the project's measured fault matrix. The faults below are beside the families of noisescope.faults
because no device is known to have them; they are there to try single laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from noisescope.faults import (
    Accumulation,
    ActivationCutOff,
    Bias,
    DeadKLane,
    DeadLane,
    DeadZone,
    ExpTable,
    FlushToZero,
    Gain,
    InputTruncation,
    Lanes,
    Noise,
    NormaliserGain,
    NormGain,
    RoundingMode,
    RsqrtTable,
    Saturation,
    Spike,
    StaleTile,
    StuckBit,
    SwappedChannels,
    Truncation,
)
from noisescope.faults.fault import Fault
from noisescope.faults.operand_extraction import softmax_scores


@dataclass(frozen=True)
class ValueNoise(Fault):
    """Noise that is a function of the value: it repeats itself."""

    family, fault_class, sized_by = "value_noise", "unknown", None

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        size = memory.first("rms", y.float().square().mean().sqrt())
        return (y.float() + 0.01 * size * torch.sin(y.float() / size * 7919)).to(y.dtype)


@dataclass(frozen=True)
class LaneSpike(Fault):
    """Large values of one lane are eight times too large."""

    family, fault_class, sized_by = "lane_spike", "spike", None

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        size = memory.first("rms", y.float().square().mean().sqrt())
        return torch.where(y.float().abs() > 2 * size, 8 * y, y)


@dataclass(frozen=True)
class MaskLeak(Fault):
    """One part in twenty of the attention is spread over all keys."""

    family, fault_class, sized_by, operators = "mask_leak", "unknown", None, ("softmax",)

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        return (0.95 * y.float() + 0.05 / y.shape[-1]).to(y.dtype)


@dataclass(frozen=True)
class Unshifted(Fault):
    """exp in float16, the maximum not taken off."""

    family, fault_class, sized_by, operators = "unshifted_exp", "unknown", None, ("softmax",)

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        scores, dim = softmax_scores(call)
        powers = scores.half().exp().double()
        return (powers / powers.sum(dim, keepdim=True)).to(y.dtype)


@dataclass(frozen=True)
class DroppedTile(Fault):
    """Four keys are not summed."""

    family, fault_class, sized_by, operators = "dropped_tile", "dead input lane", None, ("softmax",)

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        new = y.clone()
        new[..., 4:8] = 0
        return new


@dataclass(frozen=True)
class ShortScores(Fault):
    """Scores rounded to E4M3."""

    family, fault_class, sized_by, operators = "fp8_scores", "truncation", None, ("matmul",)

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        return y.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(y.dtype)


@dataclass(frozen=True)
class Asymmetry(Fault):
    """Negative results are 2 % too large."""

    family, fault_class, sized_by, operators = "asymmetry", "function table", None, ("silu", "gelu")

    def act(self, y: Any, call: Any, memory: Any) -> Any:
        return torch.where(y < 0, (1.02 * y.float()).to(y.dtype), y)


def linear_faults(dtype: torch.dtype, width: int) -> dict[str, Fault]:
    """Of a linear with `width` outputs; random spikes are one in 50,000, of a small one (it would miss) in 1,000."""
    wide = dtype == torch.float32
    return {
        "noise 1 %": Noise(0.01, relative_to="rms"),
        "random spikes": Spike(0.002 if width >= 512 else 0.1),
        "noise by value": ValueNoise(),
        "offset": Bias(0.05),
        "rounding down": RoundingMode("down"),
        "dead zone 0.1 rms": DeadZone(0.1, relative_to="rms"),
        "flush below 1e-3 rms": FlushToZero(1e-3, relative_to="rms"),
        "saturation at 3 rms": Saturation(3.0, relative_to="rms"),
        "spike of a lane": LaneSpike(channels=Lanes(32)),
        "stuck high bit": StuckBit(20 if wide else 5),
        "stuck low bit": StuckBit(4 if wide else 0),
        "stuck sign of a lane": StuckBit(31 if wide else 15, 0, channels=Lanes(64, 3)),
        "dead lanes": DeadLane(),
        "output cut short": Truncation(10 if wide else 2),
        "short accumulation": Accumulation(),
        "stale tile": StaleTile(),
        "inputs cut short": InputTruncation(10 if wide else 4),
        "lost inputs": DeadKLane(),
        "gain 1 %": Gain(0.01),
        "swapped channels": SwappedChannels(),
    }


def sublayer_faults(block: int) -> dict[str, tuple[Fault, dict[str, Any]]]:
    """Each with where it is put: keyword arguments of `faulty`."""
    softmax = {"site": block, "operator": "softmax"}
    scores = {"site": block, "operator": "matmul", "occurrence": 0}
    silu = {"site": block, "operator": "silu"}
    norm = {"site": block, "operator": "norm"}
    return {
        "mask leak": (MaskLeak(), softmax),
        "exp table 0.5 %": (ExpTable(0.005), softmax),
        "exp clipped at -4": (ExpTable(0.0, clip=4.0), softmax),
        "exp not shifted": (Unshifted(), softmax),
        "normaliser 1 %": (NormaliserGain(0.01), softmax),
        "denominator in bf16": (Accumulation(chunk=8), softmax),
        "dropped tile": (DroppedTile(), softmax),
        "stale tile": (StaleTile(), {**scores, "occurrence": 1}),
        "saturated scores": (Saturation(0.3), scores),
        "fp8 scores": (ShortScores(), scores),
        "short rotary angles": (Truncation(16), {"site": "rotary", "operator": "matmul"}),
        "silu cut off at -4": (ActivationCutOff(4.0), silu),
        "silu asymmetry 2 %": (Asymmetry(), silu),
        "rsqrt table 1 %": (RsqrtTable(0.01), norm),
        "rsqrt gain 1 %": (NormGain(0.01), norm),
    }
