"""Faults on the way into attention: rotary angles, positions, head mapping, masks, the cache in decode."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import field_attention as a
import field_damage as d
import torch
import transformers.cache_utils as caches
from field_cases import (
    ATTENTION,
    CACHE,
    FLIPS,
    MASK,
    PLAIN,
    POSITION,
    ROWS,
    SHORT,
    SUMS,
    SWAPPED,
    FaultCase,
    Shape,
    at,
)
from field_models import MODELS
from field_population import DECODE, Scope
from field_population_attention import LEFT, Classes, Where, made
from field_scopes import Region, attribute, both, forward_arguments, forward_output
from torch import Tensor, nn

Edit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of keys and values
_B, _F = "bfloat16", "float32"


def _global(model: str, layer: int | None, function: str, make: Callable[[Any], Any]) -> Callable[[nn.Module], Scope]:
    """A function of the modelling file (rotation, repeated heads) replaced, while one layer's attention runs."""

    @contextlib.contextmanager
    def fault(whole: nn.Module) -> Iterator[None]:
        region = Region()
        attentions = [
            whole.get_submodule(MODELS[model].name("attention", i))
            for i in ([layer] if layer is not None else range(4))
        ]
        file = importlib.import_module(type(attentions[0]).__module__)
        own = getattr(file, function)
        wrong = make(own)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return (wrong if region.depth else own)(*args, **kwargs)

        with both(attribute(file, function, replaced), *(region.of(module) for module in attentions)):
            yield

    return fault


def path_cases() -> Iterator[FaultCase]:
    """What happens to queries, keys and values between projection and product."""

    def keys_off(own: Any) -> Any:
        return lambda q, k, cos, sin, *more, **named: (
            own(q, k, cos, sin, *more, **named)[0],
            own(q, k, a.shifted(cos), a.shifted(sin), *more, **named)[1],
        )

    def no_sine_sign(own: Any) -> Any:
        return lambda q, k, cos, sin, *more, **named: own(q, k, cos, -sin, *more, **named)

    def queries_only(own: Any) -> Any:
        return lambda q, k, cos, sin, *more, **named: (own(q, k, cos, sin, *more, **named)[0], k)

    def mixed(own: Any) -> Any:
        return lambda x, repeats: a.mixed_heads(x, x.shape[1] * repeats)

    rotate, repeat = "apply_rotary_pos_emb", "repeat_kv"
    table: tuple[tuple[str, str, Callable[[Any], Any], Classes, Where], ...] = (
        ("keys-rotated-one-off", rotate, keys_off, POSITION, ("llama", _B, 1)),
        ("keys-rotated-one-off", rotate, keys_off, POSITION, ("llama-eager", _B, 2)),
        ("keys-rotated-one-off", rotate, keys_off, POSITION, ("qwen3", _F, None)),
        ("rotated-the-other-way", rotate, no_sine_sign, POSITION, ("mistral", _B, 0)),
        ("keys-not-rotated", rotate, queries_only, POSITION, ("qwen2-eager", _F, 1)),
        ("wrong-head-mapping", repeat, mixed, SWAPPED, ("llama-eager", _F, 3)),
        ("wrong-head-mapping", repeat, mixed, SWAPPED, ("qwen2-eager", _B, None)),
    )
    for name, function, make, classes, where in table:
        yield made(f"path-{name}", "function", where, _global(where[0], where[2], function, make), classes)
    angles: tuple[tuple[str, Callable[[nn.Module], Scope], tuple[str, str], Shape], ...] = (
        ("theta-20-percent-high", _theta(1.2), ("llama", _B), PLAIN),
        ("theta-20-percent-high", _theta(1.2), ("phi3", _F), PLAIN),
        ("theta-500000", _theta(50.0), ("demo", _B), PLAIN),
        (
            "positions-one-off-in-decode",
            _positions(lambda p: p - 1 if p.shape[-1] == 1 else p),
            ("mistral", _B),
            DECODE,
        ),
        ("positions-one-off-after-the-first", _positions(lambda p: (p - 1).clamp_min(0)), ("qwen2", _F), PLAIN),
        ("positions-stop-at-20", _positions(lambda p: p.clamp_max(20)), ("llama-eager", _F), PLAIN),
        (
            "angles-in-bfloat16",
            functools.partial(forward_output, make=d.plain(lambda y: y.bfloat16().to(y.dtype))),
            ("stablelm", _F),
            PLAIN,
        ),
    )
    for name, scope, (model, dtype), shape in angles:
        path = MODELS[model].name("rotary")
        answer = at(("rotary", "embed", 0), ATTENTION | {"embedding"})
        fault = functools.partial(lambda whole, scope, path: scope(whole.get_submodule(path)), scope=scope, path=path)
        yield FaultCase(
            f"rotary-{name}/{model}.{dtype}",
            "forward",
            model,
            dtype,
            (answer, at(None, ATTENTION)),
            POSITION | SHORT,
            fault,
            shape,
            path,
        )


def _positions(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Scope]:
    def edit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": change(kwargs["position_ids"])}
        return (args[0], change(args[1]), *args[2:]), kwargs

    return lambda module: forward_arguments(module, edit)


def _theta(factor: float) -> Callable[[nn.Module], Scope]:
    """The angles of another base: the exponent 2i/D of each frequency keeps, theta is scaled."""

    def scope(module: nn.Module) -> Scope:
        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            frequencies = module.inv_freq
            assert isinstance(frequencies, Tensor)
            steps = torch.arange(len(frequencies)) / len(frequencies)
            angles = position_ids[..., None].float() * (frequencies.float() * factor**-steps)
            angles = torch.cat([angles, angles], -1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        return attribute(module, "forward", forward)

    return scope


def mask_cases() -> Iterator[FaultCase]:
    """The mask that one layer, or all of them, get: changed on its way."""

    def layer_mask(model: str, layer: int, edit: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Scope]:
        def change(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mask = kwargs.get("attention_mask")
            return args, kwargs if mask is None else {**kwargs, "attention_mask": edit(mask)}

        return lambda whole: forward_arguments(whole.get_submodule(MODELS[model].name("attention", layer)), change)

    def numbers(edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """An edit of added numbers, for masks of both kinds."""

        def edited(mask: Tensor) -> Tensor:
            if mask.dtype == torch.bool:
                return edit(torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)) == 0
            least = torch.finfo(mask.dtype).min
            bias = edit(torch.where(mask < 0.5 * least, -torch.inf, mask.float()))
            return bias.clamp_min(least).to(mask.dtype)

        return edited

    table: tuple[tuple[str, Callable[[Tensor], Tensor], tuple[str, str, int], Shape], ...] = (
        ("sees-one-more", a.sees_one_more, ("llama-eager", _B, 1), PLAIN),
        ("misses-itself", a.misses_itself, ("qwen2-eager", _F, 3), PLAIN),
        ("window-one-too-wide", a.wider_window, ("mistral-eager", _B, 2), PLAIN),
        ("window-one-too-wide", a.wider_window, ("gemma2", _F, 0), PLAIN),
        ("padding-ignored", a.ignores_padding, ("llama-eager", _F, 0), LEFT),
        ("padding-ignored", a.ignores_padding, ("gpt2-eager", _B, 2), LEFT),
        ("leaks-at-tile-borders", a.leak_at_borders(16), ("gpt2-eager", _F, 0), PLAIN),
    )
    for name, edit, where, shape in table:
        yield made(f"mask-{name}", "forward", where, layer_mask(where[0], where[2], numbers(edit)), MASK | ROWS, shape)


def _cache(layer: int | None, edit: Edit, *, decode: bool) -> Callable[[nn.Module], Scope]:
    """What the cache returns is changed; what it stores is right."""
    own = caches.Cache.update

    def update(self: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        got = own(self, keys, values, layer_idx, *args, **kwargs)
        if layer not in (None, layer_idx) or keys.dtype == torch.float64 or (decode and keys.shape[-2] != 1):
            return got
        with torch._C.DisableTorchFunction():
            return edit(*got)

    return lambda whole: attribute(caches.Cache, "update", update)


def _memory(layer: int, edit: Edit) -> Callable[[nn.Module], Scope]:
    """A layer's slots go bad after the prefill has used them: only the decode steps read them."""
    own = caches.Cache.update

    def update(self: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        got = own(self, keys, values, layer_idx, *args, **kwargs)
        if layer_idx == layer and keys.shape[-2] > 1 and keys.dtype != torch.float64:
            slots = self.layers[layer_idx]
            with torch._C.DisableTorchFunction():
                slots.keys, slots.values = edit(slots.keys, slots.values)
        return got

    return lambda whole: attribute(caches.Cache, "update", update)


def cache_cases() -> Iterator[FaultCase]:
    table: tuple[
        tuple[str, Edit, Classes, Where, bool],
        ...,
    ] = (
        (
            "in-float8",
            lambda x, y: (a.in_float8(x), a.in_float8(y)),
            SHORT | CACHE | SUMS,
            ("llama-eager", _B, 2),
            False,
        ),
        ("in-float8", lambda x, y: (a.in_float8(x), a.in_float8(y)), SHORT | CACHE | SUMS, ("mistral", _B, None), True),
        ("stale-key-slot", lambda x, y: (a.slot_before(5)(x), y), CACHE, ("llama", _B, 1), True),
        ("stale-value-slot", lambda x, y: (x, a.slot_before(3)(y)), CACHE, ("qwen2-eager", _F, 0), True),
        ("stale-value-slot", lambda x, y: (x, a.slot_before(3)(y)), CACHE, ("demo", _B, 9), True),
        ("keys-shifted", lambda x, y: (a.shifted(x), y), CACHE, ("gpt2", _F, 3), True),
        ("values-shifted", lambda x, y: (x, a.shifted(y)), CACHE, ("opt", _B, None), True),
        ("newest-not-written", lambda x, y: (a.last_lost(x), a.last_lost(y)), CACHE | ROWS, ("phi3", _B, 2), True),
        ("value-pages-swapped", lambda x, y: (x, a.swapped_pages(4, 0, 1)(y)), CACHE, ("qwen3", _B, 3), True),
        ("key-pages-swapped", lambda x, y: (a.swapped_pages(4, 0, 2)(x), y), CACHE, ("gpt_neox", _F, None), True),
        ("other-sequence", lambda x, y: (x, a.other_sequence(y)), CACHE | ROWS, ("starcoder2", _B, 1), True),
        ("value-tail-zero", lambda x, y: (x, d.channels([-1], d.zero())()(y)), CACHE | ROWS, ("granite", _F, 2), True),
        ("old-keys-flips", lambda x, y: (d.flips(3, period=16)()(x), y), CACHE | FLIPS, ("llama-wide", _B, 3), True),
    )
    for name, edit, classes, where, decode in table:
        yield made(
            f"cache-{name}",
            "cache",
            where,
            _cache(where[2], edit, decode=decode),
            classes,
            DECODE if decode else PLAIN,
        )
    stored: tuple[tuple[str, Edit, Classes, Where], ...] = (
        ("key-slot-stale", lambda x, y: (a.slot_before(4)(x), y), CACHE, ("qwen2", _B, 2)),
        ("value-bits-flipped", lambda x, y: (x, d.flips(4, period=8)()(y)), CACHE | FLIPS, ("llama-eager", _B, 1)),
        ("values-in-float8", lambda x, y: (x, a.in_float8(y)), SHORT | CACHE | SUMS, ("opt", _F, 3)),
        ("key-page-lost", lambda x, y: (d.rows(slice(4, 8), d.zero())()(x), y), CACHE | ROWS, ("stablelm", _B, 0)),
    )
    for name, edit, classes, where in stored:
        layer = where[2]
        assert layer is not None
        yield made(f"cache-memory-{name}", "cache", where, _memory(layer, edit), classes, DECODE)


def cases() -> list[FaultCase]:
    return [*path_cases(), *mask_cases(), *cache_cases()]
