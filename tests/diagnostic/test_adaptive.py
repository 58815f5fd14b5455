"""AdaptiveAQN of the original method notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noisescope.diagnostic import AdaptiveAQN
from noisescope.errors import InvalidInput, NothingInjected


def test_scales_follow_the_profile(llama: Any) -> None:
    """Brittle layers get half the base scale, sturdy ones twice, those between or unknown the base scale."""
    adaptive = AdaptiveAQN(llama, {0: 0.2, 1: 0.01})
    assert [adaptive.get_layer_noise_scale(layer) for layer in range(3)] == pytest.approx([0.025, 0.1, 0.05])
    assert AdaptiveAQN(llama, {0: 0.12}, rule="summary").get_layer_noise_scale(0) == pytest.approx(0.025)


def test_on_and_off(llama: Any, tokens: torch.Tensor) -> None:
    """Enabled, a training step is noisy in every layer; disabled, the model is as before."""

    def loss() -> float:
        return float(llama(tokens, labels=tokens).loss.detach())

    clean, adaptive = loss(), AdaptiveAQN(llama, {0: 0.2, 1: 0.01})
    assert adaptive.enable_adaptive_noise() == pytest.approx({0: 0.025, 1: 0.1, 2: 0.05})
    assert loss() != clean
    assert adaptive.noise is not None and {0, 1, 2} <= set(adaptive.noise.tally.per_layer)
    with pytest.raises(InvalidInput, match="on already"):
        adaptive.enable_adaptive_noise()
    adaptive.disable_adaptive_noise()
    assert loss() == clean
    adaptive.enable_adaptive_noise()
    with pytest.raises(NothingInjected):
        adaptive.disable_adaptive_noise()
