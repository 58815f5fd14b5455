"""Relations where a law does not hold, or says less than usual: no false alarm there, and faults are still found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from noisescope.faults import RoundingMode, faulty
from noisescope.localization.laws.table import Law
from noisescope.localization.relations import relations
from noisescope.localization.verdict import Verdict
from noisescope.testing import tiny_inputs, tiny_model

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
OWN: dict[str, dict[str, Any]] = {
    "GptOss": {
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def made(stem: str, dtype: torch.dtype = F32, **own: Any) -> nn.Module:
    """A random causal model with weights larger than at its start: its attention is not the same everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{stem}Config")(**{**SIZES, **OWN.get(stem, {}), **own})
        model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3)
    return model.to(dtype)  # type: ignore[no-any-return]


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 199, shape, generator=torch.Generator().manual_seed(0))


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :7], mask[1, :19] = 0, 0
    return {"input_ids": tokens(3, 20), "attention_mask": mask}


def uneven_rows(module: nn.Module) -> None:
    """Makes rows of attention sum to 1 for the first token and to more for later ones: only one law shows it."""
    right = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        y, *rest = right(*args, **kwargs)
        return (y * torch.linspace(1, 1.2, y.shape[1], dtype=y.dtype)[:, None], *rest)

    module.forward = forward  # type: ignore[method-assign]


def assert_healthy(verdict: Verdict) -> None:
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


def assert_found(verdict: Verdict, law: str) -> None:
    assert [suspect.site.place for suspect in verdict.suspects] == [1]
    assert law in verdict.suspects[0].details["broken"]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_learned_sinks_take_a_share(dtype):
    """Rows of gpt-oss's attention do not sum to 1; its sinks are closed for one law, and are as before after it."""
    model = made("GptOss", dtype)
    before = [layer.self_attn.sinks.clone() for layer in model.model.layers]
    assert_healthy(relations(model, tokens(2, 24)))
    assert all(torch.equal(layer.self_attn.sinks, was) for layer, was in zip(model.model.layers, before, strict=True))
    uneven_rows(model.model.layers[1].self_attn)
    assert_found(relations(model, tokens(2, 24)), Law.REPEATED_TOKEN)


@pytest.mark.parametrize("own", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_keys_that_are_no_tokens_take_a_share(own):
    """A module that adds a key of its own has no law of one token repeated, and keeps the other laws."""
    model = tiny_model("transformer_encoder")
    for layer in model.layers:
        old = layer.self_attn
        layer.self_attn = nn.MultiheadAttention(old.embed_dim, old.num_heads, batch_first=True, **own).eval()
    verdict = relations(model, tiny_inputs("transformer_encoder", length=16))
    assert_healthy(verdict)
    assert any(note.startswith("one token repeated: the module adds its own keys") for note in verdict.notes)


@pytest.mark.parametrize(
    "stem, dtype, kernel", [("Llama", F32, "sdpa"), ("Llama", BF16, "eager"), ("Mixtral", F32, "sdpa")], ids=str
)
def test_padding_on_the_left_looks_nowhere(stem, dtype, kernel):
    """What a token gives that a mask lets see nothing, not even itself, is not judged; the others are."""
    model = made(stem, dtype, attn_implementation=kernel)
    assert_healthy(relations(model, left_padded()))
    uneven_rows(model.model.layers[1].self_attn)
    assert_found(relations(model, left_padded()), Law.REPEATED_TOKEN)


@pytest.mark.parametrize("name", ["relu2", "sigmoid", "tanh", "mish", "leaky_relu"])
def test_activations_without_the_identity(name):
    """a(z) - a(-z) = z is asked only of activations that have it; the others are told."""
    verdict = relations(made("Llama", hidden_act=name), tokens(2, 24))
    assert_healthy(verdict)
    assert any(note.startswith("MLP identity: the MLP's activation") for note in verdict.notes)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu_pytorch_tanh", "quick_gelu"])
def test_activations_with_the_identity(name):
    """A healthy one keeps the MLP identity, and one that is wrong by 1 % breaks it."""
    model = made("Llama", hidden_act=name)
    verdict = relations(model, tokens(2, 24))
    assert_healthy(verdict)
    assert not any(note.startswith(Law.MLP_IDENTITY) for note in verdict.notes)
    activation = model.model.layers[1].mlp.act_fn
    right = activation.forward
    activation.forward = lambda z: right(z) * 1.01
    verdict = relations(model, tokens(2, 24))
    assert verdict.suspects[0].site.place == 1
    assert verdict.suspects[0].details["broken"].keys() & {Law.ACTIVATION_IDENTITY, Law.MLP_IDENTITY}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("stem, dtype", [("Llama", BF16), ("Mixtral", BF16), ("Mixtral", F16)], ids=str)
def test_one_token_again_and_again_is_no_further_evidence(stem, dtype, weights):
    """Rows alike but for a few roundings have the same rounding errors, which count once."""
    model = made(stem, dtype, num_hidden_layers=5)
    assert_healthy(relations(model, torch.full((2, 24), 7), weights=weights))


def test_a_wrong_rounding_shows_on_one_token_again_and_again():
    """One row of 2048 different numbers is evidence enough."""
    model = made("Llama", BF16, intermediate_size=2048)
    with faulty(model, RoundingMode(), 1, operator="linear", module="*.gate_proj"):
        verdict = relations(model, torch.full((2, 24), 7))
    assert [suspect.site.module for suspect in verdict.suspects] == ["model.layers.1.mlp.gate_proj"]
    assert verdict.suspects[0].fault_class == "rounding mode"


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_tiny_numbers_are_judged_by_the_bits_they_have(dtype, weights):
    """Weights a thousandth of the usual make rows that are alike, and in float16 numbers under its normal range."""
    model = tiny_model("gpt2", layers=5).to(dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases larger than what they are added to
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
            parameter.mul_(1e-3)
    assert_healthy(relations(model, tiny_inputs("gpt2", length=24), weights=weights))


def test_a_matrix_that_meets_a_batch_of_others():
    """Mamba multiplies one matrix by a batch, which has more rows of results than of inputs."""
    config = transformers.MambaConfig(vocab_size=199, hidden_size=48, num_hidden_layers=2, state_size=8)
    model = transformers.MambaForCausalLM(config).eval()
    assert_healthy(relations(model, tokens(2, 16)))


def test_a_matrix_times_a_vector_is_told():
    """It has no rows of results: a note says that it was not looked at."""
    model = made("Llama")
    attention = model.model.layers[1].self_attn
    right, vector = attention.forward, torch.ones(48)

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        y, *rest = right(hidden_states, **kwargs)
        return (y + torch.matmul(hidden_states, vector)[..., None], *rest)

    attention.forward = forward
    verdict = relations(model, tokens(2, 24))
    assert verdict.verdict == "undecided"
    assert any(note.startswith("laws of products: a matrix times a vector") for note in verdict.notes)
