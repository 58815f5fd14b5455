"""Kernels of linears, norms and activations in plain torch, each with one mistake a kernel author can make.

Products are summed in float32 tile by tile and rounded once, as devices do; only the mistake is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Kernel = Callable[..., Tensor]


def weight_of(module: nn.Module) -> Tensor:
    """[outputs, inputs], also of GPT-2's Conv1D."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _finish(module: nn.Module, total: Tensor, x: Tensor) -> Tensor:
    bias = getattr(module, "bias", None)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def _parts(module: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """Partial products, one for each tile of the inner dimension."""
    w = weight_of(module).float()
    return [x[..., k : k + step].float() @ w[:, k : k + step].T for k in range(0, x.shape[-1], step)]


def tiled(step: int = 16) -> Kernel:
    """The right kernel, for healthy models."""
    return lambda module, x: _finish(module, torch.stack(_parts(module, x, step)).sum(0), x)


def lost_inner_tail(step: int) -> Kernel:
    """What is left of the inner dimension after whole tiles is not summed."""
    return lambda module, x: _finish(
        module, sum(_parts(module, x[..., : x.shape[-1] // step * step], step), torch.zeros(())), x
    )


def split_k(parts: int, weights: tuple[float, ...]) -> Kernel:
    """Split-K: each part of the inner dimension counts `weights` times (0 lost, 2 added twice)."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        pieces = _parts(module, x, math.ceil(x.shape[-1] / parts))
        return _finish(module, sum((w * p for w, p in zip(weights, pieces, strict=False)), torch.zeros(())), x)

    return kernel


def split_k_tile(rows: slice, columns: slice) -> Kernel:
    """Split-K whose second part is lost in one tile of the output."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        first, *others = _parts(module, x, math.ceil(x.shape[-1] / 2))
        total = first + sum(others, torch.zeros(()))
        total[..., rows, columns] = first[..., rows, columns]
        return _finish(module, total, x)

    return kernel


def wrong_inner_tile(step: int, rows: slice, columns: slice) -> Kernel:
    """One output tile reads the first tile of the inputs twice, the second never."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        pieces = _parts(module, x, step)
        total = torch.stack(pieces).sum(0)
        total[..., rows, columns] += (pieces[0] - pieces[1])[..., rows, columns]
        return _finish(module, total, x)

    return kernel


def accumulator_not_cleared(width: int) -> Kernel:
    """The second tile of the output starts from what the first one left."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        total = torch.stack(_parts(module, x, 16)).sum(0)
        total[..., width : 2 * width] += total[..., :width].clone()
        return _finish(module, total, x)

    return kernel


def transposed_tile(side: int) -> Kernel:
    """The first tile of the output is written with rows and columns exchanged."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        total = torch.stack(_parts(module, x, 16)).sum(0)
        if total.shape[-2] >= side:
            total[..., :side, :side] = total[..., :side, :side].transpose(-1, -2).clone()
        return _finish(module, total, x)

    return kernel


def short_sums(step: int, dtype: torch.dtype) -> Kernel:
    """The accumulator is rounded to a short format after each tile."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in _parts(module, x, step):
            total = (total + part).to(dtype).float()
        return _finish(module, total, x)

    return kernel


def short_operands(dtype: torch.dtype) -> Kernel:
    """Inputs are rounded to a short format first."""
    return lambda module, x: _finish(module, x.to(dtype).float() @ weight_of(module).float().T, x)


def bias_twice(columns: slice) -> Kernel:
    """The bias is added twice in some columns."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        y = x.float() @ weight_of(module).float().T
        assert isinstance(module.bias, Tensor)
        y[..., columns] += module.bias.float()[columns]
        return _finish(module, y, x)

    return kernel


# -- norms. Any norm of transformers is taken: its eps is found by name, LayerNorm has a bias and takes off the mean.


def _eps(module: nn.Module) -> float:
    return float(next(getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)))


def _is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def _scaled(module: nn.Module, normed: Tensor, dtype: torch.dtype) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if _is_layer_norm(module):
        bias = module.bias
        y = normed * weight.float() + (bias.float() if isinstance(bias, Tensor) else 0.0)
        return y.to(dtype)
    if "Gemma" in type(module).__name__:  # these store the weight less 1
        return (normed * (1 + weight.float())).to(dtype)
    return weight * normed.to(dtype)


def norm(
    *,
    eps: float | None = None,
    statistics: Callable[[Tensor], Tensor] = lambda v: v,
    width: Callable[[int], float] = float,
    keep_mean: bool = False,
    inverse_root: Callable[[Tensor], Tensor] = torch.rsqrt,
    columns: Callable[[Tensor], Tensor] = lambda x: x,
) -> Kernel:
    """A norm with one part of it made otherwise; the defaults are right."""

    def kernel(module: nn.Module, x: Tensor) -> Tensor:
        wide = x.float()
        if _is_layer_norm(module) and not keep_mean:
            wide = wide - statistics(columns(wide)).sum(-1, keepdim=True) / width(columns(wide).shape[-1])
        part = columns(wide)
        square = statistics(part * part).sum(-1, keepdim=True) / width(part.shape[-1])
        scale = inverse_root(square + (_eps(module) if eps is None else eps))
        return _scaled(module, wide * scale, x.dtype)

    return kernel


def norm_of_row_before(module: nn.Module, x: Tensor) -> Tensor:
    """Each row is divided by the rms of the row before."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True) if _is_layer_norm(module) else wide
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + _eps(module))
    return _scaled(module, centred * torch.cat([scale[..., :1, :], scale[..., :-1, :]], -2), x.dtype)


def in_bfloat16(v: Tensor) -> Tensor:
    return v.bfloat16().float()


def bit_trick_rsqrt(v: Tensor) -> Tensor:
    """The shift of the exponent with one Newton step: up to 0.17 % low."""
    guess = (0x5F3759DF - (v.contiguous().view(torch.int32) >> 1)).view(torch.float32)
    return guess * (1.5 - 0.5 * v * guess * guess)


# -- functions of one number


def poly_exp(degree: int) -> Callable[[Tensor], Tensor]:
    """exp as 2^n times a Taylor polynomial of the rest."""

    def exp(x: Tensor) -> Tensor:
        scaled = (x.float() * math.log2(math.e)).clamp(-126, 126)
        whole = scaled.floor()
        rest = (scaled - whole) * math.log(2)
        total = sum((rest**k / math.factorial(k) for k in range(degree + 1)), torch.zeros(()))
        return torch.where(x == -math.inf, torch.zeros(()), torch.ldexp(total, whole.int()))

    return exp


def silu_by(exp: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.float() / (1 + exp(-x.float()))).to(x.dtype)


def silu_cut(limit: float) -> Callable[[Tensor], Tensor]:
    """Inputs below -limit give 0."""
    return lambda x: torch.where(x < -limit, torch.zeros_like(x), torch.nn.functional.silu(x.float()).to(x.dtype))


def hard_silu(x: Tensor) -> Tensor:
    return (x.float() * ((x.float() + 3) / 6).clamp(0, 1)).to(x.dtype)


def gelu_poly(x: Tensor) -> Tensor:
    """x times a cubic for the normal distribution function, cut at 2.5 standard deviations."""
    t = x.float().clamp(-2.5, 2.5)
    return (x.float() * (0.5 + 0.36 * t - 0.0256 * t**3)).to(x.dtype)


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), where another gelu was asked for."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def one_argument(function: Callable[[Tensor], Tensor]) -> Any:
    """For `intercepted`: the first argument through another function."""
    return lambda func, args, kwargs: function(args[0])
