"""What a trial is for, in a word or two: the phases that progress names."""

from __future__ import annotations

from noisescope.diagnosis.context import StudyContext
from noisescope.trials import Trial

CLEAN = "clean model"
_MEASURES = {
    "screen": "screen",
    "capture": "channel statistics",
    "curvature": "curvature",
    "gradients": "gradients",
    "formats": "number formats",
}


def phase_of(trial: Trial, context: StudyContext, noisy: str | None = None) -> str:
    """The phase of a trial; `noisy` names all those that inject, for a question of one phase."""
    if trial.measure in _MEASURES:
        return _MEASURES[trial.measure]
    injection = trial.injection
    if injection is None:
        return CLEAN
    if noisy is not None:
        return noisy
    if injection.channels is not None:
        return "channels"
    if getattr(injection.perturbation, "scale", None) != context.settings.scale:
        return "noise levels"
    if injection.layers is not None:
        return "layers"
    if injection.places is not None:
        inside = any(isinstance(place, int) for place in injection.places)
        return "layer x operator cells" if inside else "layers"
    return "operators"
