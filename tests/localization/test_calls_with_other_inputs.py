"""Modules that can't be called again as they were: their laws are not tried, and nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization.formula_recognition import LinearFormula
from noisescope.localization.laws.calls_with_other_inputs import ModuleState
from noisescope.localization.relations import relations
from noisescope.testing import tiny_model


class RaisesAgain(nn.Linear):
    """May be called once in each forward of the model."""

    called = False

    def forward(self, x: Tensor) -> Tensor:
        if self.called:
            raise OverflowError("not again")
        self.called = True
        return F.linear(x, self.weight, self.bias)


class WantsTheseRows(nn.Linear):
    """Takes as many rows as it was made for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError("three dimensions")
        return F.linear(x, self.weight, self.bias)


class Counts(nn.Linear):
    """Adds what it has counted, in an attribute and in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        return F.linear(x, self.weight, self.bias) + 0.01 * self.total


class PairNorm(nn.LayerNorm):
    """Gives something else than a tensor from its second call in a forward on."""

    called = False

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        first, self.called = not self.called, True
        return y if first else {"y": y}


class GatedNorm(nn.LayerNorm):
    """Another number of rows does not fit its gate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.full((2, 1, 1), 1.5)


def new_forwards(model: nn.Module, module: nn.Module) -> None:
    """Lets a module know that a forward of its model begins."""
    right = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        module.called = False  # type: ignore[assignment]
        return right(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]


def with_linear(cls: type[nn.Linear]) -> tuple[nn.Module, nn.Module]:
    model = tiny_model("llama", seed=4)
    old = model.model.layers[1].mlp.up_proj
    new = cls(old.in_features, old.out_features)
    model.model.layers[1].mlp.up_proj = new
    return model, new


@pytest.mark.parametrize("cls", [RaisesAgain, WantsTheseRows, Counts])
@pytest.mark.parametrize("recognised", [True, False])
def test_a_linear_that_can_not_be_called_again(cls, recognised, monkeypatch):
    """No crash, no alarm, and what was not tried is named: also where its formula is known."""
    if recognised:
        formula = LinearFormula(transposed=False, bias=True)
        monkeypatch.setattr("noisescope.localization.laws.dispatcher.linear_formula", lambda module: formula)
    model, module = with_linear(cls)
    new_forwards(model, module)
    verdict = relations(model)
    assert verdict.suspects == ()
    if cls is RaisesAgain and recognised:
        assert any(
            "model.layers.1.mlp.up_proj (RaisesAgain): it raised OverflowError when called again" in note
            for note in verdict.notes
        )
        assert verdict.verdict == "undecided"
    if cls is Counts and recognised:
        assert any("it changes its own state when called" in note for note in verdict.notes)


@pytest.mark.parametrize("cls", [PairNorm, GatedNorm])
def test_a_norm_that_can_not_be_called_again(cls):
    model = tiny_model("gpt2", seed=4)
    new = cls(model.transformer.h[1].ln_2.normalized_shape)
    model.transformer.h[1].ln_2 = new
    new_forwards(model, new)
    verdict = relations(model)
    assert verdict.suspects == ()
    assert verdict.verdict == "undecided"


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral", "gemma3", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_law_fails_on_usual_models(name, dtype):
    """What is caught there must be a module's own exception, never one of the laws' code."""
    verdict = relations(tiny_model(name, seed=5).to(dtype), weights=True)
    assert not [note for note in verdict.notes if "raised" in note or "changes its own state" in note]


def test_state_is_put_back():
    module = Counts(4, 4)
    module(torch.ones(1, 4))
    before = ModuleState.of(module)
    assert not before.restore()
    module(torch.ones(1, 4))
    module.total = module.total * 2
    assert before.restore()
    assert (module.calls, float(module.total)) == (1, 1.0)
    assert ModuleState.of(torch.add).restore() is False


def test_attention_that_obeys_no_law_is_no_alarm_and_a_fault_in_it_is_one():
    """An output gate sigmoid(x) breaks oddness by the class's own code: the host shows it."""

    model = tiny_model("llama", seed=6)
    block = model.model.layers[1]
    attention = type(block.self_attn)

    class GatedAttention(attention):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            y, *rest = super().forward(hidden_states, *args, **kwargs)
            return (y * torch.sigmoid(hidden_states), *rest)

    block.self_attn.__class__ = GatedAttention
    verdict = relations(model)
    assert verdict.suspects == ()
    assert any("oddness: GatedAttention does not satisfy it on the host either" in note for note in verdict.notes)
    right = block.self_attn.forward

    def offset(*args: Any, **kwargs: Any) -> Any:
        y, *rest = right(*args, **kwargs)
        return (y + 0.1, *rest)

    block.self_attn.forward = offset
    assert relations(model).suspects[0].site.place == 1
