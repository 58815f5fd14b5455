"""noisescope: controlled noise as an oscilloscope for large language models.

Names that need torch are loaded when first used (PEP 562), so `import noisescope` and `noisescope --help` stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noisescope.errors import InvalidInput as InvalidInput
from noisescope.errors import NoisescopeError as NoisescopeError
from noisescope.errors import NothingInjected as NothingInjected
from noisescope.injection import Injection as Injection
from noisescope.sites import Site as Site

if TYPE_CHECKING:
    from noisescope.api import Options as Options
    from noisescope.api import compare as compare
    from noisescope.api import compare_runs as compare_runs
    from noisescope.api import diagnose as diagnose
    from noisescope.api import experiment as experiment
    from noisescope.api import gate as gate
    from noisescope.api import inspect as inspect
    from noisescope.api import load_report as load_report
    from noisescope.api import locate as locate
    from noisescope.api import passport as passport
    from noisescope.api import plan as plan
    from noisescope.api import record as record
    from noisescope.api import robustness as robustness
    from noisescope.data.dataset import read_data as read_data
    from noisescope.faults.simulator import faulty as faulty
    from noisescope.model.anatomy import dissect as dissect
    from noisescope.model.loading import Subject as Subject
    from noisescope.model.loading import load as load
    from noisescope.model.loading import wrap as wrap
    from noisescope.probe.capture import capture as capture
    from noisescope.probe.formats import Format as Format
    from noisescope.probe.inject import inject as inject
    from noisescope.probe.noise import Bias as Bias
    from noisescope.probe.noise import Gaussian as Gaussian
    from noisescope.probe.noise import Rounding as Rounding
    from noisescope.probe.noise import Shrink as Shrink
    from noisescope.probe.noise import Uniform as Uniform
    from noisescope.probe.watch import RecordedCall as RecordedCall
    from noisescope.probe.watch import watch as watch
    from noisescope.reports.saved_report import Report as Report

__version__ = "0.2.0"

_LAZY = {
    "api": (
        "Options", "compare", "compare_runs", "diagnose", "experiment", "gate", "inspect", "load_report", "locate",
        "passport", "plan", "record", "robustness",
    ),
    "data.dataset": ("read_data",),
    "faults.simulator": ("faulty",),
    "model.anatomy": ("dissect",),
    "model.loading": ("Subject", "load", "wrap"),
    "probe.capture": ("capture",),
    "probe.formats": ("Format",),
    "probe.inject": ("inject",),
    "probe.noise": ("Bias", "Gaussian", "Rounding", "Shrink", "Uniform"),
    "probe.watch": ("RecordedCall", "watch"),
    "reports.saved_report": ("Report",),
}  # fmt: skip
_HOMES = {name: f"noisescope.{home}" for home, names in _LAZY.items() for name in names}

__all__ = [*_HOMES, "Injection", "InvalidInput", "NoisescopeError", "NothingInjected", "Site", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
