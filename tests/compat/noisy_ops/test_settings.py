"""Scales by phase, training only, the notes' module variables, and their environment variables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noisescope import noisy_ops as no
from noisescope.compat.noisy_ops import environment
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_inputs

TOKENS = tiny_inputs("llama")
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


def measured(layer: nn.Linear) -> tuple[float, float]:
    """How far the output and the weight's gradient of one linear are off, relative to their size."""
    x, found = X.clone(), []
    for noisy in (False, True):
        if noisy:
            no.enable_noisy_ops(seed=1)
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), layer.weight.grad.clone()))
    no.disable_noisy_ops()
    (clean, gradient), (output, noisy_gradient) = found
    return float((output - clean).norm() / clean.norm()), float((noisy_gradient - gradient).norm() / gradient.norm())


@pytest.mark.parametrize(
    ("forward", "backward"), [(None, 0.02), (0.1, None), (0.1, 0.02), (0.0, 0.02), (0.1, 0.0), (None, None)]
)
def test_scales_of_phases(forward: float | None, backward: float | None) -> None:
    """Forward and backward noise have the scales asked for, error_scale where none is; 0 switches a phase off."""
    torch.manual_seed(0)
    no.set_phase_scales(forward=forward, backward=backward)
    assert no.get_phase_scales() == {"forward": 0.05 if forward is None else forward,
                                     "backward": 0.05 if backward is None else backward}  # fmt: skip
    expected = [0.05 if scale is None else scale for scale in (forward, backward)]
    assert measured(nn.Linear(32, 64)) == pytest.approx(expected, rel=0.1)
    counts = no.get_injection_stats()
    assert (counts["total_forward"], counts["total_backward"]) == (int(forward != 0), int(backward != 0))


def test_phases_and_layers(model: nn.Module) -> None:
    """A layer's own scale is multiplied by the phase's ratio to error_scale; without a ratio that is refused."""
    no.register_layer_hooks(model)
    no.set_phase_scales(forward=0.05, backward=0.02)
    no.set_per_layer_scales({1: 0.2})
    no.enable_noisy_ops(0.05)
    logits(model)
    (probe,) = state.probes
    site = {unit.place: unit for unit in probe.anatomy.units if unit.operators == ("linear",)}
    strength: Any = lambda place, phase: probe.injection.strength(site[place].site("linear", phase=phase))  # noqa: E731
    assert [strength(0, phase) for phase in ("forward", "backward")] == pytest.approx([0.05, 0.02])
    assert [strength(1, phase) for phase in ("forward", "backward")] == pytest.approx([0.2, 0.08])
    no.disable_noisy_ops()
    with pytest.raises(InvalidInput, match="can't be expressed relative to it"):
        no.enable_noisy_ops(0.0)
    no.set_per_layer_scales(None)
    no.enable_noisy_ops(0.0)
    logits(model)
    assert no.disable_noisy_ops()["total_forward"] == 19


@pytest.mark.parametrize("bad", [-0.1, float("nan"), "much"])
def test_bad_scales_of_phases(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="scale of backward"):
        no.set_phase_scales(backward=bad)
    assert no.get_phase_scales() == {"forward": 0.05, "backward": 0.05}


def test_training_only_acts_on_open_models(model: nn.Module) -> None:
    """Switched on while the model is open, evaluation is clean from the next call on."""
    clean = logits(model)
    no.enable_noisy_ops()
    assert not torch.equal(clean, logits(model))
    no.set_training_only()
    assert torch.equal(clean, logits(model))
    assert not torch.equal(clean, model(**TOKENS).logits)
    no.set_training_only(False)
    assert not torch.equal(clean, logits(model))
    no.disable_noisy_ops()


@pytest.mark.parametrize("prefix", ["NOISESCOPE_", "VERL_NOISY_OPS_"])
def test_training_only_by_the_environment(monkeypatch: pytest.MonkeyPatch, model: nn.Module, prefix: str) -> None:
    """Both spellings: noise in training, none in evaluation."""
    monkeypatch.setenv(f"{prefix}ENABLED", "1")
    monkeypatch.setenv(f"{prefix}TRAINING_ONLY", "1")
    clean = logits(model)
    environment.read_environment()
    assert torch.equal(clean, logits(model)) and no.get_injection_stats()["total_forward"] == 0
    model(**TOKENS, labels=TOKENS["input_ids"]).loss.backward()
    assert no.disable_noisy_ops() == {"total_forward": 19, "total_backward": 19}


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no effect, so there is a warning."""
    monkeypatch.setenv("VERL_NOISY_OPS_FORWARD_ONYL", "1")
    with pytest.warns(UserWarning, match=r"were ignored: VERL_NOISY_OPS_FORWARD_ONYL\. Known: .*_FORWARD_ONLY"):
        environment.read_environment()


def test_module_variables_of_the_notes(model: nn.Module) -> None:
    """They follow what the functions set; others are no attributes."""
    assert (no._NOISY_OPS_ENABLED, no._ERROR_SCALE, no._ERROR_TYPE) == (False, 0.05, "relative_gaussian")
    assert no._SELECTIVE_OPERATORS is None and no._OPERATOR_NOISE_SCALES == {}
    no.set_noise_phases(forward=True, backward=False)
    no.set_phase_scales(backward=0.02)
    no.set_selective_operators(["softmax"])
    no.set_operator_noise_scales({"softmax": 0.2})
    no.enable_noisy_ops(0.1, "uniform")
    logits(model)
    assert (no._NOISY_OPS_ENABLED, no._ERROR_SCALE, no._ERROR_TYPE) == (True, 0.1, "uniform")
    assert (no._NOISY_OPS_FORWARD_ENABLED, no._NOISY_OPS_BACKWARD_ENABLED) == (True, False)
    assert (no._NOISY_OPS_FORWARD_SCALE, no._NOISY_OPS_BACKWARD_SCALE) == (0.1, 0.02)
    assert {"softmax"} == no._SELECTIVE_OPERATORS and no._OPERATOR_NOISE_SCALES == {"softmax": 0.2}
    assert no._OPERATOR_INJECTION_STATS == {"softmax": {"forward": 2, "backward": 0}}
    no.disable_noisy_ops()
    with pytest.raises(AttributeError, match="has no attribute '_NONSENSE'"):
        no._NONSENSE  # noqa: B018
