"""The public questions: where measuring (torch, no why) and interpreting (why, no torch) meet.

Each name and each module is loaded when first used, with what it needs and no more: `compare` and `Options` import no
torch. The command line calls `api.reports.load_report(...)` and imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescope.api import comparison as comparison
    from noisescope.api import defaults as defaults
    from noisescope.api import diagnosis as diagnosis
    from noisescope.api import experiment as experiment
    from noisescope.api import fault_tests as fault_tests
    from noisescope.api import gates as gates
    from noisescope.api import inspection as inspection
    from noisescope.api import locate_simulated as locate_simulated
    from noisescope.api import plan as plan
    from noisescope.api import plan_trials as plan_trials
    from noisescope.api import plans as plans
    from noisescope.api import preparation as preparation
    from noisescope.api import records as records
    from noisescope.api import reports as reports
    from noisescope.api import roundoff as roundoff
    from noisescope.api import systems as systems
    from noisescope.api.comparison import compare as compare
    from noisescope.api.comparison import passport as passport
    from noisescope.api.diagnosis import diagnose as diagnose
    from noisescope.api.diagnosis import robustness as robustness
    from noisescope.api.experiment import phases as phases
    from noisescope.api.gates import gate as gate
    from noisescope.api.inspection import inspect as inspect
    from noisescope.api.plan_trials import plan_smoothquant as plan_smoothquant
    from noisescope.api.plan_trials import verify_kv_cache as verify_kv_cache
    from noisescope.api.plan_trials import verify_precision as verify_precision
    from noisescope.api.plans import plan_precision as plan_precision
    from noisescope.api.preparation import prepare as prepare
    from noisescope.api.preparation import prepare_diagnosis as prepare_diagnosis
    from noisescope.api.records import record as record
    from noisescope.api.records import save_activations as save_activations
    from noisescope.api.reports import compare_runs as compare_runs
    from noisescope.api.reports import load_report as load_report
    from noisescope.localization.locate import locate as locate
    from noisescope.options.shared import Options as Options

_LAZY = {
    "api.comparison": ("compare", "passport"),
    "api.defaults": (),
    "api.diagnosis": ("diagnose", "robustness"),
    "api.experiment": ("phases",),
    "api.fault_tests": (),
    "api.gates": ("gate",),
    "api.inspection": ("inspect",),
    "api.locate_simulated": (),
    "api.plan": (),
    "api.plan_trials": ("plan_smoothquant", "verify_kv_cache", "verify_precision"),
    "api.plans": ("plan_precision",),
    "api.preparation": ("prepare", "prepare_diagnosis"),
    "api.records": ("record", "save_activations"),
    "api.reports": ("compare_runs", "load_report"),
    "api.roundoff": (),
    "api.systems": (),
    "localization.locate": ("locate",),
    "options.shared": ("Options",),
}
_HOMES = {name: f"noisescope.{home}" for home, names in _LAZY.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if f"api.{name}" in _LAZY:
        return importlib.import_module(f"noisescope.api.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
