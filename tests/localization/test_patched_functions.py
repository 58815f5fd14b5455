"""Functions replaced in transformers' shared files, and in the classes of a model: found, put back, and named."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, activations, masking_utils, modeling_utils, pytorch_utils
from transformers.integrations import sdpa_attention

import noisescope as ns
from noisescope.localization.patched_functions import patched_functions
from noisescope.testing import tiny_model


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    @torch.no_grad()
    def decorated(self) -> float:
        return 1.0


class Own(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


AUTO_ROUND = ("Transpose.convert", "PreTrainedModel._init_weights")  # it patches these for good where it is imported


def patched(model: nn.Module) -> list[tuple[type, str, Any]]:
    """Without what another test's imports patched in this process."""
    found = patched_functions(model)
    return [each for each in found if f"{each[0].__name__}.{each[1]}" not in AUTO_ROUND]


def names(model: nn.Module) -> list[str]:
    return [f"{owner.__name__}.{name}" for owner, name, _ in patched(model)]


def test_code_as_it_was_imported_is_not_patched() -> None:
    import lightning
    import peft
    import torchao

    assert lightning and peft and torchao
    assert names(tiny_model("gpt2", layers=1)) == [] == names(Own())


@pytest.mark.parametrize("wrap", [False, True], ids=["another function", "with the name of the original"])
def test_a_method_of_the_models_own_class(wrap, monkeypatch) -> None:
    shipped = Own.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return shipped(self, x) * 1.01

    monkeypatch.setattr(Own, "forward", functools.wraps(shipped)(forward) if wrap else forward)
    ((owner, name, original),) = patched(Own())
    assert (owner, name) == (Own, "forward")
    assert torch.equal(original(Own(), torch.ones(8)), torch.full((8,), 2.0))  # super() too


def test_an_unpatched_decorated_method_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(Base, "decorated", lambda self: 2.0)
    assert names(Own()) == ["Base.decorated"]
    monkeypatch.undo()
    assert names(Own()) == []


def located(model: nn.Module) -> ns.Verdict:
    return ns.locate(ns.wrap(model), quick=True)


def test_a_shared_activation_and_conv1d(monkeypatch) -> None:
    model = tiny_model("gpt2", layers=2)
    with monkeypatch.context() as patch:
        patch.setattr(activations.NewGELUActivation, "forward", lambda self, x: F.gelu(x))
        found = located(model).suspects[0].site
        assert (found.operator, found.module) == ("gelu", "transformer.h.0.mlp.act")
    shipped = pytorch_utils.Conv1D.forward
    monkeypatch.setattr(pytorch_utils.Conv1D, "forward", lambda self, x: shipped(self, x) * 1.01)
    verdict = located(model)
    assert verdict.suspects[0].site.operator == "linear"
    assert any("Conv1D.forward" in note for note in verdict.notes)
    monkeypatch.undo()
    assert located(model).verdict == "healthy"


def test_masks(monkeypatch) -> None:
    model = tiny_model("llama", layers=2, attn_implementation="eager")
    monkeypatch.setattr(masking_utils, "causal_mask_function", lambda batch, head, query, key: key <= query + 1)
    assert located(model).suspects[0].fault_class == "mask"


def test_entries_of_the_table_of_implementations(monkeypatch) -> None:
    shipped = sdpa_attention.sdpa_attention_forward

    def wrong(*args: object, **kwargs: object):
        output, weights = shipped(*args, **kwargs)
        return output * 1.01, weights

    model = tiny_model("llama", layers=2)
    for held in (AttentionInterface._global_mapping, modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping):
        with monkeypatch.context() as patch:
            patch.setattr(sdpa_attention, "sdpa_attention_forward", wrong)
            patch.setitem(held, "sdpa", wrong)
            assert {name: original for owner, name, original in patched_functions(model)}["sdpa"] is shipped
            assert located(model).verdict == "faulty"


def test_functions_of_a_models_file(monkeypatch) -> None:
    """The host reads the file again; the note names what was replaced in memory, and nothing else."""
    from transformers.models.llama import modeling_llama

    model = tiny_model("llama", layers=1)
    assert names(model) == []
    original = modeling_llama.apply_rotary_pos_emb
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: original(q, k, *args))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x))
    assert names(model) == [f"{modeling_llama.__name__}.apply_rotary_pos_emb", "LlamaMLP.forward"]
    verdict = ns.locate(ns.wrap(model), quick=True)
    assert any("modeling_llama.apply_rotary_pos_emb" in note for note in verdict.notes)
