"""Training with noise: schedules, AQN, per-layer factors from a report, integrations, and the phases experiment.

Names are loaded on first use, so that code without torch (schedules, factors, verdicts) stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescope.training.aqn import AQN as AQN
    from noisescope.training.aqn import NormNoise as NormNoise
    from noisescope.training.aqn import OperatorNoise as OperatorNoise
    from noisescope.training.aqn import TrainingNoise as TrainingNoise
    from noisescope.training.aqn import gradient_pretest as gradient_pretest
    from noisescope.training.aqn import noise as noise
    from noisescope.training.lightning_callback import LightningNoiseCallback as LightningNoiseCallback
    from noisescope.training.schedules import Constant as Constant
    from noisescope.training.schedules import Cosine as Cosine
    from noisescope.training.schedules import Exponential as Exponential
    from noisescope.training.schedules import Linear as Linear
    from noisescope.training.schedules import Staged as Staged
    from noisescope.training.schedules import equalised as equalised
    from noisescope.training.schedules import from_report as from_report
    from noisescope.training.schedules import ruled as ruled
    from noisescope.training.trainer_callback import TrainingNoiseCallback as TrainingNoiseCallback

_LAZY = {
    "aqn": ("AQN", "NormNoise", "OperatorNoise", "TrainingNoise", "gradient_pretest", "noise"),
    "lightning_callback": ("LightningNoiseCallback",),
    "schedules": ("Constant", "Cosine", "Exponential", "Linear", "Staged", "equalised", "from_report", "ruled"),
    "trainer_callback": ("TrainingNoiseCallback",),
}
_HOMES = {name: f"noisescope.training.{home}" for home, names in _LAZY.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.training' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
