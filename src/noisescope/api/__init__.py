"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet.

Each name is loaded when first used, with what it needs and no more: `compare` and `Options` import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescope.api.comparison import compare as compare
    from noisescope.api.diagnosis import diagnose as diagnose
    from noisescope.api.diagnosis import robustness as robustness
    from noisescope.api.experiments import phases as phases
    from noisescope.api.gates import gate as gate
    from noisescope.api.plan_trials import plan_smoothquant as plan_smoothquant
    from noisescope.api.plan_trials import verify_precision as verify_precision
    from noisescope.api.plans import plan_precision as plan_precision
    from noisescope.api.preparation import prepare as prepare
    from noisescope.api.preparation import prepare_diagnosis as prepare_diagnosis
    from noisescope.api.records import record as record
    from noisescope.api.records import save_activations as save_activations
    from noisescope.localization.locate import locate as locate
    from noisescope.options.groups import Options as Options

_LAZY = {
    "api.comparison": ("compare",),
    "api.diagnosis": ("diagnose", "robustness"),
    "api.experiments": ("phases",),
    "api.gates": ("gate",),
    "api.plan_trials": ("plan_smoothquant", "verify_precision"),
    "api.plans": ("plan_precision",),
    "api.preparation": ("prepare", "prepare_diagnosis"),
    "api.records": ("record", "save_activations"),
    "localization.locate": ("locate",),
    "options.groups": ("Options",),
}
_HOMES = {name: f"noisescope.{home}" for home, names in _LAZY.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
