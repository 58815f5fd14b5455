"""Faults of single modules: linears, norms, activations, embedding and head, by patched forwards and own kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import field_damage as d
import field_kernels as k
import torch
from field_cases import (
    ACTIVATION,
    BIAS,
    DEAD,
    DEAD_ZONE,
    FLIPS,
    GAIN,
    LINEAR,
    LOST_INPUT,
    NORM,
    PLAIN,
    ROWS,
    SATURATION,
    SHORT,
    STALE,
    STUCK,
    SUMS,
    SWAPPED,
    TABLE,
    TILE,
    FaultCase,
    Shape,
    at,
)
from field_models import MODELS
from field_scopes import FunctionOutput, MakeDamage, forward_kernel, forward_output, intercepted
from torch import nn
from torch.nn import functional as F

Scope = AbstractContextManager[None]
LONG, RAGGED, DECODE, BATCH = Shape(tokens=96), Shape(tokens=29), Shape(tokens=12, decode=4), Shape(batch=4)
RARE = Shape(calls=12)


def on(path: str, scope: Callable[[nn.Module], Scope]) -> Callable[[nn.Module], Scope]:
    """A fault of one module, by its dotted name."""
    return lambda model: scope(model.get_submodule(path))


def place_of(role: str, layer: int) -> int | str:
    return {"embed": "embed", "positions": "embed", "head": "lm_head", "final_norm": "final_norm"}.get(role, layer)


def case(
    name: str,
    kind: str,
    where: tuple[str, str, int, str],
    scope: Callable[[nn.Module], Scope],
    operators: frozenset[str],
    classes: frozenset[str],
    shape: Shape = PLAIN,
    healthy: Callable[[nn.Module], Scope] | None = None,
) -> FaultCase:
    """A case of one module: `where` is model, dtype, layer's role (q, down, norm1 ...) and index."""
    model, dtype, layer, role = where
    path = MODELS[model].name(role, layer)
    answer = at(place_of(role, layer), operators)
    title = f"{name}/{model}.{dtype}.{path}"
    right = None if healthy is None else on(path, healthy)
    return FaultCase(title, kind, model, dtype, (answer,), classes, on(path, scope), shape, path, right)


_B, _F, _H = "bfloat16", "float32", "float16"

# name, damage, classes, shape; the place comes from the list below, one after another
_OUTPUTS: tuple[tuple[str, MakeDamage, frozenset[str], Shape], ...] = (
    ("gain-3-percent", d.gain(1.03), GAIN, PLAIN),
    ("offset", d.offset(0.2), BIAS, PLAIN),
    ("small-values-zero", d.dead_zone(0.3), DEAD_ZONE, PLAIN),
    ("clamped-at-2-rms", d.saturation(2.0), SATURATION, PLAIN),
    ("two-low-bits-cut", d.short(2), SHORT, PLAIN),
    ("mantissa-bit-stuck", d.stuck(3), STUCK, PLAIN),
    ("lane-sign-stuck", d.stuck(15, period=16, lane=3), STUCK, PLAIN),
    ("lane-exponent-stuck", d.stuck(9, period=8, lane=5), STUCK, PLAIN),
    ("single-flips-period-32", d.flips(6), FLIPS, PLAIN),
    ("multi-bit-flips-period-32", d.flips(6, single=False), FLIPS, PLAIN),
    ("one-flip-a-call", d.flips(1), FLIPS, PLAIN),
    ("last-8-channels-zero", d.channels(slice(-8, None), d.zero()), DEAD, PLAIN),
    ("one-channel-zero", d.channels([7], d.zero()), DEAD, PLAIN),
    ("every-8th-channel-doubled", d.channels(slice(2, None, 8), d.gain(2.0)), GAIN | TILE, PLAIN),
    ("one-channel-negated", d.channels([11], d.negated()), GAIN | STUCK | TILE, PLAIN),
    ("two-channels-swapped", d.swapped(3, 12), SWAPPED, PLAIN),
    ("tile-8x8-scaled", d.tile(8, 8, 8, d.gain(1.2)), TILE, PLAIN),
    ("tile-4x4-zero", d.tile(4, 16, 4, d.zero()), TILE | DEAD, PLAIN),
    ("one-row-offset", d.rows([17], d.offset(0.5)), ROWS, PLAIN),
    ("second-sequence-scaled", d.batch_above_zero(d.gain(1.1)), ROWS, PLAIN),
    ("stale-rows-4-to-8", d.stale_rows(4, 8), STALE, Shape(calls=3)),
    ("rows-one-late", d.shifted_rows(), STALE | ROWS, PLAIN),
    ("last-5-elements-lost", d.last_elements(5), ROWS | DEAD, PLAIN),
    ("from-64-tokens-scaled", d.long_only(64, d.gain(1.1)), GAIN, LONG),
    ("row-80-offset", d.rows(slice(80, 81), d.offset(1.0)), ROWS, LONG),
    ("ragged-tail-rows-zero", d.ragged_only(8, d.rows(slice(-5, None), d.zero())), ROWS, RAGGED),
    ("decode-scaled", d.decode_only(d.gain(1.08)), GAIN, DECODE),
    ("decode-tail-zero", d.decode_only(d.channels(slice(-4, None), d.zero())), DEAD, DECODE),
    ("batch-4-third-row-scaled", d.when(lambda y: y.shape[0] >= 4, d.batch_above_zero(d.gain(1.2))), ROWS, BATCH),
    ("every-5th-call-scaled", d.every(5, d.gain(1.5)), GAIN | frozenset({"noise"}), RARE),
    ("every-9th-call-row-zero", d.every(9, d.rows([3], d.zero())), ROWS | frozenset({"noise"}), RARE),
    ("one-element-infinite", d.one_element(math.inf), FLIPS | {"unknown"}, PLAIN),
    ("one-element-nan", d.one_element(math.nan), FLIPS | {"unknown"}, PLAIN),
)
_PLACES = (
    ("llama", _B, 1, "q"),
    ("gpt2", _F, 2, "down"),
    ("qwen2", _B, 0, "gate"),
    ("demo", _B, 10, "o"),
    ("opt", _H, 3, "v"),
    ("mistral", _F, 2, "v"),
    ("gpt_neox", _B, 1, "o"),
    ("olmo2", _F, 3, "down"),
    ("phi3", _B, 2, "up"),
    ("llama-wide", _H, 1, "k"),
    ("granite", _B, 0, "up"),
    ("starcoder2", _F, 2, "up"),
    ("gemma2", _B, 3, "o"),
)


def output_cases() -> Iterator[FaultCase]:
    """Each damage in two modules, so that every kind of module meets many kinds of damage."""
    for index, (name, make, classes, shape) in enumerate(_OUTPUTS):
        for step in (0, 6):
            where = _PLACES[(index + step) % len(_PLACES)]
            if "sign" in name or "exponent" in name:  # bits of a 16-bit format
                where = (where[0], _B, where[2], where[3])
            if where[0] == "gpt2" and "decode" in name:
                where = _PLACES[0]
            yield case(name, "forward", where, functools.partial(forward_output, make=make), LINEAR, classes, shape)


def _kernel(kernel: k.Kernel) -> Callable[[nn.Module], Scope]:
    return functools.partial(forward_kernel, kernel=kernel)


def linear_kernel_cases() -> Iterator[FaultCase]:
    rows, columns = slice(8, 16), slice(8, 24)
    kernels: tuple[tuple[str, k.Kernel, frozenset[str], Shape], ...] = (
        ("inner-tail-lost", k.lost_inner_tail(20), LOST_INPUT, PLAIN),
        ("split-k-part-lost", k.split_k(4, (1, 1, 0, 1)), LOST_INPUT, PLAIN),
        ("split-k-part-twice", k.split_k(4, (1, 2, 1, 1)), LOST_INPUT | TILE, PLAIN),
        ("split-k-lost-in-a-tile", k.split_k_tile(rows, columns), TILE | LOST_INPUT, PLAIN),
        ("tile-reads-wrong-inputs", k.wrong_inner_tile(16, rows, columns), TILE, PLAIN),
        ("accumulator-not-cleared", k.accumulator_not_cleared(12), TILE | STALE, PLAIN),
        ("tile-transposed", k.transposed_tile(8), TILE | SWAPPED, PLAIN),
        ("sums-in-bfloat16", k.short_sums(4, torch.bfloat16), SUMS, PLAIN),
        ("inputs-in-float8", k.short_operands(torch.float8_e4m3fn), SUMS, PLAIN),
    )
    places = (
        ("llama-wide", _B, 2, "down"),
        ("qwen3", _F, 1, "o"),
        ("gpt2", _B, 3, "up"),
        ("demo", _F, 5, "gate"),
        ("stablelm", _B, 0, "q"),
        ("bloom", _F, 2, "q"),
        ("smollm3", _H, 1, "up"),
    )
    for index, (name, kernel, classes, shape) in enumerate(kernels):
        for step in (0, 3):
            where = places[(index + step) % 7]
            yield case(name, "kernel", where, _kernel(kernel), LINEAR, classes, shape, _kernel(k.tiled()))
    biased = k.bias_twice(slice(0, 8))
    for where in (("opt", _B, 1, "down"), ("gpt_neox", _F, 2, "up")):
        right = _kernel(k.tiled())
        yield case("bias-added-twice", "kernel", where, _kernel(biased), LINEAR, BIAS | TILE, PLAIN, right)


def norm_cases() -> Iterator[FaultCase]:
    half = k.norm(columns=lambda x: x[..., : x.shape[-1] // 2])
    kernels: tuple[tuple[str, k.Kernel, frozenset[str], tuple[tuple[str, str, int, str], ...]], ...] = (
        ("eps-1e-2", k.norm(eps=1e-2), TABLE | GAIN, (("llama", _F, 1, "norm1"), ("gpt2", _F, 2, "norm2"))),
        ("no-eps", k.norm(eps=0.0), TABLE | GAIN, (("opt", _F, 0, "norm1"),)),
        (
            "statistics-in-bfloat16",
            k.norm(statistics=k.in_bfloat16),
            SUMS | TABLE,
            (("demo", _B, 1, "norm1"), ("qwen2", _F, 2, "norm2"), ("gpt_neox", _B, 3, "norm1")),
        ),
        ("divides-by-n-less-1", k.norm(width=lambda n: n - 1.0), TABLE | GAIN, (("mistral", _B, 0, "norm2"),)),
        (
            "mean-not-taken-off",
            k.norm(keep_mean=True),
            TABLE | BIAS,
            (("gpt2", _B, 1, "norm1"), ("bloom", _F, 3, "norm2")),
        ),
        (
            "rsqrt-by-bit-trick",
            k.norm(inverse_root=k.bit_trick_rsqrt),
            TABLE | GAIN,
            (("demo", _B, 7, "norm2"), ("llama", _F, 3, "norm1"), ("starcoder2", _B, 1, "norm2")),
        ),
        ("statistics-of-half", half, TABLE | LOST_INPUT, (("granite", _B, 2, "norm1"), ("opt", _F, 2, "norm2"))),
        ("scale-of-row-before", k.norm_of_row_before, TABLE | STALE | ROWS, (("qwen3", _B, 1, "norm1"),)),
    )
    for name, kernel, classes, places in kernels:
        for where in places:
            right = _kernel(k.norm())
            yield case(f"norm-{name}", "kernel", where, _kernel(kernel), NORM, classes | {"unknown"}, PLAIN, right)
    for name, make, classes, where in (
        ("last-4-channels-unscaled", d.channels(slice(-4, None), d.gain(0.5)), GAIN | TILE, ("olmo2", _B, 1, "norm2")),
        ("scaled", d.gain(1.1), GAIN, ("own-alibi", _F, 1, "norm1")),
        ("scaled", d.gain(1.1), GAIN, ("own-parallel", _B, 2, "norm1")),
        ("final-scaled", d.gain(1.02), GAIN, ("gemma2", _B, 0, "final_norm")),
        ("final-row-zero", d.rows([5], d.zero()), ROWS, ("demo", _B, 0, "final_norm")),
        ("decode-scaled", d.decode_only(d.gain(1.05)), GAIN, ("llama", _B, 2, "norm2")),
    ):
        shape = DECODE if "decode" in name else PLAIN
        yield case(f"norm-{name}", "forward", where, functools.partial(forward_output, make=make), NORM, classes, shape)


def activation_cases() -> Iterator[FaultCase]:
    def functions(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], Scope]:
        return lambda model: intercepted([model.get_submodule(path)], (F.silu, F.gelu), k.one_argument(function))

    table: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor], str, str, int], ...] = (
        ("silu-exp-of-degree-2", k.silu_by(k.poly_exp(2)), "llama", _F, 1),
        ("silu-exp-of-degree-3", k.silu_by(k.poly_exp(3)), "demo", _F, 4),
        ("silu-exp-of-degree-1", k.silu_by(k.poly_exp(1)), "qwen2", _B, 3),
        ("silu-cut-below-1", k.silu_cut(1.0), "demo", _B, 12),
        ("silu-hard", k.hard_silu, "granite", _B, 1),
        ("gelu-cubic", k.gelu_poly, "own-gpt", _F, 2),
        ("gelu-cubic", k.gelu_poly, "gpt_neox", _B, 0),
        ("gelu-sigmoid", k.gelu_sigmoid, "gpt_neox", _F, 2),
        ("gelu-sigmoid", k.gelu_sigmoid, "starcoder2", _F, 1),
        ("relu-for-silu", torch.relu, "smollm3", _B, 2),
    )
    for name, function, model, dtype, layer in table:
        base = MODELS[model]
        inside = base.name("mlp" if "mlp" in base.names else "block", layer)
        yield FaultCase(
            f"{name}/{model}.{dtype}.{layer}",
            "function",
            model,
            dtype,
            (at(layer, ACTIVATION),),
            TABLE | DEAD_ZONE | SATURATION,
            functools.partial(lambda model, scope: scope(model), scope=functions(inside, function)),
            module=inside,
        )
    scaled: tuple[tuple[str, str, str, int], ...] = (("scaled", "mistral", _B, 1), ("scaled", "own-parallel", _F, 3))
    for name, model, dtype, layer in scaled:
        path = MODELS[model].name("mlp" if "mlp" in MODELS[model].names else "block", layer)

        def scope(module: nn.Module, path: str = path) -> Scope:
            return intercepted([module.get_submodule(path)], (F.silu, F.gelu), FunctionOutput(d.gain(1.05)))

        answers = (at(layer, ACTIVATION),)
        yield FaultCase(
            f"activation-{name}/{model}.{dtype}.{layer}", "function", model, dtype, answers, GAIN, scope, module=path
        )


def cases() -> list[FaultCase]:
    return [*output_cases(), *linear_kernel_cases(), *norm_cases(), *activation_cases()]
