"""R15: a(z) - a(-z) = z for silu, gelu and relu, whatever sigmoid or Phi is inside, since g(z) + g(-z) = 1.

The unit is driven with what it received and with a sweep of numbers; in a 16-bit model with float32 numbers as well,
whose rounding hides nothing. How far a healthy unit may be off comes from the same code run on the host.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.locators.floors import number_format
from noisescope.locators.law_linear import Examined
from noisescope.locators.law_readings import Reading, exact, floored, host, rms
from noisescope.locators.law_scope import Heard
from noisescope.locators.law_repeats import steadiness
from noisescope.locators.recompute import host_arithmetic

_WIDEST = 12.0
_LEAST = {"silu": -0.2785, "gelu": -0.1701}  # the minimum of each, and where it lies
_TURNS = {"silu": -1.27, "gelu": -0.74}


def examine(heard: Heard) -> Examined:
    found = Examined()
    z, y = heard.x, heard.output
    if z is None or y is None or y.shape != z.shape or not z.is_floating_point() or z.numel() < 2:
        return found
    call = heard.again
    elsewhere = _on_host(heard)
    flat = z.reshape(-1)
    turned = call(flat.roll(1).reshape(z.shape))
    repeat, minus = call(z), call(-z)
    special = call(torch.tensor([math.nan, 0.0, 0.0, 0.0], dtype=z.dtype, device=z.device))
    grid = _grid(z)
    swept, swept_back = call(grid), call(-grid)
    fine = grid.float() if z.dtype.itemsize < 4 else None
    fine_swept = None if fine is None else (call(fine), call(-fine))
    with host_arithmetic():
        first = host(y).double()
        found.readings.append(exact("R1", host(repeat).double(), first))
        got, expected = host(turned).double().flatten(), first.flatten().roll(1)
        limit = 4 * number_format(y.dtype).ulp(expected)
        gap = torch.where(got.isnan() & expected.isnan(), 0.0, got - expected)
        found.readings.append(floored("R2", gap[None], limit[None], rms(first)))
        out = special.detach().cpu().double()[None]
        found.readings.append(exact("R26", out[:, :1], torch.full_like(out[:, :1], math.nan)))
        found.readings.append(exact("R8", out[:, 1:], torch.zeros_like(out[:, 1:])))
        for inputs, forth, back in (
            (z, y, minus),
            (grid, swept, swept_back),
            *(() if fine is None or fine_swept is None else ((fine, *fine_swept),)),
        ):
            reading = _identity(host(inputs), host(forth), host(back), elsewhere)
            if reading is None:
                found.skipped.append("R15: this activation is not of the kind z g(z) with g(z) + g(-z) = 1")
                break
            found.readings.append(reading)
        else:
            best = (fine, fine_swept[0]) if fine is not None and fine_swept is not None else (grid, swept)
            found.readings.append(_shape(heard.operator, host(best[0]), host(best[1])))
    if found.broken:
        found.facts.update(steadiness(call, z, y, flat.roll(1).reshape(z.shape)))
        with host_arithmetic():  # what the host's code makes of the same numbers: for the class only
            expected = elsewhere(host(z).double())
            unit = number_format(y.dtype).ulp(torch.maximum(host(z).double().abs(), expected.abs()))
            found.facts["expected"] = (host(y), expected, 4 * unit)
    return found


def _grid(z: Tensor) -> Tensor:
    """A sweep from -12 to 12 in the shape and dtype of what the unit received."""
    steps = torch.linspace(-_WIDEST, _WIDEST, min(z.numel(), 4096), device="cpu")
    repeated = steps.repeat(-(-z.numel() // steps.numel()))[: z.numel()]
    return repeated.reshape(z.shape).to(z.device, z.dtype)


def _on_host(heard: Heard) -> Callable[[Tensor], Tensor]:
    """The same code on the host, apart from every scope."""
    callee: Any = heard.callee
    if isinstance(callee, nn.Module):
        bare = copy.copy(callee)
        bare.__dict__.pop("forward", None)
        return lambda x: type(callee).forward(bare, x)  # type: ignore[no-any-return]
    own = heard.x
    extra = {name: value for name, value in heard.kwargs.items() if value is not own}
    rest = tuple(value for value in heard.args if value is not own)
    return lambda x: callee(x, *rest, **extra)  # type: ignore[no-any-return]


def _identity(z: Tensor, forth: Tensor, back: Tensor, elsewhere: Callable[[Tensor], Tensor]) -> Reading | None:
    """R15 in units of an ulp of the largest number involved; None where the host breaks it too."""
    unit = number_format(z.dtype).ulp(z.double().abs())
    usable = z.double().isfinite()
    on_host = (elsewhere(z).double() - elsewhere(-z).double() - z.double()).abs() / unit
    healthy = float(on_host[usable].max()) if bool(usable.any()) else 0.0
    if not healthy < 64:
        return None
    error = torch.where(usable, forth.double() - back.double() - z.double(), 0.0)
    found = floored("R15", error, 4 * max(1.0, healthy) * unit, rms(forth.double()))
    return found


def _shape(operator: str, z: Tensor, y: Tensor) -> Reading:
    """Never below its minimum, and growing to the right of it."""
    values, order = z.double().flatten().sort()
    out = y.double().flatten()[order]
    unit = number_format(y.dtype).ulp(out.abs().clamp_min(2.0**-6))
    below = (_LEAST[operator] - out).clamp_min(0)
    right = values > _TURNS[operator]
    falls = torch.zeros_like(out)
    falls[1:] = torch.where(right[1:] & right[:-1], (out[:-1] - out[1:]).clamp_min(0), 0.0)
    worst = torch.maximum(below, falls)
    return floored("R15", worst[None], (8 * unit + 1e-4 * (below > 0))[None], rms(out))
