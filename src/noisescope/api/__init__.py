"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet.

Each name is loaded when first used, with what it needs and no more: `compare` and `Options` import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Options": "noisescope.options.groups",
    "compare": "noisescope.api.comparison",
    "diagnose": "noisescope.api.diagnosis",
    "gate": "noisescope.api.gates",
    "locate": "noisescope.localization.locate",
    "phases": "noisescope.api.experiments",
    "plan_precision": "noisescope.api.plans",
    "plan_smoothquant": "noisescope.api.plan_trials",
    "prepare": "noisescope.api.preparation",
    "prepare_diagnosis": "noisescope.api.preparation",
    "put_to_the_test": "noisescope.api.diagnosis",
    "record": "noisescope.api.records",
    "robustness": "noisescope.api.diagnosis",
    "save_activations": "noisescope.api.records",
    "smooth_outliers": "noisescope.api.plan_trials",
    "verify_precision": "noisescope.api.plan_trials",
    "with_fault_located": "noisescope.api.diagnosis",
    "with_precision_planned": "noisescope.api.plan_trials",
}
__all__ = list(_HOMES)

if TYPE_CHECKING:
    from noisescope.api.comparison import compare as compare
    from noisescope.api.diagnosis import check_findings as check_findings
    from noisescope.api.diagnosis import diagnose as diagnose
    from noisescope.api.diagnosis import robustness as robustness
    from noisescope.api.diagnosis import with_fault_located as with_fault_located
    from noisescope.api.experiments import phases as phases
    from noisescope.api.gates import gate as gate
    from noisescope.api.plan_trials import plan_smoothquant as plan_smoothquant
    from noisescope.api.plan_trials import smooth_outliers as smooth_outliers
    from noisescope.api.plan_trials import verify_precision as verify_precision
    from noisescope.api.plan_trials import with_precision_planned as with_precision_planned
    from noisescope.api.plans import plan_precision as plan_precision
    from noisescope.api.preparation import prepare as prepare
    from noisescope.api.preparation import prepare_diagnosis as prepare_diagnosis
    from noisescope.api.records import record as record
    from noisescope.api.records import save_activations as save_activations
    from noisescope.localization.locate import locate as locate
    from noisescope.options.groups import Options as Options


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
