"""Monte Carlo arithmetic: results of inexact functions moved at random, as another library's might differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import number_format

# Units of round-off by which a result moves: 16-bit functions round once, those of float32 differ between libraries.
_UNITS, _UNITS_FLOAT32 = 2.0, 8.0


class RandomRounding:
    """The random numbers of one run; `convolved` are the bits that a convolution keeps of float32 operands."""

    def __init__(self, seed: int, convolved: int = 24) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._convolved = convolved

    def shortens(self, function: Any) -> bool:
        """Whether the device may cut this function's operands."""
        return self._convolved < 24 and function.__name__.startswith("conv")

    def cut(self, x: Tensor) -> Tensor:
        """A float32 operand as if it had lost its last bits, by rounding or by truncation."""
        if x.dtype != torch.float32:
            return x
        steps = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return x * (1 + 2.0 ** (1 - self._convolved) * steps)

    def moved(self, y: Tensor) -> Tensor:
        """The tensor with each element moved by up to two units of round-off of its own, and of its row's rms."""
        if y.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(y)))
        if type(y) is not Tensor or not y.is_floating_point() or not y.numel() or y.dtype.itemsize < 2:
            return y
        wide = y.double()
        finite = torch.where(wide.isfinite(), wide, 0.0)
        scale = finite.abs() + (finite.square().mean(-1, keepdim=True).sqrt() if y.dim() else 0.0) / 4
        steps = torch.rand(y.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        form = number_format(narrow(y))
        return (wide + (_UNITS_FLOAT32 if form.bits > 20 else _UNITS) * form.u * scale * steps).to(y.dtype)


def narrow(y: Tensor) -> torch.dtype:
    """The dtype whose round-off counts: float32 for what holds no fractions of its own."""
    return y.dtype if y.is_floating_point() and y.dtype.itemsize > 1 else torch.float32
