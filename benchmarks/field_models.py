"""The models that fault cases are made in: tiny random ones of many architectures, the demo, and hand-written ones.

Weights are drawn larger than at initialisation, so that attention is not flat and every block matters to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from field_own import ALIBI, GPT, PARALLEL
from torch import nn

import noisescope as ns
from noisescope.testing import tiny_model

LAYERS = 4
_IDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    **_IDS,
}
_LLAMA = {
    "layers": "model.layers",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "mlp": "mlp",
    "act": "mlp.act_fn",
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "rotary": "model.rotary_emb",
}
_OUTER = ("embed", "final_norm", "head", "rotary", "layers", "positions")


@dataclass(frozen=True)
class Base:
    """A model to build, and the dotted names of its parts by role; those of a block are inside the block."""

    build: Callable[[], nn.Module]
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    is_demo: bool = False

    def name(self, role: str, layer: int = 0) -> str:
        if role == "block":
            return f"{self.names['layers']}.{layer}"
        return self.names[role] if role in _OUTER else f"{self.names['layers']}.{layer}.{self.names[role]}"


def _llama(**changes: Any) -> dict[str, str]:
    return {**_LLAMA, **changes}


def _tiny(kind: str, **overrides: Any) -> Callable[[], nn.Module]:
    sizes: dict[str, Any] = {"initializer_range": 0.15, "max_position_embeddings": 256}
    if kind in ("gpt2", "bloom"):
        sizes.pop("max_position_embeddings")
    if kind == "gpt2":
        sizes["n_positions"] = 256
    return lambda: tiny_model(kind, layers=LAYERS, biases=0.1, **{**sizes, **overrides})


def _config(stem: str, **overrides: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{stem}Config")(**{**_SIZES, **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            model: nn.Module = getattr(transformers, f"{stem}ForCausalLM")(config)
        return model.eval()

    return build


def _own(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(2)
            return make().eval()

    return build


_NEOX = _llama(
    layers="gpt_neox.layers",
    q="attention.query_key_value",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    attention="attention",
    act="mlp.act",
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    rotary="gpt_neox.rotary_emb",
)
_GPT2 = _llama(
    layers="transformer.h",
    q="attn.c_attn",
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    norm1="ln_1",
    norm2="ln_2",
    attention="attn",
    act="mlp.act",
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
)
_OPT = _llama(
    layers="model.decoder.layers",
    o="self_attn.out_proj",
    up="fc1",
    down="fc2",
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    act="activation_fn",
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
)
_BLOOM = _llama(
    layers="transformer.h",
    q="self_attention.query_key_value",
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    attention="self_attention",
    act="mlp.gelu_impl",
    embed="transformer.word_embeddings",
    final_norm="transformer.ln_f",
)
_OWN = {
    "layers": "blocks",
    "q": "attention.qkv",
    "o": "attention.out",
    "up": "up",
    "down": "down",
    "norm1": "norm1",
    "norm2": "norm2",
    "attention": "attention",
    "embed": "tokens",
    "positions": "places",
    "final_norm": "norm",
    "head": "head",
}

MODELS: Mapping[str, Base] = {
    "demo": Base(lambda: ns.load("demo", dtype="float32").model, is_demo=True),
    "llama": Base(_tiny("llama")),
    "llama-eager": Base(_tiny("llama", attn_implementation="eager")),
    "llama-wide": Base(_config("Llama", hidden_size=72, intermediate_size=136, attention_bias=True)),
    "llama-tied": Base(_config("Llama", tie_word_embeddings=True)),
    "qwen2": Base(_config("Qwen2")),
    "qwen2-eager": Base(_config("Qwen2", attn_implementation="eager")),
    "qwen3": Base(_tiny("qwen3")),
    "mistral": Base(_tiny("mistral", sliding_window=12)),
    "mistral-eager": Base(_tiny("mistral", sliding_window=12, attn_implementation="eager")),
    "gemma2": Base(_tiny("gemma2", sliding_window=12)),
    "phi3": Base(_tiny("phi3"), _llama(q="self_attn.qkv_proj", up="mlp.gate_up_proj", act="mlp.activation_fn")),
    "gpt2": Base(_tiny("gpt2"), _GPT2),
    "gpt2-eager": Base(_tiny("gpt2", attn_implementation="eager"), _GPT2),
    "gpt_neox": Base(_tiny("gpt_neox"), _NEOX),
    "opt": Base(_tiny("opt"), _OPT),
    "bloom": Base(_tiny("bloom"), _BLOOM),
    "mixtral": Base(_tiny("mixtral"), _llama(router="mlp.gate", experts="mlp.experts")),
    "qwen3_moe": Base(_tiny("qwen3_moe"), _llama(router="mlp.gate", experts="mlp.experts")),
    "olmo2": Base(_config("Olmo2"), _llama(norm1="post_attention_layernorm", norm2="post_feedforward_layernorm")),
    "granite": Base(_config("Granite", residual_multiplier=0.5, attention_multiplier=0.3)),
    "stablelm": Base(_config("StableLm")),
    "starcoder2": Base(_config("Starcoder2"), _llama(up="mlp.c_fc", down="mlp.c_proj", act="mlp.act")),
    "smollm3": Base(_config("SmolLM3")),
    "cohere": Base(_config("Cohere")),
    "mamba": Base(
        _config("Mamba", state_size=8, intermediate_size=96),
        {"layers": "backbone.layers", "out": "mixer.out_proj", "norm1": "norm", "mixer": "mixer", "head": "lm_head"},
    ),
    "own-gpt": Base(_own(GPT), _OWN),
    "own-alibi": Base(_own(ALIBI), {k: v for k, v in _OWN.items() if k != "positions"}),
    "own-parallel": Base(_own(PARALLEL), {k: v for k, v in _OWN.items() if k not in ("positions", "norm2")}),
}


def build(model: str, dtype: str) -> nn.Module:
    """A fresh model in eval mode."""
    return MODELS[model].build().to(getattr(torch, dtype)).eval()
