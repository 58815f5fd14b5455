"""Faults below one rounding of a 16-bit output: norms without float32, short polynomials for exp, poor roots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import field_attention as a
import field_kernels as k
import torch
from field_cases import ATTENTION, GAIN, NORM, SUMS, TABLE, FaultCase, at
from field_models import MODELS
from field_population import case
from field_scopes import forward_kernel, intercepted
from torch import Tensor, nn
from torch.nn import functional as F

_B, _H = "bfloat16", "float16"


def norm_in_its_dtype(module: nn.Module, x: Tensor) -> Tensor:
    """Every step of the norm in the input's own dtype."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    centred = x - x.mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else x
    y = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + k._eps(module))
    y = y * (1 + weight if "Gemma" in type(module).__name__ else weight)
    return y + bias if isinstance(bias, Tensor) else y


def short_root(bits: int) -> Callable[[Tensor], Tensor]:
    """A reciprocal root with so many bits of mantissa."""

    def root(v: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(torch.rsqrt(v))
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)

    return root


def table_exp(entries: int) -> Callable[[Tensor], Tensor]:
    """exp2 of the fraction from a table of so many entries, without interpolation."""

    def exp(x: Tensor) -> Tensor:
        scaled = (x.float() * 1.4426950408889634).clamp(-126, 126)
        whole = scaled.floor()
        fraction = ((scaled - whole) * entries).floor() / entries
        return torch.where(x == -torch.inf, torch.zeros(()), torch.ldexp(torch.exp2(fraction), whole.int()))

    return exp


_NORMS: tuple[tuple[str, k.Kernel, frozenset[str], tuple[tuple[str, str, int, str], ...]], ...] = (
    (
        "all-in-its-dtype",
        norm_in_its_dtype,
        SUMS | TABLE,
        (
            ("llama", _B, 2, "norm1"),
            ("qwen2", _B, 0, "norm2"),
            ("gpt2", _B, 1, "norm1"),
            ("gemma2", _B, 3, "norm1"),
            ("opt", _H, 2, "norm2"),
            ("mistral", _H, 1, "norm1"),
            ("granite", _B, 3, "norm2"),
            ("smollm3", _B, 0, "norm1"),
        ),
    ),
    (
        "squares-in-bfloat16",
        k.norm(statistics=k.in_bfloat16),
        SUMS | TABLE,
        (("llama-wide", _B, 1, "norm1"), ("starcoder2", _B, 2, "norm1"), ("phi3", _B, 3, "norm2")),
    ),
    (
        "root-after-one-newton-step",
        k.norm(inverse_root=k.bit_trick_rsqrt),
        TABLE | GAIN,
        (("olmo2", _B, 0, "norm1"), ("gpt_neox", _H, 1, "norm2"), ("mixtral", _B, 2, "norm1")),
    ),
    (
        "root-of-9-bits",
        k.norm(inverse_root=short_root(9)),
        TABLE | SUMS,
        (("stablelm", _B, 1, "norm1"), ("qwen3", _B, 3, "norm2"), ("bloom", _H, 0, "norm1")),
    ),
)

_EXPS: tuple[tuple[str, Callable[[Tensor], Tensor], tuple[tuple[str, str, int], ...]], ...] = (
    ("degree-2", k.poly_exp(2), (("qwen3", _B, 1), ("gpt2", _B, 3), ("opt", _H, 0))),
    ("degree-3", k.poly_exp(3), (("llama", _B, 0), ("mistral", _B, 3), ("starcoder2", _H, 1), ("granite", _B, 2))),
    ("table-of-64", table_exp(64), (("llama-wide", _B, 3), ("olmo2", _B, 2), ("phi3", _H, 1))),
    ("table-of-128", table_exp(128), (("smollm3", _B, 2), ("qwen2", _H, 3))),
)

_ROOTS = (("qwen2", _B, 3, "norm1"), ("llama", _H, 0, "norm2"), ("gemma2", _B, 1, "norm2"), ("mistral", _B, 2, "norm2"))


def _newton(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return k.bit_trick_rsqrt(args[0].float()).to(args[0].dtype)


def _root_inside(module: nn.Module) -> AbstractContextManager[None]:
    return intercepted([module], (torch.rsqrt,), _newton)


def cases() -> Iterator[FaultCase]:
    for name, kernel, classes, places in _NORMS:
        for where in places:
            scope, right = (functools.partial(forward_kernel, kernel=each) for each in (kernel, k.norm()))
            yield case(f"floor-norm-{name}", "kernel", where, scope, NORM, classes | {"unknown"}, healthy=right)
    for where in _ROOTS:
        yield case("floor-torch-rsqrt-newton", "function", where, _root_inside, NORM, TABLE | GAIN)
    for name, exp, sites in _EXPS:
        for model, dtype, layer in sites:
            path = MODELS[model].name("attention", layer)

            def scope(root: nn.Module, path: str = path, exp: Any = exp) -> AbstractContextManager[None]:
                return intercepted(
                    [root.get_submodule(path)], (F.scaled_dot_product_attention,), a.kernel(a.Flash(exp=exp))
                )

            title = f"floor-attention-exp-{name}/{model}.{dtype}.{layer}"
            answers = (at(layer, ATTENTION),)
            yield FaultCase(title, "kernel", model, dtype, answers, TABLE | {"unknown"}, scope, module=path)
