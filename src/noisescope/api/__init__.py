"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet.

Each name is loaded when first used, with what it needs and no more: `compare` and `Options` import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Options": "noisescope.options.groups",
    "compare": "noisescope.api.comparing",
    "diagnose": "noisescope.api.diagnosing",
    "gate": "noisescope.api.guarding",
    "locate": "noisescope.locators.locate",
    "phases": "noisescope.api.experimenting",
    "plan_precision": "noisescope.api.precision",
    "plan_smoothquant": "noisescope.api.smoothing",
    "prepare": "noisescope.api.preparing",
    "prepare_diagnosis": "noisescope.api.preparing",
    "put_to_the_test": "noisescope.api.diagnosing",
    "record": "noisescope.api.recording",
    "robustness": "noisescope.api.diagnosing",
    "save_activations": "noisescope.api.activations",
    "smooth_outliers": "noisescope.api.smoothing",
    "verify_precision": "noisescope.api.planning",
    "with_fault_located": "noisescope.api.diagnosing",
    "with_precision_planned": "noisescope.api.planning",
}
__all__ = list(_HOMES)

if TYPE_CHECKING:
    from noisescope.api.activations import save_activations as save_activations
    from noisescope.api.comparing import compare as compare
    from noisescope.api.diagnosing import diagnose as diagnose
    from noisescope.api.diagnosing import put_to_the_test as put_to_the_test
    from noisescope.api.diagnosing import robustness as robustness
    from noisescope.api.diagnosing import with_fault_located as with_fault_located
    from noisescope.api.experimenting import phases as phases
    from noisescope.api.guarding import gate as gate
    from noisescope.api.planning import verify_precision as verify_precision
    from noisescope.api.planning import with_precision_planned as with_precision_planned
    from noisescope.api.precision import plan_precision as plan_precision
    from noisescope.api.preparing import prepare as prepare
    from noisescope.api.preparing import prepare_diagnosis as prepare_diagnosis
    from noisescope.api.recording import record as record
    from noisescope.api.smoothing import plan_smoothquant as plan_smoothquant
    from noisescope.api.smoothing import smooth_outliers as smooth_outliers
    from noisescope.locators.locate import locate as locate
    from noisescope.options.groups import Options as Options


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
