"""What a run would cost, estimated before it starts: forwards, seconds, memory.

The diagnosis is simulated with made-up results, so its adaptive parts are counted by the very code that will propose
them; one real forward gives the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisescope.diagnosis.context import StudyContext
from noisescope.probe.prefix import first_noisy_block
from noisescope.runs.trial_runner import TrialRunner
from noisescope.trials import Result, Results, Trial, missing

_HESSIAN = 6.0  # forwards that one Hessian-vector product costs (a backward through a backward)
_COMPARING = 1.15  # scoring logits against the clean ones, and opening the scope


@dataclass(frozen=True)
class Cost:
    """Forwards are of the whole test data; memory is in bytes."""

    trials: int
    forwards: float
    seconds: float
    memory: int
    weights: int

    def __str__(self) -> str:
        return (
            f"{self.trials} trials, about {self.forwards:.0f} forwards of the test data, "
            f"about {_duration(self.seconds)}, about {self.memory / 2**30:.1f} GiB "
            f"({self.weights / 2**30:.1f} of weights)"
        )


def estimate(
    runner: TrialRunner, context: StudyContext, propose: Callable[[StudyContext, Results], Iterable[Trial]]
) -> Cost:
    """Play the diagnosis through; time one slice."""
    part = context.test[0]
    runner.clean(part)  # warm up: kernels, tape, the prefix check
    runner.forget_slice()
    started = time.perf_counter()
    clean = runner.clean(part)
    float(clean.logits[0][0].flatten()[0])  # waits for the device
    per_sample = (time.perf_counter() - started) / (part.stop - part.start)
    known: dict[str, Result] = {}
    effort = 0.0  # in forwards of one sample
    while wanted := missing(propose(context, known), known):
        for trial in wanted:
            known[trial.id] = _made_up(context, trial)
            effort += _forwards(runner, context, trial) * (trial.slice.stop - trial.slice.start)
    total = sum(s.stop - s.start for s in context.test)
    weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
    logits = sum(x.numel() * x.element_size() for pieces in clean.logits for x in pieces)
    hidden = runner.prefix.kept_bytes()
    return Cost(
        len(known), effort / total, effort * per_sample * _COMPARING, weights + 2 * logits + 2 * hidden, weights
    )


def _forwards(runner: TrialRunner, context: StudyContext, trial: Trial) -> float:
    """Full forwards a trial costs each of its samples."""
    if trial.measure == "screen":
        return 1.5 + 1.2 * float(trial.settings["draws"])  # attention is decomposed everywhere
    if trial.measure == "curvature":
        return _HESSIAN * float(trial.settings["probes"])
    if trial.measure == "formats":  # one more product of every linear for each format
        return 1.0 + float(trial.settings["draws"]) * (1.0 + len(trial.settings["formats"]))
    if trial.measure == "gradients":
        return 3.0
    if trial.measure == "generate":
        return 8.0  # short answers; long ones cost more
    if trial.injection is None or trial.measure != "score" or not runner.reuse:
        return 1.0
    return 1 - first_noisy_block(trial.injection, runner.anatomy) / (context.blocks + 1)


def _made_up(context: StudyContext, trial: Trial) -> Result:
    """A result with which the diagnosis asks for as much as it ever may: noise always costs half the accuracy."""
    count = trial.slice.stop - trial.slice.start
    if trial.measure in ("score", "generate", "custom"):
        accuracy = 1.0 if trial.injection is None else 0.5
        values: dict[str, Any] = {context.metric: (accuracy,) * count}
        if trial.measure == "score":
            values |= {"kl": (1e-3,) * count, "nonfinite": (0.0,) * count}
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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
