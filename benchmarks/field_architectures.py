"""Every causal language model of transformers, tiny: one rule for the sizes, few exceptions, and what is left out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96

# The sizes that a config may have, by the names that transformers' configs give them.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "n_embed", "word_embed_proj_dim", "emb_dim"), 64),
    **dict.fromkeys(("embedding_size", "embed_dim", "attention_hidden_size", "lru_width", "emb_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("v_head_dim", "attention_head_dim", "index_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "inner_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "ffn_hidden", "dff", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 3),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_selected_experts", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_d_conv", "conv_kernel", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("pad_token_id", "padding_idx"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 16,
    "initializer_range": 0.1,
    "first_k_dense_replace": 1,
    "is_decoder": True,
}
_EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {
        "layer_types": None,
        "attn_layer_indices": [1],
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "codegen": {"rotary_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"layer_types": None, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_groups": 1, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "zaya": {"num_experts_per_tok": 1},
}
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "mllama", "phi4_multimodal", "llama4", "emu3"),
        "needs a vision or audio tower; its text model is in the list under its own type where there is one",
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "needs a text encoder and an audio codec"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), "a composite config; the text model is in the list"),
    **dict.fromkeys(("xlstm", "zamba2", "qwen4_exp_text"), "no small sizes found that its code accepts"),
    "git": "the vision tower has 86 million parameters",
    "blt": "bytes in patches from a second model",
    "dbrx": "the config's own default has no rope_theta in transformers 5.17",
    "xmod": "needs a language to be set before a call",
    "zamba": "the shared block can't be tied in fewer layers than its pattern",
    "cohere_compass_text": "the default layer types have no full attention, which its model asks for",
}


def names() -> tuple[str, ...]:
    """The model types, one for each class."""
    seen: dict[str, str] = {}
    for kind, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind not in LEFT_OUT:
            seen.setdefault(str(cls), kind)
    return tuple(seen.values())


def tiny_config(kind: str) -> Any:
    """The default config with small sizes wherever it has the name."""
    default = CONFIG_MAPPING[kind]()
    known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention has a key head for each query head
        sizes |= {name: 4 for name in ("num_key_value_heads",) if name in known}
    if "layer_types" in known and getattr(default, "layer_types", None):
        kinds = list(dict.fromkeys(default.layer_types))[:3]
        sizes["layer_types"] = (kinds * 3)[:3]
    sizes |= copy.deepcopy(dict(_EXCEPTIONS.get(kind, {})))
    return CONFIG_MAPPING[kind](**{name: value for name, value in sizes.items() if value is not None})


def architecture(kind: str, dtype: str, attention: str) -> nn.Module:
    """A random model of this type in eval mode; eager attention where the one asked for is not supported."""
    config = tiny_config(kind)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = attention if getattr(cls, "_supports_sdpa", False) else "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model: nn.Module = cls(config)
    return model.to(getattr(torch, dtype)).eval()
