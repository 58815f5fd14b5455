"""AdaptiveAQN of the original method notes, over the process-wide noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from noisescope import noisy_ops
from noisescope.compat.noisy_ops.state import state
from noisescope.diagnostic import AdaptiveAQN
from noisescope.errors import InvalidInput, NothingInjected


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    state.__init__()  # type: ignore[misc]
    yield
    state.stop(check=False)


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
    assert set(noisy_ops.get_layer_injection_stats()) == {0, 1, 2}
    with pytest.raises(InvalidInput, match="already enabled"):
        adaptive.enable_adaptive_noise()
    adaptive.disable_adaptive_noise()
    assert loss() == clean
    adaptive.enable_adaptive_noise()
    with pytest.raises(NothingInjected):
        adaptive.disable_adaptive_noise()
    adaptive.disable_adaptive_noise()  # a second time does no harm
    assert state.settings.layer_scales == {} and not state.settings.training_only


def test_it_is_the_noise_of_noisy_ops(llama: Any, tokens: torch.Tensor) -> None:
    """Its phases, counts and switch act on it; each layer has its scale; evaluation stays clean."""
    with torch.no_grad():
        clean = llama(tokens).logits
    noisy_ops.set_noise_phases(forward=True, backward=False)
    adaptive = AdaptiveAQN(llama, {0: 0.2, 1: 0.01}, base_noise_scale=0.04)
    adaptive.enable_adaptive_noise()
    with torch.no_grad():
        assert torch.equal(llama(tokens).logits, clean)
    llama(tokens, labels=tokens).loss.backward()
    (probe,) = state.probes
    assert {target.unit.place: target.forward.scale for target in aims_of(probe)} == pytest.approx(
        {0: 0.02, 1: 0.08, 2: 0.04, "lm_head": 0.04}
    )
    assert noisy_ops.disable_noisy_ops()["total_backward"] == 0
    adaptive.enable_adaptive_noise()  # switched off by noisy_ops, so it may begin again
    llama(tokens, labels=tokens)
    adaptive.disable_adaptive_noise()


def aims_of(probe: Any) -> list[Any]:
    return [target for one in probe._wrappers.values() for here in one.targets.values() for target in here.values()]


def test_a_class_written_over_noisy_ops(llama: Any, tokens: torch.Tensor) -> None:
    """Code that reads the module's scale, sets scales by layer and enables works as it would over the notes' module."""
    noisy_ops.enable_noisy_ops(error_scale=0.03)
    original = noisy_ops._ERROR_SCALE
    scales = {layer: original * factor for layer, factor in enumerate((0.5, 1.0, 2.0))}
    noisy_ops.set_per_layer_scales(scales)
    noisy_ops.enable_noisy_ops(error_scale=original)
    llama(tokens)
    assert {target.unit.place: target.forward.scale for target in aims_of(state.probes[0])} == pytest.approx(
        {0: 0.015, 1: 0.03, 2: 0.06, "lm_head": 0.03}
    )
    assert [layer for layer, scale in scales.items() if scale < original] == [0]
    noisy_ops.disable_noisy_ops()
