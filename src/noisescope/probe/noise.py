"""Perturbations: noise of a stated size, and two systematic errors.

Each is a value and a function (tensor, draw) -> tensor; any callable of that form is a perturbation too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.errors import unknown
from noisescope.injection import checked_scale
from noisescope.names_in_trial_ids import registered
from noisescope.probe.draws import Draw

RELATIVE_TO = ("element", "rms", "absolute")


def _rms(y: Tensor) -> Tensor:
    """Root mean square of each row, kept as a last dimension of 1; in float32 so that half precision can't overflow."""
    wide = y if y.dtype.itemsize >= 4 else y.float()
    return wide.square().mean(-1, keepdim=True).sqrt().to(y.dtype)


@dataclass(frozen=True)
class _Noise:
    scale: float
    relative_to: str = "element"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale(self.scale, f"{type(self).__name__}'s scale"))
        if self.relative_to not in RELATIVE_TO:
            raise unknown("relative_to", self.relative_to, RELATIVE_TO)

    def smallest_surviving(self, eps: float) -> float | None:
        """The scale below which rounding to a dtype with this eps removes the noise; None where y's size decides."""
        return eps / 2 if self.relative_to != "absolute" else None

    def _size(self, y: Tensor) -> Tensor | None:
        if self.relative_to == "element":
            return None
        return _rms(y) if self.relative_to == "rms" else y.new_ones(()).expand(*y.shape[:-1], 1)


@registered("noisescope.Gaussian")
@dataclass(frozen=True)
class Gaussian(_Noise):
    """y + s * size * z with z ~ N(0, 1) per element; size is |y| ("element"), rms(y) per token ("rms") or 1."""

    def __call__(self, y: Tensor, draw: Draw) -> Tensor:
        return draw.add_noise(y, self.scale, self._size(y))


@registered("noisescope.Uniform")
@dataclass(frozen=True)
class Uniform(_Noise):
    """As Gaussian with z uniform on [-sqrt 3, sqrt 3]: the same standard deviation s, bounded by 1.73 s."""

    def __call__(self, y: Tensor, draw: Draw) -> Tensor:
        return draw.add_noise(y, self.scale, self._size(y), kind="uniform")


@registered("noisescope.Bias")
@dataclass(frozen=True)
class Bias(_Noise):
    """Systematic bias: y + s * size * sign(y); with "element" that is a gain of 1 + s, with "absolute" +-s."""

    relative_to: str = "absolute"

    def __call__(self, y: Tensor, draw: Draw) -> Tensor:
        if self.relative_to == "element":
            return y * (1 + self.scale)
        size = self._size(y)
        assert size is not None
        return y + y.sign() * size * self.scale


@registered("noisescope.Rounding")
@dataclass(frozen=True)
class Rounding:
    """Another healthy system's rounding: 1 value in 128 moves to the next representable number, up as often as down.

    Modelled is the order of summation. Another kernel adds the same products in another order; what it rounds to the
    output's dtype differs by its float32 summation error, which is about 1/100 of the spacing (ulp) of bfloat16
    numbers. Rounding to nearest turns a difference of d ulp into a move by one whole ulp with probability d: an
    unbiased error. The output of the clean run is already rounded and nothing finer is known of it, so the move itself
    is drawn. In float32 the result is known to the last bit, and a move is one ulp there too.

    This seeds the difference; the model's own arithmetic makes the rest. Later operators round inputs that now differ
    a little, their rounding errors become independent of the clean run's within a few layers, and the difference
    settles at a level that hardly depends on the share moved. A larger share would count rounding twice, once by the
    move and once by the arithmetic (SmolLM2-135M, bfloat16: mean |difference| of log-probabilities 0.044 nats at a
    share of 1/1000, 0.045 at 1/100, 0.051 at 1/24, 0.062 at 1/6; fused against plain attention: 0.044).

    Zeros stay zeros, since they are exact more often than rounded; so do subnormal numbers of 16 bits.
    """

    def __call__(self, y: Tensor, draw: Draw) -> Tensor:
        return draw.add_noise(y, torch.finfo(y.dtype).eps, kind="steps")


@registered("noisescope.Shrink")
@dataclass(frozen=True)
class Shrink:
    """y (1 - s): low-bit arithmetic shrinks margins more than it adds noise."""

    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale(self.scale, "Shrink's scale"))

    def smallest_surviving(self, eps: float) -> float | None:
        return eps / 2

    def __call__(self, y: Tensor, draw: Draw) -> Tensor:
        return y * (1 - self.scale)
