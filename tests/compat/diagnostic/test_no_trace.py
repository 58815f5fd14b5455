"""Whatever is measured, the model and the caller's random state are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from noisescope import diagnostic
from noisescope.testing import tiny_model

FEW = {"seeds": 1, "samples": 2}


def integrated(model: Any, data: Any) -> None:
    diagnostic.IntegratedDiagnostic(model, data).run_full_diagnosis(**FEW)


def captured(model: Any, data: Any) -> None:
    capture = diagnostic.ActivationCapture(model)
    capture.register_hooks()
    model(data[0])
    capture.remove_hooks()


def captured_until_an_error(model: Any, data: Any) -> None:
    with pytest.raises(ZeroDivisionError), diagnostic.ActivationCapture(model):
        model(data[0])
        raise ZeroDivisionError


def detected(model: Any, data: Any) -> None:
    detector = diagnostic.ChannelOutlierDetector(model, data)
    detector.collect_statistics(samples=2)
    detector.register_hooks()
    model(data[0])
    detector.remove_hooks()


def loss(model: Any, batch: Any) -> Any:
    return model(batch, labels=batch).loss


CALLS: list[Callable[[Any, Any], Any]] = [
    integrated,
    captured,
    captured_until_an_error,
    detected,
    lambda m, data: diagnostic.MetricsDashboard().compute_all_metrics(m, data, **FEW),
    lambda m, data: diagnostic.operator_level_diagnosis(m, data, **FEW),
    lambda m, data: diagnostic.sliding_window_diagnosis(m, data, **FEW),
    lambda m, data: diagnostic.find_critical_threshold(m, data, **FEW),
    lambda m, data: diagnostic.detect_outliers_fisher(m, data, **FEW),
    lambda m, data: diagnostic.capture_layer_output(m, 0, data[0]),
    lambda m, data: diagnostic.estimate_fim_diagonal(m, data),
    lambda m, data: diagnostic.estimate_hessian_trace(m, loss, data[0], 2),
    lambda m, data: diagnostic.compute_gradient_ratio(m, lambda m: loss(m, data[0]), lambda m: loss(m, data[0])),
]


def state_of(model: Any) -> Any:
    """Every attribute and hook of every module by identity, and what each parameter learns."""
    modules = {
        name: (
            module.training,
            sorted(key for key in module.__dict__ if not key.startswith("_")),
            [len(module.__dict__[key]) for key in sorted(module.__dict__) if key.endswith("hooks")],
        )
        for name, module in model.named_modules()
    }
    return modules, [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_on_the_model(call, logits):
    """Attributes, hooks, modes, gradients, logits and random numbers are the same before and after."""
    model = tiny_model("llama")
    data = [torch.arange(3, 15).reshape(2, 6)]
    before, clean, random = state_of(model), logits(model, data[0]), torch.get_rng_state()
    call(model, data)
    assert state_of(model) == before
    assert torch.equal(logits(model, data[0]), clean) and torch.equal(torch.get_rng_state(), random)
