"""What a run would cost, estimated before it starts (forwards, seconds, memory), and its progress by phases.

The diagnosis is simulated with made-up results, so its adaptive parts are counted by the very code that will propose
them; one real sample gives the time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noisescope import progress
from noisescope.diagnosis.context import StudyContext
from noisescope.errors import InvalidInput
from noisescope.model.anatomy import Anatomy
from noisescope.probe.prefix import first_noisy_block
from noisescope.progress import duration
from noisescope.runs.batches import free_memory
from noisescope.runs.measures import HESSIAN_PASSES
from noisescope.runs.trial_runner import Clean, TrialRunner
from noisescope.trials import Result, Results, Slice, Trial, missing

_COMPARING = 1.15  # scoring logits against the clean ones, and opening the scope
_TIMING = 3.0  # seconds that timing may take beyond the first sample
Propose = Callable[[StudyContext, Results], Iterable[Trial]]


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that a question may ask for. `work` is in forwards of one sample."""

    trial: Trial
    work: float


@dataclass(frozen=True)
class SampleCost:
    """What one sample of typical length costs, measured. Memory is in bytes."""

    seconds: float  # of a forward
    generating: float  # how many times that an answer takes; 0 where nothing is generated
    logits: int
    hidden: int  # block outputs kept for other trials
    weights: int

    def forwards(self, trial: Trial) -> float:
        return self.generating if trial.measure == "generate" else 1.0


@dataclass(frozen=True)
class Cost:
    """Forwards are of the whole test data; memory is in bytes."""

    trials: int
    forwards: float
    seconds: float
    memory: int
    weights: int
    available: int | None = None

    def __str__(self) -> str:
        room = "" if self.available is None else f"; {self.available / 2**30:.1f} GiB are available"
        return (
            f"{self.trials} trials, about {self.forwards:.0f} forwards of the test data, "
            f"about {duration(self.seconds)}, about {self.memory / 2**30:.1f} GiB "
            f"({self.weights / 2**30:.1f} of weights{room})"
        )


def plan_trials(context: StudyContext, propose: Propose, anatomy: Anatomy, *, reuse: bool = True) -> list[PlannedTrial]:
    """All trials that a question asks for, played through with made-up results: as many as it may ever need."""
    known: dict[str, Result] = {}
    planned = []
    while wanted := missing(propose(context, known), known):
        for trial in wanted:
            known[trial.id] = _made_up(context, trial)
            work = _forwards(context, trial, anatomy, reuse=reuse)
            planned.append(PlannedTrial(trial, work * (trial.slice.stop - trial.slice.start)))
    return planned


def time_sample(runner: TrialRunner, context: StudyContext) -> SampleCost:
    """Time one sample of typical length, after a first run that warms up kernels and caches.

    Of a small model a batch takes hardly longer than a sample: where that is quick, as many are timed as run together.
    """
    part, first = _typical(runner, context), context.test[0]
    runner.clean(part)
    seconds, clean = _timed(runner, part)
    many = min(first.stop - first.start, int(_TIMING / seconds))
    if many > 1:
        seconds = _timed(runner, replace(first, stop=first.start + many))[0] / many
        runner.clean(part)
    generating = 0.0
    if context.measure == "generate":
        started = time.perf_counter()
        answered = runner.run(Trial(context.conditions, "generate", part, None, context.measure_settings))
        if answered.failed:
            raise InvalidInput(f"a sample can't be answered by generation: {answered.error}")
        generating = (time.perf_counter() - started) / seconds
    return SampleCost(
        seconds=seconds,
        generating=generating,
        logits=sum(x.numel() * x.element_size() for pieces in clean.logits for x in pieces),
        hidden=runner.prefix.kept_bytes(),
        weights=sum(p.numel() * p.element_size() for p in runner.model.parameters()),
    )


def _timed(runner: TrialRunner, part: Slice) -> tuple[float, Clean]:
    """Seconds of a clean forward of a slice, and what it gave."""
    runner.forget_slice()
    started = time.perf_counter()
    clean = runner.clean(part)
    float(clean.logits[0][0].flatten()[0])  # waits for the device
    return time.perf_counter() - started, clean


def _typical(runner: TrialRunner, context: StudyContext) -> Slice:
    """The sample whose length is nearest to the mean."""
    part = context.test[0]
    lengths = np.array([len(group[0].ids) for group in runner.materials[part.data].groups(part)])
    at = part.start + int(np.abs(lengths - lengths.mean()).argmin())
    return replace(part, start=at, stop=at + 1)


def cost_of(planned: Sequence[PlannedTrial], context: StudyContext, sample: SampleCost) -> Cost:
    """What planned trials cost at the speed of one timed sample."""
    work = sum(one.work * sample.forwards(one.trial) for one in planned)
    total = context.test[-1].stop
    together = max(part.stop - part.start for part in context.test)
    return Cost(
        trials=len(planned),
        forwards=work / total,
        seconds=work * sample.seconds * _COMPARING,
        memory=sample.weights + 2 * together * (sample.logits + sample.hidden),
        weights=sample.weights,
    )


def estimate(runner: TrialRunner, context: StudyContext, propose: Propose) -> Cost:
    """Play the diagnosis through; time one sample."""
    sample = time_sample(runner, context)
    planned = plan_trials(context, propose, runner.anatomy, reuse=bool(runner.reuse))
    return replace(cost_of(planned, context, sample), available=free_memory(runner.device))


def _forwards(context: StudyContext, trial: Trial, anatomy: Anatomy, *, reuse: bool) -> float:
    """Full forwards a trial costs each of its samples."""
    if trial.measure == "screen":
        return 1.5 + 2.4 * float(trial.settings["draws"])  # attention is decomposed everywhere, blocks run twice
    if trial.measure == "curvature":
        return HESSIAN_PASSES * float(trial.settings["probes"])
    if trial.measure == "formats":  # one more product of every linear for each format
        return 1.0 + float(trial.settings["draws"]) * (2.0 + len(trial.settings["formats"]))
    if trial.measure == "format_slopes":
        return 4.0
    if trial.measure == "gradients":
        return 4.0
    if trial.injection is None or trial.measure != "score" or not reuse:
        return 1.0
    return 1 - first_noisy_block(trial.injection, anatomy) / (context.blocks + 1)


def _made_up(context: StudyContext, trial: Trial) -> Result:
    """A result with which the diagnosis asks for as much as it ever may: noise always costs half the accuracy."""
    count = trial.slice.stop - trial.slice.start
    if trial.measure in ("score", "generate", "custom"):
        accuracy = 1.0 if trial.injection is None else 0.5
        values: dict[str, Any] = {context.metric: (accuracy,) * count}
        if trial.measure == "score":
            values |= {"kl": (1e-3,) * count, "nonfinite": (0.0,) * count, "nll": (1.0 - accuracy,) * count}
        return Result(tuple(range(count)), values)
    if trial.measure in ("screen", "format_screen"):
        facts = [
            {"operator": s.operator, "place": s.place, "module": s.module, "component": s.component, "occurrence": 0}
            for s in context.default_sites
        ]
        arrays = {
            "sums": np.ones((len(facts), count)),
            "tokens": np.ones(count),
            "channels": np.ones(32 * len(facts), dtype=np.float32),
        }
        return Result(tuple(range(count)), {}, {"sites": [{**f, "channels": 32} for f in facts], "lost": []}, arrays)
    return Result(error="not run")


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
