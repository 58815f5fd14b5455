"""What healthy round-off may do to a law that is not exact; built on the round-off model of floors.py.

A law compares outputs y_i of one operator, sum_i c_i y_i = 0. Each y_i is off by one rounding to its dtype (at most
ulp / 2, variance ulp^2 / 12) and by the error of its sum of K terms (floors.sum_spread), which needs
S^2 = sum_k (x_k w_k)^2. Without weights S^2 comes from the module itself: for a random half m of the inner dimension

    E_m [f(m x) - f((1 - m) x)]^2 = sum_k (x_k w_k)^2,

since that difference is the same sum with random signs. Nothing here is fitted to a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization import host_products
from noisescope.localization.checksums import BLOCK, checksums
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.laws import statistics
from noisescope.localization.laws.calls import parameters_replaced, unbiased
from noisescope.localization.laws.evidence import LawEvidence
from noisescope.localization.laws.law_result import LawResult, columns, differing, exact, floored, host, looked_at, rms
from noisescope.localization.roundoff_floors import (
    SLACK,
    WORK_ROUNDOFF,
    Z_ELEMENT,
    Z_MEAN,
    number_format,
    operand_spread,
    shortened,
    sum_spread,
)
from noisescope.model.anatomy import keeps_weight_transposed, linear_weight
from noisescope.probe.recorded_call import RecordedCall

# Limit of mean (e / sigma)^2; a correct rounding gives 1, float32 sums less. Null as of judge.RMS_LIMIT, with more
# room, since S^2 is estimated from the module's own answers: normal errors of n = 32 elements pass it at 2e-11.
MEAN_SQUARE = 2.0


@dataclass(frozen=True)
class Floor:
    """How far a combination of outputs may be from 0: element by element, and its variance."""

    limit: Tensor
    variance: Tensor


def combination(
    outputs: list[Tensor], squares: list[Tensor], terms: int, dtype: torch.dtype, *, short: Tensor | None = None
) -> Floor:
    """The floor of sum_i +-y_i; outputs [R, C] in float64 and their S^2, K = `terms`.

    `short`: S^2 of operands whose bits the law changes; they count where the user has allowed float32 operands to be
    shortened (TF32).
    """
    form, u = number_format(dtype), WORK_ROUNDOFF
    limit = torch.zeros_like(outputs[0])
    variance = torch.zeros_like(limit)
    spread = torch.zeros_like(limit)
    for values, own in zip(outputs, squares, strict=True):
        ulp = form.ulp(values)
        limit += ulp / 2
        variance += ulp.square() / 12
        spread += sum_spread(terms, own, values, u).square()
    shortened = operand_spread(short) if short is not None and dtype == torch.float32 else None
    if shortened is not None:
        spread += shortened.square()
    # Under the normal range a device may flush to 0: float32 and bfloat16 units do, and the result is as good.
    flushed = 2.0**form.least if form.least <= -126 else 0.0
    return Floor(SLACK * limit + Z_ELEMENT * spread.sqrt() + 4 * flushed, variance + spread + flushed**2)


def squares_from_split(difference: Tensor, x: Tensor, split_rows: Tensor) -> Tensor:
    """S^2 [R, C] from f(m x) - f((1 - m) x) on some rows, carried to other rows by |x|^2.

    One draw of signs says little about one element, and rows may be so alike that a column is one draw too. So the
    largest of three estimates counts: the mean of the column, that of the row, and the element's own square (where one
    massive term makes up the sum, the difference is that term itself).
    """
    square, tiny = difference.square(), torch.finfo(torch.float64).tiny
    size = x.square().sum(-1, keepdim=True)
    mean = size[split_rows].mean().clamp_min(tiny)
    by_row = (square.mean(-1, keepdim=True) / size[split_rows].clamp_min(tiny)).median() * size
    squares = torch.maximum(square.mean(0)[None] * (size / mean), by_row)
    squares[split_rows] = torch.maximum(squares[split_rows], torch.maximum(square, square.mean(-1, keepdim=True)))
    return squares


def mean_square_limit(count: int) -> float:
    """Limit of the mean of (e / sigma)^2 over `count` elements."""
    return MEAN_SQUARE + Z_MEAN * math.sqrt(2 / max(1, count))


def truncation_share(
    error: Tensor, outputs: list[Tensor], signs: list[int], floor: Floor, dtype: torch.dtype
) -> tuple[float, float]:
    """How much of the error is what rounding toward zero would make, by least squares, and its standard error.

    A truncated y is short by ulp / 2 on average, so e = -c sum_i sign_i sign(y_i) ulp(y_i) / 2 with c = 1; rounding to
    nearest gives c = 0.
    """
    form = number_format(dtype)
    pattern = torch.zeros_like(error)
    for values, sign in zip(outputs, signs, strict=True):
        pattern -= sign * values.sign() * form.ulp(values) / 2
    weight = pattern / floor.variance
    total = float((weight * pattern).sum())
    return (0.0, math.inf) if total <= 0 else (float((weight * error).sum()) / total, total**-0.5)


# Laws that read weights: checksums of every linear (R21), and for a suspect the columns and rows of W themselves.
#
# The host works in float64 on copies of input and weight, never through the module.


_SEED = 21
_FEWEST = 32  # checksums in a mean: what its limit is derived for (roundoff.MEAN_SQUARE)
_READ_BACK = 4096  # columns that are read back at most


def weight_of(module: Any) -> Tensor | None:
    """W [N, K] on the host, or None where it is packed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    return linear_weight(module).to("cpu", copy=True)


def silent(module: Any, channels: tuple[int, ...]) -> set[int]:
    """Of some channels those whose weights are all 0: they are silent for a good reason."""
    weight = weight_of(module)
    return set() if weight is None else {c for c in channels if not bool(weight[c].any())}


def freivalds(recorded: RecordedCall, found: LawEvidence) -> None:
    """R21: checksums of every row over blocks of 64 outputs."""
    x, module = recorded.first_input, recorded.callee
    weight = weight_of(module) if isinstance(module, nn.Module) else None
    if weight is None or x is None:
        found.skipped.append("R19 to R21: a packed weight")
        return
    call, biased = unbiased(recorded)
    out = call(x) if biased else recorded.output
    with host_arithmetic():
        rows = looked_at(out)
        a, y = host_products.as_multiplied(host(x)[rows], out), host(out)[rows]
        signs = host_products.Rows(len(rows), _SEED).signs(len(weight))
        sums = checksums(a, host_products.as_multiplied(weight, out), None, y, signs, shortened(out))
        on_average = _mean_strength(sums.z)
        if on_average > 1:  # rows that are mostly copies of others are no further evidence
            on_average = _mean_strength(sums.z[statistics.copies([y.double()]).double().mean(-1) < 0.5])
        strength, limit = max(float(sums.z.max()) / Z_ELEMENT, on_average), mean_square_limit(sums.z.numel())
        scale = max(rms(y.double()), 1e-300) * math.sqrt(BLOCK)
        size = float(sums.error.square().mean().sqrt()) / scale
        floor = math.sqrt(limit * float(sums.variance.mean())) / scale
        share = float((sums.z > Z_ELEMENT).double().mean())
        found.results.append(LawResult("R21", strength, size, floor, share, (), y.numel()))


def _mean_strength(z: Tensor) -> float:
    """The mean of z^2 against its limit, where there are enough for one."""
    enough = z.numel() >= _FEWEST
    return math.sqrt(float(z.square().mean()) / mean_square_limit(z.numel())) if enough else 0.0


def look_closer(recorded: RecordedCall, found: LawEvidence) -> None:
    """R20 and R19 of a suspect, and its output recomputed whole for the class of its fault."""
    x, module = recorded.first_input, recorded.callee
    weight = weight_of(module)
    if weight is None or x is None:
        return
    call, _ = unbiased(recorded)
    weight, width = host_products.as_multiplied(weight, recorded.output), x.shape[-1]
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
        turned = keeps_weight_transposed(module)
        other = parameter.detach()[:, order.to(x.device)] if turned else parameter.detach()[order.to(x.device)]
        with parameters_replaced([(module, "weight", other.contiguous())]):
            permuted = call(x)
    with host_arithmetic():
        found.results.append(exact("R20", read_back.double(), weight.T[:read].double()))
        wrong = differing(read_back.double(), weight.T[:read].double())
        found.facts.wrong_columns = columns(wrong.T)
        if permuted is not None:
            got, expected = host(permuted).double(), host(base).double()[:, order]
            scale = rms(expected)
            squares = torch.full_like(expected, 16 * scale**2)
            floor = combination([got, expected], [squares, squares], width, base.dtype)
            found.results.append(floored("R19", got - expected, floor.limit, scale))
        wide = x.detach().cpu()
        found.facts.expected = host_products.linear(
            wide, weight, None, base.detach().cpu(), host_products.Rows(256, _SEED)
        )
