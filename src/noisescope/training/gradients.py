"""What noise does to gradients, phase by phase, in seconds: before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import stats
from noisescope.errors import InvalidInput
from noisescope.findings import band
from noisescope.jsonform import to_json
from noisescope.model.forwards import evaluating
from noisescope.sites import PHASES
from noisescope.training.aqn import AQN, OperatorNoise, noise
from noisescope.training.schedules import Constant


def gradient_pretest(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *,
    noise_scale: float = 0.05,
    operators: frozenset[str] = frozenset({"gemm"}),
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """For noise forward, backward and both: ratio of gradient norms and relative change, over batches.

    If backward noise regularises and forward noise makes models robust, backward noise should move the gradient
    at least as much as forward noise does. The bands of the ratio are those of the original method notes.

    Each batch has draws of its own. The model runs in evaluation mode, because dropout would differ between the clean
    and the noisy gradient; its modes and its own `.grad` are not changed.
    """
    if not batches:
        raise InvalidInput("give at least one batch")
    clean = [_gradient(model, loss, batch) for batch in batches]
    found = {}
    for phases in (("forward",), ("backward",), PHASES):
        aqn = AQN(OperatorNoise(operators, frozenset(phases)), Constant(noise_scale), seed)
        ratios, changes = [], []
        with noise(model, aqn, rank=0) as scope:
            for number, (batch, before) in enumerate(zip(batches, clean, strict=True)):
                scope.at(number)
                after = _gradient(model, loss, batch)
                ratios.append(float(after.norm() / before.norm()))
                changes.append(float((after - before).norm() / before.norm()))
        ratio = stats.mean(ratios)
        found[phases[0] if len(phases) == 1 else "both"] = {
            "ratio": to_json(ratio),
            "band": band("gradient_ratio", ratio.value),
            "change": to_json(stats.mean(changes)),
        }
    return found


def _gradient(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
    """All of it, as one vector on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with evaluating(model):
        slopes = torch.autograd.grad(loss(model, batch), parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([slope.flatten().float() for slope in slopes])
