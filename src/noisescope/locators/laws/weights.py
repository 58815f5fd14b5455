"""Laws that read weights: checksums of every linear (R21), and for a suspect the columns and rows of W themselves.

The host works in float64 on copies of input and weight, never through the module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.locators import products
from noisescope.locators.floors import number_format, operand_spread, sum_spread, work_roundoff
from noisescope.locators.laws.calls import Heard, parameters_replaced, unbiased
from noisescope.locators.laws.examined import Examined
from noisescope.locators.laws.readings import Reading, columns, differing, exact, floored, host, looked_at, rms
from noisescope.locators.laws.roundoff import Z_ELEMENT, combination, mean_square_limit
from noisescope.locators.recompute import host_arithmetic

BLOCK = 64  # outputs under one checksum: a single wrong element must show above the rounding of its neighbours
_SEED = 21
_READ_BACK = 4096  # columns that are read back at most


def weight_of(module: Any) -> Tensor | None:
    """W [N, K] on the host, or None where it is packed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    copied = weight.detach().to("cpu", copy=True)
    return copied.T if type(module).__name__ == "Conv1D" else copied


def silent(module: Any, channels: tuple[int, ...]) -> set[int]:
    """Of some channels those whose weights are all 0: they are silent for a good reason."""
    weight = weight_of(module)
    return set() if weight is None else {c for c in channels if not bool(weight[c].any())}


def checksums(heard: Heard, found: Examined) -> None:
    """R21: sum_n r_n y_n = x . sum_n r_n w_n over blocks of 64 outputs, r = +-1 (Freivalds 1977)."""
    x, module = heard.x, heard.callee
    weight = weight_of(module) if isinstance(module, nn.Module) else None
    if weight is None or x is None:
        found.skipped.append("R19 to R21: a packed weight")
        return
    call, biased = unbiased(heard)
    out = call(x) if biased else heard.y
    with host_arithmetic():
        a, y = host(x), host(out)
        rows = looked_at(y)
        a, y = a[rows].double(), y[rows]
        signs = (
            torch.randint(0, 2, (len(weight),), generator=torch.Generator("cpu").manual_seed(_SEED)).double() * 2 - 1
        )
        owner = torch.arange(len(weight)) // BLOCK
        count = int(owner[-1]) + 1

        def per_block(t: Tensor) -> Tensor:
            return t.new_zeros(t.shape[0], count).index_add_(1, owner, t)

        expected = a @ per_block((weight.double() * signs[:, None]).T.contiguous())
        squares = a.square() @ per_block(weight.double().square().T.contiguous())
        got = per_block(y.double() * signs)
        form, u = number_format(y.dtype), work_roundoff(y.dtype)
        variance = per_block(form.ulp(y.double()).square() / 12)
        variance = variance + sum_spread(a.shape[-1], squares, per_block(y.double().square()).sqrt(), u).square()
        shortened = operand_spread(squares) if y.dtype == torch.float32 else None
        if shortened is not None:
            variance = variance + shortened.square()
        z = (got - expected) / variance.clamp_min(1e-300).sqrt()
        z = torch.where(got.isfinite() & expected.isfinite(), z, torch.where(got.isfinite(), 0.0, math.inf))
        square = float(z.square().mean())
        limit = mean_square_limit(z.numel())
        worst = float(z.abs().max()) / Z_ELEMENT
        strength = max(worst, math.sqrt(square / limit))
        scale = max(rms(y.double()), 1e-300)
        size = float((got - expected).square().mean().sqrt()) / math.sqrt(BLOCK) / scale
        floor = math.sqrt(limit * float(variance.mean())) / math.sqrt(BLOCK) / scale
        share = float((z.abs() > Z_ELEMENT).double().mean())
        found.readings.append(Reading("R21", strength, size, floor, share, (), y.numel()))


def look_closer(heard: Heard, found: Examined) -> None:
    """R20 and R19 of a suspect, and its output recomputed whole for the class of its fault."""
    x, module = heard.x, heard.callee
    weight = weight_of(module)
    if weight is None or x is None:
        return
    call, _ = unbiased(heard)
    width = x.shape[-1]
    read = min(width, _READ_BACK)
    rows = x.numel() // width
    units = torch.eye(width, dtype=x.dtype, device=x.device)[:read]
    read_back = torch.cat([host(call(units[at : at + rows])) for at in range(0, read, rows)])
    base, permuted, order = (
        call(x),
        None,
        torch.randperm(len(weight), generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu"),
    )
    parameter = module._parameters.get("weight")
    if isinstance(parameter, Tensor):
        turned = type(module).__name__ == "Conv1D"
        other = parameter.detach()[:, order.to(x.device)] if turned else parameter.detach()[order.to(x.device)]
        with parameters_replaced([(module, "weight", other.contiguous())]):
            permuted = call(x)
    with host_arithmetic():
        found.readings.append(exact("R20", read_back.double(), weight.T[:read].double()))
        wrong = differing(read_back.double(), weight.T[:read].double())
        found.facts.wrong_columns = columns(wrong.T)
        if permuted is not None:
            got, expected = host(permuted).double(), host(base).double()[:, order]
            scale = rms(expected)
            squares = torch.full_like(expected, 16 * scale**2)
            floor = combination([got, expected], [squares, squares], width, base.dtype)
            found.readings.append(floored("R19", got - expected, floor.limit, scale))
        wide = x.detach().cpu()
        found.facts.expected = products.linear(wide, weight, None, base.detach().cpu(), products.Rows(256, _SEED))
