"""Faults between modules: hooks, embeddings, residual sums, logits, copies, positions, experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import field_damage as d
import torch
from field_cases import (
    ANY,
    BIAS,
    DEAD,
    DEAD_ZONE,
    EXPERTS,
    FLIPS,
    GAIN,
    LINEAR,
    PLAIN,
    POSITION,
    ROWS,
    SHORT,
    STALE,
    STRUCTURE,
    STUCK,
    SUMS,
    TILE,
    Answer,
    FaultCase,
    Shape,
    at,
)
from field_models import LAYERS, MODELS
from field_population import BATCH, DECODE, LONG, RARE, Scope
from field_scopes import (
    FunctionOutput,
    MakeDamage,
    attribute,
    forward_arguments,
    forward_output,
    input_hook,
    intercepted,
    output_hook,
)
from torch import Tensor, nn

_B, _F, _H = "bfloat16", "float32", "float16"
Only = Callable[[Tensor, tuple[Any, ...]], bool]
Classes = frozenset[str]
_RESIDUAL = frozenset({"residual"})
_OWN = {"norm1": frozenset({"norm"}), "down": LINEAR}  # the operator of a module that a hook is on


def _leaves(layer: int, depth: int) -> tuple[Answer, ...]:
    """What leaves block `layer`: the sum of that block, or what enters the next."""
    after = layer + 1 if layer + 1 < depth else "final_norm"
    return at(layer, _RESIDUAL), at((layer, after), ANY, edge=True)


def _depth(model: str) -> int:
    return 16 if MODELS[model].is_demo else LAYERS


def made(
    name: str,
    kind: str,
    where: tuple[str, str, str],
    scope: Callable[[nn.Module], Scope],
    answers: tuple[Answer, ...],
    classes: Classes,
    shape: Shape = PLAIN,
) -> FaultCase:
    """A case in the module at a path: `where` is model, dtype, path ("" for the whole model)."""
    model, dtype, path = where

    def fault(whole: nn.Module) -> Scope:
        return scope(whole.get_submodule(path) if path else whole)

    title = f"{name}/{model}.{dtype}.{path or 'model'}"
    return FaultCase(title, kind, model, dtype, answers, classes, fault, shape, path)


def hook_cases() -> Iterator[FaultCase]:
    blocks: tuple[tuple[str, MakeDamage, Classes, str, str, int, Shape], ...] = (
        ("small-values-zero", d.dead_zone(0.3), DEAD_ZONE, "demo", _B, 10, PLAIN),
        ("scaled", d.gain(1.05), GAIN, "llama", _B, 1, PLAIN),
        ("scaled", d.gain(0.9), GAIN, "gpt2", _F, 2, PLAIN),
        ("last-channels-zero", d.channels(slice(-6, None), d.zero()), DEAD, "qwen2", _B, 0, PLAIN),
        ("one-row-offset", d.rows([9], d.offset(0.4)), ROWS, "mistral", _F, 3, PLAIN),
        ("flips-period-32", d.flips(4), FLIPS, "gpt_neox", _B, 2, PLAIN),
        ("bit-stuck-in-lane", d.stuck(6, period=16, lane=9), STUCK, "opt", _B, 1, PLAIN),
        ("stale-rows", d.stale_rows(0, 8), STALE, "granite", _B, 2, Shape(calls=3)),
        ("second-sequence-scaled", d.batch_above_zero(d.gain(1.05)), ROWS, "olmo2", _F, 1, PLAIN),
        ("decode-scaled", d.decode_only(d.gain(1.05)), GAIN, "phi3", _B, 1, DECODE),
        ("long-scaled", d.long_only(64, d.gain(1.05)), GAIN, "starcoder2", _B, 2, LONG),
        ("low-bits-cut", d.short(3), SHORT, "stablelm", _F, 1, PLAIN),
        ("offset", d.offset(0.1), BIAS, "own-gpt", _F, 1, PLAIN),
        ("every-6th-call-scaled", d.every(6, d.gain(1.3)), GAIN | {"noise"}, "smollm3", _B, 0, RARE),
    )
    for name, make, classes, model, dtype, layer, shape in blocks:
        where = (model, dtype, MODELS[model].name("block", layer))
        scope = functools.partial(output_hook, make=make)
        yield made(f"block-hook-{name}", "hook", where, scope, _leaves(layer, _depth(model)), classes, shape)
    inputs: tuple[tuple[str, str, MakeDamage, Classes, str, str, int], ...] = (
        ("into-o", "o", d.gain(1.1), GAIN, "llama", _F, 1),
        ("into-down", "down", d.dead_zone(0.2), DEAD_ZONE, "demo", _B, 3),
        ("into-norm2", "norm2", d.offset(0.2), BIAS, "gpt2", _B, 1),
        ("into-q", "q", d.rows([4], d.zero()), ROWS, "qwen3", _B, 2),
        ("into-final-norm", "final_norm", d.gain(1.0 + 2**-5), GAIN, "bloom", _F, 3),
        ("into-mlp", "mlp", d.channels(slice(0, 5), d.zero()), DEAD, "gemma2", _B, 1),
        ("into-scan-output", "out", d.gain(1.1), GAIN, "mamba", _F, 1),
    )
    for name, role, make, classes, model, dtype, layer in inputs:
        path = MODELS[model].name(role, layer)
        places = ("final_norm", _depth(model) - 1) if role == "final_norm" else (layer,)
        scope = functools.partial(input_hook, make=make)
        sums = _RESIDUAL if role in ("norm2", "final_norm") else frozenset[str]()
        answers = (at(places, sums), at(places, ANY, edge=True))
        yield made(f"pre-hook-{name}", "hook", (model, dtype, path), scope, answers, classes)
    inner: tuple[tuple[str, str, MakeDamage, Classes, str, str, int], ...] = (
        ("attention-scaled", "attention", d.gain(1.05), GAIN, "mistral", _B, 2),
        ("attention-scaled", "attention", d.gain(1.05), GAIN, "own-gpt", _B, 2),
        ("mlp-tail-zero", "mlp", d.channels(slice(-4, None), d.zero()), DEAD, "llama-wide", _B, 1),
        ("norm-hook-scaled", "norm1", d.gain(1.05), GAIN, "qwen2", _F, 1),
        ("down-hook-flips", "down", d.flips(3), FLIPS, "demo", _F, 8),
    )
    for name, role, make, classes, model, dtype, layer in inner:
        path = MODELS[model].name(role, layer)
        answers = (at(layer, _OWN.get(role, _RESIDUAL | {"attention"})), at(layer, ANY, edge=True))
        scope = functools.partial(output_hook, make=make)
        yield made(f"hook-{name}", "hook", (model, dtype, path), scope, answers, classes)


def _row(token: int) -> Callable[[nn.Module], Scope]:
    """One row of the embedding table is read wrongly: its neighbour's values come."""

    def scope(module: nn.Module) -> Scope:
        def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            ids = args[0]
            return (torch.where(ids == token, ids + 1, ids), *args[1:]), kwargs

        return forward_arguments(module, change)

    return scope


def ends_cases() -> Iterator[FaultCase]:
    """Embedding, positions, head and the logits that the caller gets."""
    embed = (at("embed", {"embedding"}), at(("embed", 0), ANY, edge=True))
    for model, dtype in (("llama", _B), ("gpt2", _F), ("own-gpt", _F)):
        yield made("embedding-row-wrong", "forward", (model, dtype, MODELS[model].name("embed")), _row(7), embed, ROWS)
    outputs: tuple[tuple[str, MakeDamage, Classes, str, str, Shape], ...] = (
        ("scaled", d.gain(1.05), GAIN, "qwen2", _B, PLAIN),
        ("tail-zero", d.channels(slice(-4, None), d.zero()), DEAD, "demo", _B, PLAIN),
        ("flips", d.flips(4), FLIPS, "mistral", _B, PLAIN),
        ("batch-2-stale", d.stale_rows(0, 4), STALE, "olmo2", _F, Shape(calls=3)),
        ("decode-offset", d.decode_only(d.offset(0.3)), BIAS, "llama", _F, DECODE),
    )
    for name, make, classes, model, dtype, shape in outputs:
        path = MODELS[model].name("embed")
        scope = functools.partial(output_hook, make=make)
        yield made(f"embedding-hook-{name}", "hook", (model, dtype, path), scope, embed, classes, shape)
    for model, dtype in (("gpt2", _B), ("opt", _F)):
        path = MODELS[model].name("positions")
        scope = functools.partial(forward_output, make=d.shifted_rows())
        yield made("learned-positions-one-off", "forward", (model, dtype, path), scope, embed, POSITION | ROWS)
    head = at("lm_head", {"linear", "matmul", "residual", "logits"})
    slices: tuple[tuple[str, MakeDamage, Classes, str, str, bool, Shape], ...] = (
        (
            "slice-of-vocabulary-scaled",
            d.channels(slice(16, 32), d.gain(1.1)),
            GAIN | TILE,
            "llama",
            _B,
            False,
            PLAIN,
        ),
        ("last-vocabulary-tile-zero", d.channels(slice(-9, None), d.zero()), DEAD, "demo", _B, False, PLAIN),
        (
            "slice-of-vocabulary-shifted",
            d.plain(_rolled),
            TILE | STALE | {"swapped channels"},
            "gpt2",
            _F,
            False,
            PLAIN,
        ),
        ("hook-scaled", d.gain(1.02), GAIN, "qwen3", _B, True, PLAIN),
        ("hook-offset", d.offset(0.1), BIAS, "gpt_neox", _F, True, PLAIN),
        (
            "decode-last-8-zero",
            d.decode_only(d.channels(slice(-8, None), d.zero())),
            DEAD,
            "mistral",
            _B,
            False,
            DECODE,
        ),
        ("last-row-flips", d.rows(slice(-1, None), d.flips(2, period=8)), ROWS | FLIPS, "granite", _B, False, PLAIN),
    )
    for name, make, classes, model, dtype, hooked, shape in slices:
        path = MODELS[model].name("head")
        scope = functools.partial(output_hook if hooked else forward_output, make=make)
        yield made(
            f"head-{name}", "hook" if hooked else "forward", (model, dtype, path), scope, (head,), classes, shape
        )
    logits: tuple[tuple[str, MakeDamage, Classes, str, str, Shape], ...] = (
        ("copy-tail-lost", d.last_elements(24), ROWS | DEAD, "llama", _B, PLAIN),
        ("copy-tail-lost", d.last_elements(11), ROWS | DEAD, "gpt2", _F, PLAIN),
        ("scaled", d.gain(1.1), GAIN, "demo", _B, PLAIN),
        ("stale-rows", d.stale_rows(0, 3), STALE, "qwen2", _B, Shape(calls=3)),
        ("second-sequence-is-the-first", d.plain(_first_for_all), ROWS | STALE, "mistral", _B, PLAIN),
        (
            "batch-of-4-reversed",
            d.when(lambda y: y.shape[0] >= 4, d.plain(lambda y: y.flip(0))),
            ROWS | STALE,
            "opt",
            _F,
            BATCH,
        ),
        ("decode-clamped", d.decode_only(d.saturation(1.0)), frozenset({"saturation"}), "llama", _F, DECODE),
    )
    for name, make, classes, model, dtype, shape in logits:
        scope = functools.partial(forward_output, make=make)
        yield made(f"logits-{name}", "forward", (model, dtype, ""), scope, (head,), classes, shape)


def _rolled(y: Tensor) -> Tensor:
    new = y.clone()
    new[..., 8:24] = y[..., 8:24].roll(1, -1)
    return new


def _first_for_all(y: Tensor) -> Tensor:
    return y[:1].expand_as(y).contiguous()


def _adds(make: MakeDamage, nth: int, norm: str) -> Callable[[nn.Module], Scope]:
    """The first or second residual sum of a block: a tensor plus a tensor, both [B, T, C] of the norm's width."""

    def scope(block: nn.Module) -> Scope:
        width = next(block.get_submodule(norm).parameters()).numel()

        def only(y: Tensor, args: tuple[Any, ...]) -> bool:
            shapes = [part.shape for part in args[:2] if isinstance(part, Tensor)]
            return y.dim() == 3 and y.shape[-1] == width and shapes == [y.shape, y.shape]

        functions = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
        return intercepted([block], functions, FunctionOutput(make, only, nth))

    return scope


def residual_cases() -> Iterator[FaultCase]:
    table: tuple[tuple[str, MakeDamage, Classes, str, str, int, int], ...] = (
        ("low-bits-lost", d.plain(lambda y: y.to(torch.float8_e5m2).to(y.dtype)), SHORT | SUMS, "llama", _B, 1, 0),
        ("low-bits-lost", d.short(2), SHORT, "demo", _B, 6, 1),
        ("rounded-to-bfloat16", d.plain(lambda y: y.bfloat16().to(y.dtype)), SHORT | SUMS, "qwen2", _F, 2, 1),
        ("scaled", d.gain(1.02), GAIN, "mistral", _B, 0, 0),
        ("scaled", d.gain(0.97), GAIN, "gpt2", _F, 1, 1),
        ("tail-lost", d.channels(slice(-3, None), d.zero()), DEAD, "opt", _B, 2, 0),
        ("row-lost", d.rows([2], d.zero()), ROWS, "own-gpt", _B, 1, 1),
    )
    for name, make, classes, model, dtype, layer, nth in table:
        where = (model, dtype, MODELS[model].name("block", layer))
        answers = _leaves(layer, _depth(model))
        yield made(
            f"residual-{name}-{nth}",
            "function",
            where,
            _adds(make, nth, MODELS[model].names["norm1"]),
            answers,
            classes,
        )


def _router(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Scope]:
    def scope(module: nn.Module) -> Scope:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return tuple(change(part) for part in own(*args, **kwargs))

        return attribute(module, "forward", forward)

    return scope


def expert_cases() -> Iterator[FaultCase]:
    def wrong(t: Tensor) -> Tensor:
        return t if t.is_floating_point() else (t + 1) % 4

    def weak(t: Tensor) -> Tensor:
        return t * 0.7 if t.is_floating_point() else t

    for model, dtype, layer in (("mixtral", _B, 1), ("qwen3_moe", _F, 2)):
        router, experts = (MODELS[model].name(role, layer) for role in ("router", "experts"))
        answers = (at(layer, EXPERTS),)
        yield made("experts-wrong-choice", "forward", (model, dtype, router), _router(wrong), answers, STRUCTURE)
        yield made("experts-weak-scores", "forward", (model, dtype, router), _router(weak), answers, GAIN | STRUCTURE)
        damages: tuple[tuple[str, MakeDamage, Classes], ...] = (
            ("combined-scaled", d.gain(1.02), GAIN),
            ("token-dropped", d.rows([9], d.zero()), ROWS),
            ("tail-zero", d.channels(slice(-4, None), d.zero()), DEAD),
        )
        for name, make, classes in damages:
            scope = functools.partial(forward_output, make=make)
            yield made(f"experts-{name}", "forward", (model, dtype, experts), scope, answers, classes)


def cases() -> list[FaultCase]:
    return [*hook_cases(), *ends_cases(), *residual_cases(), *expert_cases()]
