"""A tiny random model of every architecture noisescope knows: hidden 32, 4 heads, vocabulary 64, no download.

The structure is that of the real architecture, so an injection applies to the same operators; only the sizes are small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noisescope.errors import InvalidInput, unknown

if TYPE_CHECKING:
    from torch import Tensor, nn

VOCABULARY = 64

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_PLAIN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64, **_IDS}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}  # two query heads share a key head
_WINDOW = {"head_dim": 8, "sliding_window": 4}  # shorter than tiny_inputs, so the window cuts something off

# name -> (stem of the class names, head, config). The name is transformers' model_type.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", _GROUPED),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "mistral": ("Mistral", "ForCausalLM", {**_GROUPED, **_WINDOW}),
    "gemma2": ("Gemma2", "ForCausalLM", {**_GROUPED, **_WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", "ForCausalLM", {**_GROUPED, **_WINDOW, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", "ForCausalLM", _GROUPED),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 32, "n_head": 4, "n_inner": 64, "n_positions": 64, **_IDS}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _PLAIN),
    "opt": ("OPT", "ForCausalLM", {**_PLAIN, "word_embed_proj_dim": 32, "ffn_dim": 64}),
    "falcon": ("Falcon", "ForCausalLM", {**_PLAIN, "ffn_hidden_size": 64, "multi_query": True}),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": 32, "n_head": 4, **_IDS}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "bert": ("Bert", "ForMaskedLM", _PLAIN),
    "vit": (
        "ViT",
        "ForImageClassification",
        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8, "patch_size": 4},
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0, **_IDS},
    ),
}

MODELS: tuple[str, ...] = (*_FAMILIES, "transformer_encoder")


def tiny_model(name: str, *, layers: int = 2, seed: int = 0, biases: float = 0.0, **config_overrides: Any) -> nn.Module:
    """A random model of one architecture in eval mode: `tiny_model("llama", layers=12)`.

    The weights depend on `seed` alone, and the caller's random state is left as it was. `config_overrides` go to the
    transformers config (`attn_implementation="eager"` among them), or to nn.TransformerEncoderLayer. T5 gets `layers`
    encoder blocks and as many decoder blocks. Initialisation sets biases to 0, training does not: `biases` draws them
    with that standard deviation.
    """
    if name not in MODELS:
        raise unknown("tiny model", name, MODELS)
    if layers < 1:
        raise InvalidInput(f"a tiny model needs at least one layer, got {layers}")
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the GPUs' generators too
        if name == "transformer_encoder":
            model = _encoder(layers, config_overrides)
        else:
            model = _hf(name, layers, config_overrides)
        for parameter_name, parameter in model.named_parameters():
            if biases and parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=biases)
    return model.eval()


def tiny_inputs(name: str, *, batch: int = 2, length: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Arguments for one forward: `model(**tiny_inputs("llama"))`. ViT takes images, so `length` does not apply."""
    if name not in MODELS:
        raise unknown("tiny model", name, MODELS)
    import torch

    generator = torch.Generator().manual_seed(seed)
    if name == "transformer_encoder":
        return {"src": torch.randn(batch, length, 32, generator=generator)}
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)  # 0 to 2 are pad, bos and eos
    if name == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(-1)}
    return {"input_ids": tokens}


def _hf(name: str, layers: int, overrides: dict[str, Any]) -> nn.Module:
    import transformers

    stem, head, settings = _FAMILIES[name]
    depth: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "t5":
        depth = {"num_layers": layers, "num_decoder_layers": layers}
    if name == "gemma3":  # by default each sixth layer is full, so a shallow model would have none
        depth["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    config_class = getattr(transformers, "Gemma3TextConfig" if name == "gemma3" else f"{stem}Config")
    model: nn.Module = getattr(transformers, stem + head)(config_class(**{**settings, **depth, **overrides}))
    return model


def _encoder(layers: int, overrides: dict[str, Any]) -> nn.Module:
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        **{"d_model": 32, "nhead": 4, "dim_feedforward": 64, "activation": "gelu", "batch_first": True, **overrides}
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not overrides)  # some layers can't, and it warns
