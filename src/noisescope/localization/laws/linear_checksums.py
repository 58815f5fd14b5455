"""Laws that read weights: checksums of every linear and, for a suspect, the columns and rows of W themselves.

The host computes in float64 on copies of input and weight, never through the module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization import host_products
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import BLOCK, checksums
from noisescope.localization.judge import TINY, judge_size
from noisescope.localization.laws.call_results import LawEvidence, sampled_rows
from noisescope.localization.laws.calls_with_other_inputs import parameters_replaced, unbiased
from noisescope.localization.laws.output_statistics import copies
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import Z_ELEMENT, combination, mean_square_limit, shortened
from noisescope.localization.tensors import host_rows, rms
from noisescope.model.anatomy import keeps_weight_transposed, linear_weight
from noisescope.probe.recorded_call import RecordedCall

_SEED = 21
_FEWEST = 32  # checksums in a mean: what its limit is derived for (roundoff.MEAN_SQUARE)
_READ_BACK = 4096  # columns that are read back at most


def weight_of(module: Any) -> Tensor | None:
    """W [N, K] on the host, or None if it is packed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    return linear_weight(module).to("cpu", copy=True)


def zero_channels(module: Any, channels: tuple[int, ...]) -> set[int]:
    """The channels whose weights are all 0, which are legitimately dead."""
    weight = weight_of(module)
    return set() if weight is None else {c for c in channels if not bool(weight[c].any())}


def check_checksums(recorded: RecordedCall, found: LawEvidence) -> None:
    """Checksums of every row over blocks of 64 outputs (Freivalds 1977)."""
    x, module = recorded.first_input, recorded.callee
    weight = weight_of(module) if isinstance(module, nn.Module) else None
    if weight is None or x is None:
        found.skipped.append("laws that read weights: the weight is packed")
        return
    call, biased = unbiased(recorded)
    out = call(x) if biased else recorded.output
    with host_arithmetic():
        rows = sampled_rows(out)
        a, y = host_products.as_multiplied(host_rows(x)[rows], out), host_rows(out)[rows]
        signs = host_products.Rows(len(rows), _SEED).signs(len(weight))
        sums = checksums(
            a, host_products.as_multiplied(weight, out), None, y, signs, shortened(out.dtype, out.device.type)
        )
        on_average = _mean_strength(sums.z)
        if on_average > 1:  # rows that are mostly copies of others are no further evidence
            on_average = _mean_strength(sums.z[copies([y.double()]).double().mean(-1) < 0.5])
        strength, limit = max(float(sums.z.max()) / Z_ELEMENT, on_average), mean_square_limit(sums.z.numel())
        scale = max(rms(y.double()), TINY) * math.sqrt(BLOCK)
        size, floor = float(sums.error.square().mean().sqrt()), math.sqrt(limit * float(sums.variance.mean()))
        result = judge_size(Law.CHECKSUMS, size, floor, scale, y.numel())
        result.strengths = {Law.CHECKSUMS: strength}
        found.add(result)


def _mean_strength(z: Tensor) -> float:
    """The mean of z^2 against its limit, where there are enough for one."""
    enough = z.numel() >= _FEWEST
    return math.sqrt(float(z.square().mean()) / mean_square_limit(z.numel())) if enough else 0.0


def read_weights_back(recorded: RecordedCall, found: LawEvidence) -> None:
    """Columns and permuted rows of a suspect's W."""
    x, module = recorded.first_input, recorded.callee
    weight = weight_of(module)
    if weight is None or x is None:
        return
    call, _ = unbiased(recorded)
    weight, width = host_products.as_multiplied(weight, recorded.output), x.shape[-1]
    read = min(width, _READ_BACK)
    rows = x.numel() // width
    units = torch.eye(width, dtype=x.dtype, device=x.device)[:read]
    read_back = torch.cat([host_rows(call(units[at : at + rows])) for at in range(0, read, rows)])
    base, permuted = call(x), None
    order = torch.randperm(len(weight), generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu")
    parameter = module._parameters.get("weight")
    if isinstance(parameter, Tensor):
        at = order.to(x.device)
        other = parameter.detach()[:, at] if keeps_weight_transposed(module) else parameter.detach()[at]
        with parameters_replaced([(module, "weight", other.contiguous())]):
            permuted = call(x)
    with host_arithmetic():
        columns, expected = read_back.double(), weight.T[:read].double()
        found.check(Law.ONE_HOT_READBACK, columns, expected)
        if permuted is not None:
            got, expected = host_rows(permuted).double(), host_rows(base).double()[:, order]
            scale = rms(expected)
            squares = torch.full_like(expected, 16 * scale**2)
            floor = combination([got, expected], [squares, squares], width, base.dtype)
            found.check(Law.WEIGHT_ROW_PERMUTATION, got, expected, floor.limit)
