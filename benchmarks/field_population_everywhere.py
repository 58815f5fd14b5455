"""One kernel wrong in all layers: torch functions replaced for as long as the scope is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import field_damage as d
import torch
from field_cases import (
    ANY,
    CACHE,
    DEAD,
    GAIN,
    LINEAR,
    NORM,
    PLAIN,
    STUCK,
    TABLE,
    TILE,
    FaultCase,
    at,
)
from field_population import DECODE, Scope
from field_population_flow import Classes, Only, made
from field_scopes import (
    FunctionOutput,
    MakeDamage,
    intercepted,
)
from torch import Tensor, nn
from torch.nn import functional as F

_B, _F, _H = "bfloat16", "float32", "float16"


def everywhere_cases() -> Iterator[FaultCase]:
    """One kernel wrong in all layers: a torch function replaced for as long as the scope is open."""

    def whole(functions: tuple[Any, ...], make: MakeDamage, only: Only) -> Callable[[nn.Module], Scope]:
        return lambda model: intercepted([], functions, FunctionOutput(make, only))

    multiply = (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul)
    table: tuple[tuple[str, str, str, tuple[Any, ...], MakeDamage, Only, Classes, Classes], ...] = (
        (
            "multiply-2-percent",
            "llama",
            _B,
            multiply,
            d.gain(1.02),
            _wide(64),
            GAIN,
            ANY,
        ),
        (
            "multiply-2-percent",
            "demo",
            _B,
            multiply,
            d.gain(1.02),
            _wide(256),
            GAIN,
            ANY,
        ),
        ("linear-tile-scaled", "qwen2", _B, (F.linear,), d.tile(8, 8, 8, d.gain(1.2)), _sequence, TILE, LINEAR),
        ("linear-lane-stuck", "mistral", _B, (F.linear,), d.stuck(5, period=32, lane=7), _sequence, STUCK, LINEAR),
        ("linear-scaled", "phi3", _F, (F.linear,), d.gain(1.01), _sequence, GAIN, LINEAR),
        ("silu-scaled", "granite", _B, (F.silu,), d.gain(1.03), _sequence, GAIN | TABLE, frozenset({"silu"})),
        ("layer-norm-scaled", "gpt2", _F, (F.layer_norm,), d.gain(1.01), _sequence, GAIN, NORM),
        ("rsqrt-low", "olmo2", _F, (torch.rsqrt,), d.gain(0.998), _all, GAIN | TABLE, NORM),
        (
            "cat-tail-lost",
            "llama",
            _F,
            (torch.cat,),
            d.channels(slice(-1, None), d.zero()),
            _heads,
            CACHE | DEAD,
            ANY,
        ),
        (
            "gelu-decode-scaled",
            "gpt_neox",
            _B,
            (F.gelu,),
            d.decode_only(d.gain(1.05)),
            _sequence,
            GAIN | TABLE,
            frozenset({"gelu"}),
        ),
    )
    for name, model, dtype, functions, make, only, classes, operators in table:
        scope, shape = whole(functions, make, only), DECODE if "decode" in name else PLAIN
        # The device's own arithmetic, where no module is at fault.
        own = (at("device", {"elementwise"}),) if operators is ANY else ()
        answers = (at(None, operators, edge=operators is ANY), *own)
        yield made(f"everywhere-{name}", "function", (model, dtype, ""), scope, answers, classes, shape)


def _sequence(y: Tensor, args: tuple[Any, ...]) -> bool:
    return y.dim() == 3


def _heads(y: Tensor, args: tuple[Any, ...]) -> bool:
    return y.dim() == 4


def _all(y: Tensor, args: tuple[Any, ...]) -> bool:
    return True


def _wide(width: int) -> Only:
    return lambda y, args: y.dim() == 3 and y.shape[-1] == width


def cases() -> list[FaultCase]:
    return list(everywhere_cases())
