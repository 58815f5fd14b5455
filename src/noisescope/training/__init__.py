"""Training with noise: schedules, AQN, per-layer factors from a report, integrations, and the experiment of phases.

Names are loaded when first used, so that what needs no torch (schedules, factors, verdicts) stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescope.training.aqn import AQN, NormNoise, OperatorNoise, TrainingNoise, noise
    from noisescope.training.layer_factors import equalised, from_report, ruled
    from noisescope.training.lightning_callback import LightningNoiseCallback
    from noisescope.training.phases import gradient_pretest
    from noisescope.training.schedules import Constant, Cosine, Exponential, Linear, Staged
    from noisescope.training.trainer_callback import TrainingNoiseCallback

_HOMES = {
    "aqn": ("AQN", "NormNoise", "OperatorNoise", "TrainingNoise", "noise"),
    "schedules": ("Constant", "Cosine", "Exponential", "Linear", "Staged"),
    "layer_factors": ("equalised", "from_report", "ruled"),
    "trainer_callback": ("TrainingNoiseCallback",),
    "lightning_callback": ("LightningNoiseCallback",),
    "phases": ("gradient_pretest",),
}

__all__ = [
    "AQN", "Constant", "Cosine", "Exponential", "LightningNoiseCallback", "Linear", "NormNoise", "OperatorNoise",
    "Staged", "TrainingNoise", "TrainingNoiseCallback", "equalised", "from_report", "gradient_pretest", "noise",
    "ruled",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'noisescope.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"noisescope.training.{home}"), name)


def __dir__() -> list[str]:
    return __all__
