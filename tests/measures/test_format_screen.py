"""The screen of a number format: against divergence measured with small errors, and against gradients taken by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

import noisescope as ns
from noisescope.injection import Injection
from noisescope.measures.fisher import fisher_factor
from noisescope.measures.format_screen import QuestionScreen
from noisescope.model.anatomy import dissect
from noisescope.probe.formats import Format, quantise
from noisescope.testing import tiny_model

TOKENS = torch.tensor([[5, 9, 30, 41, 7, 12]])
KEYS = torch.arange(TOKENS.shape[1])
TENSOR = {"weights": "weight", "activations": "input", "kv-cache": "output"}
OPERATORS = {"weights": {"linear", "embedding"}, "activations": {"linear"}, "kv-cache": {"kv_cache"}}


def sharp(name: str = "llama", **more: Any) -> nn.Module:
    return sharpened(tiny_model(name, **more))


def sharpened(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def llama4() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "head_dim": 8, "vocab_size": 64}
    config = Llama4TextConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                              num_local_experts=4, interleave_moe_layer_step=1, pad_token_id=0)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sharpened(Llama4ForCausalLM(config).eval())


def injection(fmt: Format, on: str) -> Injection:
    return Injection(fmt, frozenset(OPERATORS[on]), tensor=TENSOR[on], phases=frozenset({"forward"}))


def screened(model: nn.Module, fmt: Format, on: str, tokens: Tensor, scored: Tensor, draws: int) -> QuestionScreen:
    with QuestionScreen(model, injection(fmt, on)) as screen, torch.enable_grad():
        screen.samples = torch.arange(len(tokens))
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        screen.score(logits, scored, KEYS[scored], draws=draws, seed=0)
    return screen


@pytest.mark.parametrize("on", ["weights", "activations"])
def test_one_token_costs_what_is_predicted(on: str) -> None:
    """With one token there is nothing to add up between tokens, so a fine format costs what the mean of draws says."""
    model, fmt, token = sharp(), Format("int8", "token" if on == "activations" else "group"), TOKENS[:, :1]
    draws = 150
    screen = screened(model, fmt, on, token, torch.tensor([0]), draws)
    with torch.no_grad():
        clean = model(token, use_cache=False).logits[0, -1].double().log_softmax(-1)
    for site, sums in screen.sums.items():
        where = Injection(fmt, {site.operator}, modules=(site.module,), tensor=TENSOR[on], phases={"forward"},
                          places={site.place})  # fmt: skip
        if site.module.endswith(("q_proj", "k_proj")):  # one token attends to itself, whatever its key
            assert sums[0] / draws < 1e-9
            continue
        with ns.inject(model, where), torch.no_grad():
            rounded = model(token, use_cache=False).logits[0, -1].double().log_softmax(-1)
        measured = float((clean.exp() * (clean - rounded)).sum())
        assert sums[0] / draws == pytest.approx(measured, rel=0.5, abs=1e-9), site
    assert len(screen.sums) == 2 * 7 + (2 if on == "weights" else 1)


@pytest.mark.parametrize("on", ["weights", "activations"])
@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_fused_experts_cost_what_is_predicted(name: str, on: str) -> None:
    """Sequences of one token, together; within a factor, for the two products of an expert are taken as independent.

    Llama 4 keeps its experts as [experts, in, out].
    """
    model = sharp("mixtral") if name == "mixtral" else llama4()
    fmt, tokens, draws = Format("int8", "token" if on == "activations" else "group"), torch.arange(3, 43)[:, None], 40
    with QuestionScreen(model, injection(fmt, on)) as screen, torch.enable_grad():
        screen.samples, screen.tokens = torch.arange(len(tokens)), torch.ones(len(tokens))
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        screen.score(logits, torch.arange(len(tokens)), torch.arange(len(tokens)), draws=draws, seed=0)
    with torch.no_grad():
        clean = model(tokens, use_cache=False).logits.double().log_softmax(-1)
    experts = [site for site in screen.sums if site.module.endswith("experts")]
    for site in experts:
        where = Injection(fmt, {"linear"}, modules=(site.module,), tensor=TENSOR[on], phases={"forward"})
        with ns.inject(model, where), torch.no_grad():
            rounded = model(tokens, use_cache=False).logits.double().log_softmax(-1)
        measured = float((clean.exp() * (clean - rounded)).sum())
        assert 2 / 3 < sum(screen.sums[site].values()) / draws / measured < 3 / 2, site
    assert len(experts) == 2 and not screen.unpredicted(dissect(model))


def test_weights_of_experts_are_rounded_along_their_inputs() -> None:
    model, by_hand, fmt = llama4(), llama4(), Format("int4", "group", 16)
    with torch.no_grad():
        for name, weight in by_hand.named_parameters():
            if "layers.1.feed_forward.experts" in name:
                weight.copy_(quantise(weight.transpose(-1, -2).contiguous(), fmt, weight=True).transpose(-1, -2))
    where = Injection(fmt, {"linear"}, modules=("model.layers.1.feed_forward.experts",), tensor="weight")
    with ns.inject(model, where):
        assert torch.equal(model(TOKENS).logits, by_hand(TOKENS).logits)


@pytest.mark.parametrize("on", ["weights", "activations"])
def test_experts_are_rounded_alike_however_they_are_computed(on: str) -> None:
    """One product by expert, grouped, or of a matrix and a vector for each token."""
    model, fmt = tiny_model("mixtral"), Format("int4", "group", 16)
    found = []
    for model.config._experts_implementation in ("eager", "grouped_mm", "batched_mm"):
        with ns.inject(model, injection(fmt, on)):
            found.append(model(TOKENS, use_cache=False).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_are_projected_on_their_gradients(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the tensors that fused attention was given, their gradients of the same random direction."""
    fmt, scored = Format("int4", "token"), torch.arange(TOKENS.shape[1])
    screen = screened(sharp(attn_implementation=attention), fmt, "kv-cache", TOKENS, scored, draws=1)
    model, given = sharp(attn_implementation="sdpa"), list[tuple[Tensor, Tensor]]()
    fused = F.scaled_dot_product_attention

    def kept(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        key.retain_grad()
        value.retain_grad()
        given.append((key, value))
        return fused(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kept)
    logits = model(TOKENS, use_cache=False).logits.flatten(0, 1)
    logits.backward(fisher_factor(logits.detach(), scored, KEYS, 0))
    for layer, pair in enumerate(given):
        for name, tensor in zip(("keys", "values"), pair, strict=True):
            a = ((quantise(tensor.detach(), fmt) - tensor.detach()) * tensor.grad).sum(-1).sum(1)
            wanted = float(((1 + a.double().square()).sqrt() - 1).sum())
            found = next(sums for site, sums in screen.sums.items() if (site.operator, site.place) == (name, layer))
            assert found[0] == pytest.approx(wanted, rel=1e-3)
    assert len(screen.sums) == 4
