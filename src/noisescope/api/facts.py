"""What a report says of its run: model, data, settings, versions. No torch here."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from typing import Any

from noisescope import __version__
from noisescope.diagnosis.frame import Settings
from noisescope.diagnosis.report import SettingsFacts


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    found = {"noisescope": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "scipy"):
        found[name] = importlib.metadata.version(name)
    return found


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def ended() -> dict[str, Any]:
    """When and where a run came to its end."""
    return {"finished": now(), "versions": versions(), "host": platform.node()}


def settings_facts(settings: Settings) -> SettingsFacts:
    chosen = {**vars(settings), "perturbation": repr(settings.perturbation), "noise_scale": settings.scale}
    return SettingsFacts(**chosen)
