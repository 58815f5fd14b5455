"""The gradient faults of backward_faults.py: half of them were not looked at while the audit was written."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from backward_plants import (
    EverySecond,
    GradientFault,
    Remembering,
    activation,
    attention,
    backward_hook,
    backward_pre_hook,
    by_frequency,
    dead_lane,
    dead_zone,
    dw,
    dx,
    embedding,
    in_bfloat16,
    last_wins,
    late_parameter_hook,
    layer_norm_without_mean,
    linear,
    one_row_further,
    parameter_hook,
    patched,
    product,
    rms_norm,
    shortened,
    softmax,
    tensor_hook,
    with_gradient,
    with_spike,
    without_tail,
)
from torch import Tensor

_LAYER = "model.layers.1"
_DOWN, _Q, _O = f"{_LAYER}.mlp.down_proj", f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.o_proj"
_ATTENTION = f"{_LAYER}.self_attn"
_INPUT, _WEIGHT = ("input",), ("weight",)
_REMEMBERING = Remembering()


def _everywhere(*names: str) -> tuple[str, ...]:
    """A module of each of three blocks."""
    return tuple(f"model.layers.{block}.{name}" for block in range(3) for name in names)


def _detached_weight(name: str) -> Any:
    def plant(model: Any, stack: Any) -> None:
        module = model.get_submodule(name)
        module.forward = lambda x: F.linear(x, module.weight.detach(), module.bias)

    return plant


def _detached_residual(name: str) -> Any:
    """The block's own code, but for the residual after attention."""

    def plant(model: Any, stack: Any) -> None:
        block = model.get_submodule(name)

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            y, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
            hidden = hidden_states.detach() + y
            return hidden + block.mlp(block.post_attention_layernorm(hidden))

        block.forward = forward

    return plant


def _first_of_group(repeat: Any) -> Any:
    """Keys and values of grouped queries: the gradient of the first query head alone."""

    def wrong(x: Tensor, n: int) -> Tensor:
        back = lambda g, t: (g.reshape(t.shape[0], t.shape[1], n, *t.shape[2:])[:, :, 0],)  # noqa: E731
        return with_gradient(lambda t: repeat(t, n), back)(x)

    return wrong


def _rotated_onwards(rotate: Any) -> Any:
    """Rotary embeddings whose backward turns by the angle, and not back."""

    def wrong(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        onwards = with_gradient(lambda q: rotate(q, k.detach(), cos, sin)[0], lambda g, q: (rotate(g, g, cos, sin)[0],))
        return onwards(q), rotate(q, k, cos, sin)[1]

    return wrong


def _fault(name: str, model: str, modules: Any, tensor: tuple[str, ...], plant: Any, **more: Any) -> GradientFault:
    architecture, _, dtype = model.partition(":")
    names = (modules,) if isinstance(modules, str) else tuple(modules)
    return GradientFault(name, architecture, dtype or "float32", names, tensor, plant, **more)


def _held_out(*args: Any) -> GradientFault:
    return _fault(*args, held_out=True)


FAULTS = [
    # linears
    _fault("weight gradient summed in bfloat16", "llama", _DOWN, _WEIGHT,
           linear(_DOWN, lambda g, x, w: (dx(g, w), in_bfloat16(g.T, x)))),
    _fault("input gradient 1 % too large", "llama", _DOWN, _INPUT,
           linear(_DOWN, lambda g, x, w: (1.01 * dx(g, w), dw(g, x)))),
    _fault("weight not transposed", "llama:bfloat16", _O, _INPUT, linear(_O, lambda g, x, w: (g @ w.T, dw(g, x)))),
    _fault("last token missing in the weight gradient", "llama", _Q, _WEIGHT, linear(_Q, without_tail)),
    _held_out("input gradient summed in bfloat16", "llama:bfloat16", _Q, _INPUT,
              linear(_Q, lambda g, x, w: (in_bfloat16(g, w, 1), dw(g, x)))),
    _held_out("weight gradient 2 % too large", "llama:bfloat16", _DOWN, _WEIGHT,
              linear(_DOWN, lambda g, x, w: (dx(g, w), 1.02 * dw(g, x)))),
    _held_out("input gradient of the micro-batch before", "qwen3", _DOWN, _INPUT,
              linear(_DOWN, lambda g, x, w: (_REMEMBERING(dx(g, w)), dw(g, x)))),
    _held_out("dead lane in the input gradient", "demo", "model.layers.7.mlp.up_proj", _INPUT,
              linear("model.layers.7.mlp.up_proj", lambda g, x, w: (dead_lane(dx(g, w)), dw(g, x)))),
    _held_out("operands of the weight gradient cut to 10 bits", "demo", "model.layers.3.self_attn.v_proj", _WEIGHT,
              linear("model.layers.3.self_attn.v_proj",
                     lambda g, x, w: (dx(g, w), dw(shortened(g, 10), shortened(x, 10))))),
    # norms
    _fault("mean term missing", "gpt2", "transformer.h.1.ln_2", _INPUT,
           layer_norm_without_mean("transformer.h.1.ln_2")),
    _fault("norm's weight gradient of half of the rows", "llama", f"{_LAYER}.input_layernorm", _WEIGHT,
           rms_norm(f"{_LAYER}.input_layernorm", lambda dx, dw, p, rows: (dx, rows[: len(rows) // 2].sum(0)))),
    _held_out("projection missing", "llama:bfloat16", f"{_LAYER}.post_attention_layernorm", _INPUT,
              rms_norm(f"{_LAYER}.post_attention_layernorm", lambda dx, dw, p, rows: (dx + p, dw))),
    _held_out("norm's gradient in bfloat16", "demo", "model.norm", _INPUT,
              rms_norm("model.norm", lambda dx, dw, p, rows: (dx.bfloat16(), dw))),
    # attention
    _fault("scale missing in the keys' gradient", "llama", _ATTENTION, _INPUT,
           attention(_ATTENTION, lambda q, k, v: (q, k * math.sqrt(8), v))),
    _fault("softmax without the sum over its row", "llama/eager", _ATTENTION, _INPUT, softmax(_ATTENTION)),
    _held_out("values' gradient 3 % too small", "mistral:bfloat16", _ATTENTION, _INPUT,
              attention(_ATTENTION, lambda q, k, v: (q, k, 0.97 * v))),
    _held_out("a head without gradient of its queries", "demo", "model.layers.5.self_attn", _INPUT,
              attention("model.layers.5.self_attn", lambda q, k, v: (torch.cat([q[:, :-1], 0 * q[:, -1:]], 1), k, v))),
    _held_out("gradient of the probabilities times 1.001", "gpt2/eager", "transformer.h.0.attn", _INPUT,
              product("transformer.h.0.attn", 1, lambda g, a, b: (1.001 * g @ b.mT, a.mT @ g))),
    _fault("grouped keys: the first head's gradient alone", "llama/eager",
           _everywhere("self_attn.k_proj", "self_attn.v_proj"), (),
           patched("transformers.models.llama.modeling_llama", "repeat_kv", _first_of_group)),
    _held_out("rotation's gradient turned the wrong way", "qwen2", _everywhere("self_attn.q_proj"), (),
              patched("transformers.models.qwen2.modeling_qwen2", "apply_rotary_pos_emb", _rotated_onwards)),
    # embeddings
    _fault("repeated tokens lost", "llama", "model.embed_tokens", _WEIGHT, embedding("model.embed_tokens", last_wins)),
    _held_out("divided by the tokens' frequency", "opt:bfloat16", ("model.decoder.embed_tokens", "lm_head"), _WEIGHT,
              embedding("model.decoder.embed_tokens", by_frequency)),
    _held_out("one row further", "demo:bfloat16", ("model.embed_tokens", "lm_head"), _WEIGHT,
              embedding("model.embed_tokens", one_row_further)),
    # activations
    _fault("slope of silu without its second term", "llama", f"{_LAYER}.mlp.act_fn", _INPUT,
           activation(f"{_LAYER}.mlp.act_fn", torch.sigmoid)),
    _held_out("slope of relu for gelu's", "gpt_neox:bfloat16", "gpt_neox.layers.1.mlp.act", _INPUT,
              activation("gpt_neox.layers.1.mlp.act", lambda x: (x > 0).to(x.dtype))),
    # hooks and what lies between modules
    _fault("gradient halved by a module's hook", "llama", _DOWN, _INPUT, backward_hook(_DOWN, lambda g: 0.5 * g)),
    _fault("block's gradient 0.1 % too large", "gpt2", ("transformer.h.1", "transformer.h.2"), (),
           tensor_hook("transformer.h.1", lambda g: 1.001 * g)),
    _held_out("dead zone before a module", "phi3", f"{_LAYER}.mlp.gate_up_proj", (),
              backward_hook(f"{_LAYER}.mlp.gate_up_proj", dead_zone)),
    _held_out("spike behind a module", "gemma2", _O, (), backward_pre_hook(_O, with_spike)),
    _held_out("residual's gradient lost", "llama", (_LAYER, f"{_LAYER}.self_attn", f"{_LAYER}.input_layernorm"), (),
              _detached_residual(_LAYER)),
    # weights and their sums
    _fault("second micro-batch dropped", "llama:bfloat16", _Q, (*_WEIGHT, "accumulated weight"),
           parameter_hook(f"{_Q}.weight", EverySecond())),
    _fault("tied head without gradient", "opt", ("lm_head", "model.decoder.embed_tokens"), _WEIGHT,
           _detached_weight("lm_head")),
    _fault("mean of micro-batches for their sum", "gpt2", "transformer.h.0.mlp.c_fc", ("accumulated weight",),
           late_parameter_hook("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_fc.weight", lambda g: g / 2)),
    _held_out("bias gradient is a mean", "gpt2:bfloat16", "transformer.h.1.attn.c_attn", _WEIGHT,
              parameter_hook("transformer.h.1.attn.c_attn.bias", lambda g: g / 64)),
    _held_out("an expert without gradient", "mixtral", f"{_LAYER}.mlp.experts", _WEIGHT,
              parameter_hook(f"{_LAYER}.mlp.experts.down_proj", lambda g: torch.cat([g[:-1], 0 * g[-1:]]))),
    _held_out("accumulated in bfloat16", "demo", "model.layers.2.mlp.gate_proj", ("accumulated weight",),
              late_parameter_hook("model.layers.2.mlp.gate_proj", "model.layers.2.mlp.gate_proj.weight",
                                  lambda g: g.bfloat16().float())),
]  # fmt: skip
