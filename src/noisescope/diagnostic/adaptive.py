"""Adaptive quantisation noise of the original method notes: per-layer scales from a sensitivity profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from noisescope.anatomy import dissect
from noisescope.diagnostic.asking import model_of
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.training.adaptive import ruled
from noisescope.training.aqn import AQN, OperatorNoise, TrainingNoise, noise
from noisescope.training.schedules import Constant

UNKNOWN = 0.10  # sensitivity of a layer that the profile lacks: it gets the base scale


class AdaptiveAQN:
    """Noise that spares brittle layers: half the base scale above 0.15, twice below 0.05 (rule "methodology").

    sensitivity_profile maps a layer to its degradation, the share of the accuracy that noise there takes (not divided
    by the noise scale, or every layer would count as brittle). Noise falls on all products, forward and backward,
    wherever gradients are recorded.
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
        self.noise: TrainingNoise | None = None

    def get_layer_noise_scale(self, layer_id: int) -> float:
        """The absolute scale of a layer."""
        factor = ruled({layer_id: self.sensitivity_profile.get(layer_id, UNKNOWN)}, self.rule)[layer_id]
        return self.base_noise_scale * factor

    def enable_adaptive_noise(self, seed: int = 0) -> dict[int, float]:
        """Noise on, until disable_adaptive_noise(); returns the scale of each layer."""
        if self.noise is not None:
            raise InvalidInput("adaptive noise is on already: call disable_adaptive_noise() first")
        model = model_of(self.model)
        scales = {layer: self.get_layer_noise_scale(layer) for layer in range(len(dissect(model).blocks))}
        factors: dict[Any, float] = {layer: scale / self.base_noise_scale for layer, scale in scales.items()}
        scope = noise(model, AQN(OperatorNoise(), Constant(self.base_noise_scale), seed, factors))
        self.noise = scope.__enter__()
        return scales

    def disable_adaptive_noise(self) -> None:
        """Noise off; raises NothingInjected where none fell."""
        scope, self.noise = self.noise, None
        if scope is not None:
            scope.__exit__(None, None, None)
