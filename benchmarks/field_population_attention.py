"""Faults of attention itself: fused kernels in tiles, eager products and softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import field_attention as a
import field_damage as d
import field_kernels as k
import torch
from field_cases import (
    ATTENTION,
    CACHE,
    FLIPS,
    GAIN,
    LOST_INPUT,
    MASK,
    PLAIN,
    POSITION,
    ROWS,
    SHORT,
    STALE,
    SUMS,
    SWAPPED,
    TABLE,
    FaultCase,
    Shape,
    at,
)
from field_models import MODELS
from field_population import DECODE, RAGGED, Scope
from field_scopes import FunctionOutput, MakeDamage, intercepted
from torch import nn
from torch.nn import functional as F

Classes = frozenset[str]
Where = tuple[str, str, int | None]  # model, dtype, layer
_B, _F = "bfloat16", "float32"
_UNKNOWN = frozenset({"unknown"})
_SDPA = (F.scaled_dot_product_attention,)
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)
_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
LEFT = Shape(padding="left")


def made(
    name: str,
    kind: str,
    where: Where,
    fault: Callable[[nn.Module], Scope],
    classes: Classes,
    shape: Shape = PLAIN,
    healthy: Callable[[nn.Module], Scope] | None = None,
) -> FaultCase:
    """A case in one layer's attention, or in all (None)."""
    model, dtype, layer = where
    answer = at(layer, ATTENTION)
    path = "" if layer is None else MODELS[model].name("attention", layer)
    title = f"{name}/{model}.{dtype}.{'all' if layer is None else layer}"
    return FaultCase(title, kind, model, dtype, (answer,), classes, fault, shape, path, healthy)


def _fused(model: str, layer: int | None, instead: Any) -> Callable[[nn.Module], Scope]:
    """Fused attention replaced in one layer, or everywhere."""

    def fault(whole: nn.Module) -> Scope:
        modules = [] if layer is None else [whole.get_submodule(MODELS[model].name("attention", layer))]
        return intercepted(modules, _SDPA, instead)

    return fault


def kernel_cases() -> Iterator[FaultCase]:
    """Fused attention as a tiled kernel with one mistake."""
    f, with_bias = a.Flash, a.with_bias
    sums = TABLE | LOST_INPUT | _UNKNOWN | GAIN
    plain = PLAIN
    table: tuple[tuple[str, a.Flash, tuple[a.Change, ...], Classes, Where, Shape], ...] = (
        ("output-not-rescaled", f(rescale_output=False), (), sums, ("llama", _B, 1), plain),
        ("output-not-rescaled", f(rescale_output=False), (), sums, ("demo", _F, None), plain),
        ("sum-not-rescaled", f(rescale_sum=False), (), sums, ("qwen2", _B, 2), plain),
        ("sum-in-bfloat16", f(short_sum=True, step=1), (), SUMS | GAIN, ("demo", _F, 7), plain),
        ("sum-in-bfloat16", f(short_sum=True, step=1), (), SUMS | GAIN, ("mistral", _B, 1), plain),
        ("exp-of-degree-1", f(exp=k.poly_exp(1)), (), TABLE, ("gpt2", _F, 1), plain),
        ("exp-of-degree-2", f(exp=k.poly_exp(2)), (), TABLE, ("demo", _B, 4), plain),
        ("exp-of-degree-3", f(exp=k.poly_exp(3)), (), TABLE, ("qwen3", _F, 0), plain),
        ("key-tile-twice", f(twice=1), (), sums, ("gpt_neox", _B, 3), plain),
        ("key-tile-not-in-sum", f(lost=2), (), sums, ("opt", _F, 2), plain),
        ("ragged-key-tail-lost", f(lose_tail=True), (), LOST_INPUT | MASK, ("llama", _F, 2), RAGGED),
        ("ragged-key-tail-lost", f(lose_tail=True), (), LOST_INPUT | MASK, ("phi3", _B, None), RAGGED),
        (
            "scores-in-float8",
            f(short_scores=torch.float8_e4m3fn),
            (),
            SHORT | SUMS | TABLE,
            ("starcoder2", _B, 1),
            plain,
        ),
        ("mask-leaks-at-tile-borders", f(), (with_bias(a.leak_at_borders(8)),), MASK | ROWS, ("llama", _B, 3), plain),
        (
            "mask-leaks-at-tile-borders",
            f(),
            (with_bias(a.leak_at_borders(16)),),
            MASK | ROWS,
            ("demo", _B, None),
            plain,
        ),
        ("mask-hides-tile-starts", f(), (with_bias(a.misses_tile_start(8)),), MASK | ROWS, ("stablelm", _F, 1), plain),
        ("causal-mask-sees-one-more", f(), (with_bias(a.sees_one_more),), MASK, ("qwen2", _B, 0), plain),
        ("causal-mask-sees-one-more", f(), (with_bias(a.sees_one_more),), MASK, ("gpt2", _B, None), plain),
        ("causal-mask-misses-itself", f(), (with_bias(a.misses_itself),), MASK, ("granite", _F, 2), plain),
        ("window-one-too-wide", f(), (with_bias(a.wider_window),), MASK, ("mistral", _B, 2), plain),
        ("window-one-too-wide", f(), (with_bias(a.wider_window),), MASK, ("mistral", _F, None), plain),
        ("padding-ignored", f(), (with_bias(a.ignores_padding),), MASK, ("llama", _B, 1), LEFT),
        ("padding-ignored", f(), (with_bias(a.ignores_padding),), MASK, ("qwen3", _F, None), LEFT),
        ("scale-8-percent-low", f(), (a.scale(0.92),), GAIN | TABLE | _UNKNOWN, ("smollm3", _B, 1), plain),
        ("wrong-head-mapping", f(spread=a.mixed_heads), (), SWAPPED, ("qwen2", _F, 2), plain),
        ("wrong-head-mapping", f(spread=a.mixed_heads), (), SWAPPED, ("llama", _B, None), plain),
        ("keys-one-position-off", f(), (a.keys(a.shifted),), POSITION | STALE, ("llama-wide", _B, 2), plain),
        ("values-one-position-off", f(), (a.values(a.shifted),), POSITION | STALE, ("opt", _B, 0), plain),
        ("key-pages-swapped", f(), (a.keys(a.swapped_pages(4, 1, 3)),), CACHE, ("demo", _B, 11), plain),
        ("value-page-of-other-sequence", f(), (a.values(a.other_sequence),), CACHE | ROWS, ("gemma2", _B, 1), plain),
        (
            "decode-key-pages-swapped",
            f(),
            (a.decode_only(a.keys(a.swapped_pages(4, 0, 2))),),
            CACHE,
            ("llama", _B, 0),
            DECODE,
        ),
        ("decode-scale-wrong", f(), (a.decode_only(a.scale(0.7)),), GAIN | TABLE | _UNKNOWN, ("qwen3", _B, 1), DECODE),
        (
            "decode-misses-newest-key",
            f(),
            (a.decode_only(with_bias(a.misses_itself)),),
            MASK | CACHE,
            ("mistral", _F, 3),
            DECODE,
        ),
    )
    for name, flash, changes, classes, where, shape in table:
        model, _, layer = where
        fault, right = _fused(model, layer, a.kernel(flash, *changes)), _fused(model, layer, a.kernel(f(flash.step)))
        yield made(f"attention-{name}", "kernel", where, fault, classes, shape, right)
    outputs: tuple[tuple[str, MakeDamage, Classes, Where, Shape], ...] = (
        ("decode-scaled", d.decode_only(d.gain(1.05)), GAIN, ("llama", _B, None), DECODE),
        ("decode-flips", d.decode_only(d.flips(2, period=8)), FLIPS, ("qwen2", _B, 1), DECODE),
        (
            "rows-100-to-104-scaled",
            d.rows(slice(100, 104), d.gain(1.2)),
            ROWS | GAIN,
            ("llama", _B, 2),
            Shape(tokens=160),
        ),
        ("second-sequence-scaled", d.batch_above_zero(d.gain(1.1)), ROWS | GAIN, ("gpt2", _B, 3), PLAIN),
        ("tile-scaled", d.tile(8, 0, 8, d.gain(1.3)), ROWS, ("demo", _B, 2), PLAIN),
        ("stale-rows", d.stale_rows(3, 6), STALE, ("granite", _B, 0), Shape(calls=3)),
    )
    for name, make, classes, where, shape in outputs:
        fault = functools.partial(_scaled, make=make, model=where[0], layer=where[2])
        yield made(f"attention-output-{name}", "function", where, fault, classes, shape)


def _scaled(whole: nn.Module, *, make: MakeDamage, model: str, layer: int | None) -> Scope:
    return _fused(model, layer, FunctionOutput(make))(whole)


def _eager(
    model: str, layer: int | None, functions: tuple[Any, ...], instead: Callable[[], Any]
) -> Callable[[nn.Module], Scope]:
    def fault(whole: nn.Module) -> Scope:
        base = MODELS[model]
        found = [layer] if layer is not None else range(4)
        return intercepted([whole.get_submodule(base.name("attention", i)) for i in found], functions, instead())

    return fault


def eager_cases() -> Iterator[FaultCase]:
    """Eager attention and hand-written ones: products and softmax, each a call of its own."""

    def exp(degree: int) -> Callable[[], Any]:
        def instead(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            scores = args[0].float()
            powers = k.poly_exp(degree)(scores - scores.amax(-1, keepdim=True))
            return (powers / powers.sum(-1, keepdim=True)).to(func(*args, **kwargs).dtype)

        return lambda: instead

    def output(make: MakeDamage, nth: int | None = None) -> Callable[[], Any]:
        return lambda: FunctionOutput(make, lambda y, args: y.dim() == 4, nth)

    table: tuple[tuple[str, tuple[Any, ...], Callable[[], Any], Classes, Where], ...] = (
        ("softmax-exp-of-degree-2", _SOFTMAX, exp(2), TABLE, ("llama-eager", _F, 1)),
        ("softmax-exp-of-degree-1", _SOFTMAX, exp(1), TABLE, ("own-gpt", _F, 2)),
        ("softmax-scaled", _SOFTMAX, output(d.gain(1.03)), GAIN | TABLE, ("qwen2-eager", _B, 2)),
        ("scores-scaled", _MATMUL, output(d.gain(1.1), 0), GAIN, ("gpt2-eager", _F, 1)),
        ("scores-tile-zero", _MATMUL, output(d.tile(8, 8, 8, d.zero()), 0), ROWS, ("llama-eager", _B, 3)),
        (
            "product-with-values-tail-zero",
            _MATMUL,
            output(d.channels([-1], d.zero()), 1),
            GAIN | ROWS,
            ("mistral-eager", _B, 0),
        ),
        ("product-with-values-flips", _MATMUL, output(d.flips(3), 1), FLIPS, ("own-alibi", _F, 1)),
        ("scores-saturated", _MATMUL, output(d.saturation(1.0), 0), frozenset({"saturation"}), ("own-parallel", _B, 3)),
        ("softmax-row-zero", _SOFTMAX, output(d.rows([5], d.zero())), ROWS, ("own-gpt", _B, 0)),
    )
    for name, functions, instead, classes, where in table:
        yield made(f"eager-{name}", "function", where, _eager(where[0], where[2], functions, instead), classes)


def cases() -> list[FaultCase]:
    return [*kernel_cases(), *eager_cases()]
