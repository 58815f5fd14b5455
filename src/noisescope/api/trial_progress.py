"""Progress of trials: the plan of a question by phases, made before it runs, and each trial as a step of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from noisescope import progress
from noisescope.api.run_cost import PlannedTrial
from noisescope.diagnosis.context import StudyContext
from noisescope.trials import Result, Results, Trial

CLEAN = "clean model"
_MEASURES = {
    "screen": "screen",
    "capture": "channel statistics",
    "curvature": "curvature",
    "gradients": "gradients",
    "formats": "number formats",
}


class TrialProgress:
    """Tells listeners, and the caller's own object with `wave` and `step`, what trials run."""

    def __init__(self, context: StudyContext, planned: Iterable[PlannedTrial], own: Any, noisy: str | None) -> None:
        self.context, self.own, self.noisy = context, own, noisy
        self.planned = tuple(planned)
        self._work = {one.trial.id: one.work for one in self.planned}

    @contextmanager
    def following(self, known: Results) -> Iterator[TrialProgress]:
        """Inside, the trials without a result are worked through."""
        steps: dict[str, int] = defaultdict(int)
        work: dict[str, float] = defaultdict(float)
        for one in self.planned:
            if one.trial.id not in known:
                steps[self._name(one.trial)] += 1
                work[self._name(one.trial)] += one.work
        with progress.plan(*(progress.Phase(name, steps[name], work[name]) for name in steps)):
            yield self

    def wave(self, trials: int) -> None:
        self.own.wave(trials)

    def start(self, trial: Trial) -> None:
        self.own.start(trial)
        progress.begin(self._name(trial))

    def step(self, trial: Trial, result: Result, seconds: float) -> None:
        self.own.step(trial, result, seconds)
        progress.step(self._name(trial), self._work.get(trial.id))

    def _name(self, trial: Trial) -> str:
        return phase_of(trial, self.context, self.noisy)


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
