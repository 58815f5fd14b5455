"""Random rounding (Monte Carlo arithmetic): tolerances for code, from runs that perturb every inexact result.

False alarms: an element alarms beyond 7 standard deviations of such runs and at least an ulp. Perturbations of two
units of round-off (eight in float32) are several times those of one rounding, so healthy devices stay far below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import Z_ELEMENT, number_format

RUNS = 8
_SEED = 11
_ULPS = 4  # that functions of float32 differ by between libraries; in 16 bits they round alike, or to the next number
# Units of round-off by which a result moves: 16-bit functions round once, those of float32 differ between libraries.
_UNITS, _UNITS_FLOAT32 = 2.0, 8.0
_LEAN = 0.125  # of a unit of round-off of sixteen bits, by which functions that compute in float32 never lean
_MANY = 1024  # elements of which the common factor is judged


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may be off: each element, and all of them by a common factor."""

    each: Tensor
    gain: float = math.inf

    def gain_of(self, got: Tensor, expected: Tensor) -> tuple[float, float]:
        """By what share all elements are too large in common, and what is allowed."""
        if math.isinf(self.gain):
            return 0.0, math.inf
        values = expected.double()
        return gain_along(got.double() - values, values), self.gain


class RandomRounding:
    """The random numbers of one run; `convolved` is how many bits a convolution keeps of float32 operands."""

    def __init__(self, seed: int, convolved: int = 24) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._convolved = convolved

    def shortens(self, function: Any) -> bool:
        """Whether the device may truncate this function's operands."""
        return self._convolved < 24 and function.__name__.startswith("conv")

    def cut(self, x: Tensor) -> Tensor:
        """A float32 operand as if it had lost its last bits, by rounding or by truncation."""
        if x.dtype != torch.float32:
            return x
        steps = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return x * (1 + 2.0 ** (1 - self._convolved) * steps)

    def moved(self, y: Tensor, *, once: bool = False) -> Tensor:
        """The tensor with each element moved by up to two units of round-off of its own, and of its row's rms.

        `once`: it may lack one rounding of its own, so an element moves by up to one unit of itself.
        """
        if y.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(y.resolve_conj()), once=once))
        if type(y) is not Tensor or not y.is_floating_point() or not y.numel() or y.dtype.itemsize < 2:
            return y
        wide = y.double()
        finite = torch.where(wide.isfinite(), wide, 0.0)
        scale = finite.abs()
        if y.dim() and not once:
            scale = scale + finite.square().mean(-1, keepdim=True).sqrt() / 4
        steps = torch.rand(y.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        form = number_format(_narrow(y))
        units = 1.0 if once else _UNITS_FLOAT32 if form.bits > 20 else _UNITS
        return (wide + units * form.u * scale * steps).to(y.dtype)


def roundings(count: int = RUNS, convolved: int = 24) -> list[RandomRounding]:
    """One instance per run, the same each time."""
    return [RandomRounding(_SEED + number, convolved) for number in range(count)]


def limits_of(
    runs: Sequence[Mapping[Any, Tensor]], different: Mapping[Any, tuple[Tensor, Tensor]], *, autocast: bool = False
) -> dict[Any, Tolerance]:
    """7 standard deviations of the difference of two such runs, by element and by row, plus some ulps.

    In 16 bits also those of the factor that all elements have in common. Not in float32, where functions of different
    libraries lean one way, and not under autocast.

    For each tensor that differs, given its actual and expected value and what the runs returned in its place. Only
    under autocast, whose functions differ by device, may a tensor have a shorter dtype than the code gives it.
    """
    limits = {}
    for key, (got, expected) in different.items():
        found = [run[key].double() for run in runs if key in run and run[key].shape == expected.shape]
        if len(found) < len(runs):  # shapes depend on the numbers
            limits[key] = Tolerance(torch.full(got.shape, torch.inf, dtype=torch.float64))
            continue
        wide = torch.stack(found) - expected.double()
        if not got.is_floating_point():  # a choice, which round-off may turn where these runs turn it
            limits[key] = Tolerance(torch.where((wide != 0).any(0), torch.inf, 0.0).double())
            continue
        variance = torch.where(wide.isfinite(), wide, 0.0).square().mean(0)
        pooled = variance.mean(-1, keepdim=True) if variance.dim() else variance
        forms = [number_format(_narrow(x)) for x in ((got,) if autocast else (got, expected))]
        form = max(forms, key=lambda each: each.bits)
        ulp = form.ulp(torch.where(expected.isfinite(), expected, 0.0).double())
        each = Z_ELEMENT * (variance + pooled).sqrt() + (_ULPS if form.bits > 20 else 1) * ulp
        gain = math.inf
        if max(got.dtype.itemsize, expected.dtype.itemsize) == 2 and got.numel() >= _MANY and not autocast:
            gains = [gain_along(off, expected.double()) for off in wide]
            gain = Z_ELEMENT * math.sqrt(sum(g**2 for g in gains) / len(gains)) + _LEAN * form.u
        limits[key] = Tolerance(each, gain)
    return limits


def gain_along(off: Tensor, values: Tensor) -> float:
    """By what share a tensor is too large along its own direction, if it is `off` from these values."""
    finite = torch.where(values.isfinite() & off.isfinite(), values, 0.0)
    size = float(finite.square().sum())
    return float((torch.where(off.isfinite(), off, 0.0) * finite).sum()) / size if size > 0 else 0.0


def _narrow(y: Tensor) -> torch.dtype:
    return y.dtype if y.is_floating_point() and y.dtype.itemsize > 1 else torch.float32
