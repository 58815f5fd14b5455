"""Adaptive quantisation noise of the original method notes: per-layer scales from a sensitivity profile."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from noisescope import noisy_ops
from noisescope.diagnostic.asking import model_of
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.training.adaptive import ruled

UNKNOWN = 0.10  # sensitivity of a layer that the profile lacks: it gets the base scale


class AdaptiveAQN:
    """Noise that spares brittle layers: half the base scale above 0.15, twice below 0.05 (rule "methodology").

    sensitivity_profile maps a layer to its degradation, the share of the accuracy that noise there takes (not divided
    by the noise scale, or every layer would count as brittle). Noise is that of `noisescope.noisy_ops`, whose counts,
    phases and selections therefore apply: on all products, forward and backward, wherever gradients are recorded.
    """

    def __init__(
        self,
        model: Subject | nn.Module,
        sensitivity_profile: Mapping[int, float],
        *,
        base_noise_scale: float = 0.05,
        rule: str = "methodology",
    ) -> None:
        self.model = model
        self.sensitivity_profile = dict(sensitivity_profile)
        self.base_noise_scale = base_noise_scale
        self.rule = rule
        self._on = False

    def get_layer_noise_scale(self, layer_id: int) -> float:
        """The absolute scale of a layer."""
        factor = ruled({layer_id: self.sensitivity_profile.get(layer_id, UNKNOWN)}, self.rule)[layer_id]
        return self.base_noise_scale * factor

    def enable_adaptive_noise(self, seed: int = 0) -> dict[int, float]:
        """Noise on, until disable_adaptive_noise(); returns the scale of each layer."""
        if self._on and noisy_ops.is_enabled():
            raise InvalidInput("adaptive noise is on already: call disable_adaptive_noise() first")
        blocks = noisy_ops.register_layer_hooks(model_of(self.model))
        scales = {layer: self.get_layer_noise_scale(layer) for layer in range(blocks)}
        noisy_ops.set_per_layer_scales(scales)
        noisy_ops.set_training_only(True)
        noisy_ops.enable_noisy_ops(error_scale=self.base_noise_scale, seed=seed)
        self._on = True
        return scales

    def disable_adaptive_noise(self) -> None:
        """Noise off, and scales as they are at first; raises NothingInjected where none fell."""
        if not self._on:
            return
        self._on = False
        try:
            noisy_ops.disable_noisy_ops()
        finally:
            noisy_ops.set_per_layer_scales(None)
            noisy_ops.set_training_only(False)
