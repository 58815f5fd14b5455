"""The screen of a number format: against divergence measured with small errors, and against gradients taken by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisescope as ns
from noisescope.injection import Injection
from noisescope.measures.fisher import fisher_factor
from noisescope.measures.format_screen import QuestionScreen
from noisescope.probe.formats import Format, quantise
from noisescope.testing import tiny_model

TOKENS = torch.tensor([[5, 9, 30, 41, 7, 12]])
KEYS = torch.arange(TOKENS.shape[1])
TENSOR = {"weights": "weight", "activations": "input", "kv-cache": "output"}
OPERATORS = {"weights": {"linear", "embedding"}, "activations": {"linear"}, "kv-cache": {"kv_cache"}}


def sharp(**more: Any) -> nn.Module:
    model = tiny_model("llama", **more)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


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
