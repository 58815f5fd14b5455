"""Laws that read weights: checksums of every linear (R21), and for a suspect the columns and rows of W themselves.

The host works in float64 on copies of input and weight, never through the module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.locators import products
from noisescope.locators.checksums import BLOCK, checksums
from noisescope.locators.floors import Z_ELEMENT, shortened
from noisescope.locators.laws import statistics
from noisescope.locators.laws.calls import Heard, parameters_replaced, unbiased
from noisescope.locators.laws.examined import Examined
from noisescope.locators.laws.readings import Reading, columns, differing, exact, floored, host, looked_at, rms
from noisescope.locators.laws.roundoff import combination, mean_square_limit
from noisescope.locators.recompute import host_arithmetic

_SEED = 21
_FEWEST = 32  # checksums in a mean: what its limit is derived for (roundoff.MEAN_SQUARE)
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


def freivalds(heard: Heard, found: Examined) -> None:
    """R21: checksums of every row over blocks of 64 outputs."""
    x, module = heard.x, heard.callee
    weight = weight_of(module) if isinstance(module, nn.Module) else None
    if weight is None or x is None:
        found.skipped.append("R19 to R21: a packed weight")
        return
    call, biased = unbiased(heard)
    out = call(x) if biased else heard.y
    with host_arithmetic():
        rows = looked_at(out)
        a, y = products.as_multiplied(host(x)[rows], out), host(out)[rows]
        signs = products.Rows(len(rows), _SEED).signs(len(weight))
        sums = checksums(a, products.as_multiplied(weight, out), None, y, signs, shortened(out))
        on_average = _mean_strength(sums.z)
        if on_average > 1:  # rows that are mostly copies of others are no further evidence
            on_average = _mean_strength(sums.z[statistics.copies([y.double()]).double().mean(-1) < 0.5])
        strength, limit = max(float(sums.z.max()) / Z_ELEMENT, on_average), mean_square_limit(sums.z.numel())
        scale = max(rms(y.double()), 1e-300) * math.sqrt(BLOCK)
        size = float(sums.error.square().mean().sqrt()) / scale
        floor = math.sqrt(limit * float(sums.variance.mean())) / scale
        share = float((sums.z > Z_ELEMENT).double().mean())
        found.readings.append(Reading("R21", strength, size, floor, share, (), y.numel()))


def _mean_strength(z: Tensor) -> float:
    """The mean of z^2 against its limit, where there are enough for one."""
    enough = z.numel() >= _FEWEST
    return math.sqrt(float(z.square().mean()) / mean_square_limit(z.numel())) if enough else 0.0


def look_closer(heard: Heard, found: Examined) -> None:
    """R20 and R19 of a suspect, and its output recomputed whole for the class of its fault."""
    x, module = heard.x, heard.callee
    weight = weight_of(module)
    if weight is None or x is None:
        return
    call, _ = unbiased(heard)
    weight, width = products.as_multiplied(weight, heard.y), x.shape[-1]
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
