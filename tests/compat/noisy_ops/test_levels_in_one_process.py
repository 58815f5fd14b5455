"""The three levels of the original method notes one after the other in one process, hooks left in place or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisescope as ns
from noisescope import noisy_ops as no
from noisescope.diagnostic import ActivationCapture, ChannelOutlierDetector, operator_level_diagnosis
from noisescope.errors import ModelHeld
from noisescope.testing import tiny_inputs

TOKENS = tiny_inputs("llama")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(module.__dict__) for name, module in model.named_modules()}


def level_1(model: nn.Module) -> dict[str, Tensor]:
    """The notes' loop over operators."""
    found = {}
    for operator in ("matmul", "softmax", "layer_norm"):
        no.set_selective_operators([operator])
        no.enable_noisy_ops(error_scale=0.05, seed=1)
        found[operator] = logits(model)
        no.disable_noisy_ops()
    no.set_selective_operators(None)
    return found


def test_level_1_after_level_3(model):
    """With the capture's hooks still there the noise is the same; they are removed by name, and nothing is left."""
    expected, clean, before = level_1(model), logits(model), attributes(model)
    capture = ActivationCapture(model)
    capture.register_hooks()
    logits(model)
    capture.detect_outliers(threshold=10.0)
    found = level_1(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    capture.remove_hooks()
    assert torch.equal(clean, logits(model)) and attributes(model) == before


@pytest.mark.parametrize("first", ["noise", "capture"])
@pytest.mark.parametrize("left_first", ["noise", "capture"])
def test_any_order(model, first, left_first):
    """Noise and hooks begin and end in any order; each acts from its beginning to its end."""
    clean, before = logits(model), attributes(model)
    capture = ActivationCapture(model)
    begin = {"noise": lambda: (no.enable_noisy_ops(seed=1), logits(model)), "capture": capture.register_hooks}
    end = {"noise": no.disable_noisy_ops, "capture": capture.remove_hooks}
    for name in (first, *(begin.keys() - {first})):
        begin[name]()
    seen = {name: len(calls) for name, calls in capture.activations.items()}
    assert not torch.equal(clean, logits(model))
    assert all(len(calls) == seen.get(name, 0) + 1 for name, calls in capture.activations.items())
    end.pop(left_first)()
    assert torch.equal(clean, logits(model)) == (left_first == "noise")
    for finish in end.values():
        finish()
    assert torch.equal(clean, logits(model)) and attributes(model) == before


def test_operators_change_under_a_capture(model):
    """Selections that need other functions than before are followed, too, while hooks lie on the noise."""
    no.set_selective_operators(["linear"])
    no.enable_noisy_ops(seed=1)
    clean = logits(model)
    with ActivationCapture(model):
        no.set_selective_operators(["softmax"])
        assert not torch.equal(clean, logits(model))
        assert no.get_operator_injection_stats()["softmax"]["forward"] == 2
    no.disable_noisy_ops()


def test_a_diagnosis_with_hooks_in_place(model):
    """Level 1 by its function, while the detector's hooks of Level 3 were never removed."""
    batches = [{"input_ids": torch.arange(3, 27).reshape(4, 6)}]
    detector = ChannelOutlierDetector(model, batches)
    detector.register_hooks()
    logits(model)
    rows = operator_level_diagnosis(model, batches, seeds=1)
    assert rows["softmax"]["total_injections"] > 0
    detector.remove_hooks()
    assert detector.get_report()["summary"]["total_channels"] > 0


def test_a_refusal_is_repeated(model):
    """Inside a scope that must be left last, every call is refused, not only the first."""
    no.enable_noisy_ops()
    with pytest.raises(ModelHeld), ns.inject(model, ns.Injection(ns.Gaussian(0.05))):
        for _ in range(2):
            with pytest.raises(ModelHeld, match="call the model once before"):
                logits(model)
        logits(model)
