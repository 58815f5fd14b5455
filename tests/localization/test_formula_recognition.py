"""A module's formula is read from its class's code, not from its name, and not from its outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import noisescope as ns
from noisescope.localization.formula_recognition import activation_formula, norm_formula
from noisescope.testing import tiny_model


def norms(name: str) -> list[nn.Module]:
    found = [m for m in tiny_model(name).modules() if "norm" in type(m).__name__.lower() and not list(m.children())]
    assert found
    return found


@pytest.mark.parametrize(
    ("name", "centred", "gain"),
    [
        ("llama", False, "weight"),
        ("gemma2", False, "one_plus_weight"),
        ("gpt2", True, "weight"),
        ("t5", False, "weight"),
        ("bert", True, "weight"),
    ],
)
def test_norms_of_real_architectures(name, centred, gain):
    """RMSNorm and LayerNorm, gains of w and of 1 + w, whatever the class is called (T5LayerNorm is an RMSNorm)."""
    for module in norms(name):
        formula = norm_formula(module, module.weight.shape[0])
        assert formula is not None
        assert (formula.centred, formula.gain) == (centred, gain)
        assert formula.eps > 0


def test_an_unknown_norm_is_not_guessed():
    """A norm with another formula, another parameter or another argument is None."""

    class PowerNorm(nn.Module):
        eps = 1e-6

        def __init__(self, power: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.power = power

        def forward(self, x):
            return self.weight * x / (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps).pow(1 / self.power)

    class Gated(nn.LayerNorm):
        def forward(self, x, gate):
            return super().forward(x) * gate

    assert norm_formula(PowerNorm(3.0), 8) is None
    assert norm_formula(Gated(8), 8) is None
    assert norm_formula(nn.GroupNorm(2, 8), 4) is None


def test_a_wrong_eps_is_not_overlooked():
    """eps is part of the formula: code that uses another than the attribute says is not recognised."""

    class Careless(nn.Module):
        eps = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)

    assert norm_formula(Careless(), 8) is None


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.SiLU(), ("silu", False)),
        (nn.GELU(), ("gelu", False)),
        (nn.GELU(approximate="tanh"), ("gelu_tanh", False)),
        (nn.ReLU(), None),
    ],
)
def test_activations_of_torch(module, expected):
    """The formula, and that it is rounded once."""
    assert activation_formula(module) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu_new", ("gelu_tanh", True)),
        ("quick_gelu", ("quick_gelu", True)),
        ("gelu_pytorch_tanh", ("gelu_tanh", False)),
    ],
)
def test_activations_of_transformers(name, expected):
    """gelu_new is made of single operations, each of which rounds."""
    from transformers.activations import ACT2FN

    assert activation_formula(ACT2FN[name]) == expected


def test_the_module_under_test_is_not_called():
    """A scope on the module does not change what its class is recognised as, and its weights stay as they are."""
    model = tiny_model("llama", seed=3)
    norm = model.model.norm
    before = norm.weight.clone()
    with ns.inject(model, ns.Injection(lambda y, draw: y * 0, operators={"norm"}, phases={"forward"})):
        formula = norm_formula(norm, 32)
        model(torch.tensor([[1, 2, 3]]))
    assert formula is not None
    assert torch.equal(norm.weight, before)
    assert "forward" not in norm.__dict__


def test_a_norm_whose_methods_were_replaced_in_memory_is_what_its_file_says(monkeypatch):
    """A patched class, or a method put on an instance, is the device's: the formula is that of the file."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    original = Qwen2RMSNorm.forward
    monkeypatch.setattr(Qwen2RMSNorm, "forward", lambda self, x: original(self, x - x.mean(-1, keepdim=True)))
    formula = norm_formula(Qwen2RMSNorm(24, eps=3e-6), 24)  # no other test uses this one: formulas are remembered
    assert formula is not None
    assert not formula.centred
    norm = Gemma2RMSNorm(24, eps=3e-6)
    norm._norm = lambda x: x - x.mean(-1, keepdim=True)
    formula = norm_formula(norm, 24)
    assert formula is not None
    assert (formula.centred, formula.gain) == (False, "one_plus_weight")
