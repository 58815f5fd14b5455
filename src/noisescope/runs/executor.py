"""Waves of trials: ask what is wanted, run what is not known yet, until nothing is wanted any more."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from noisescope.runs.runner import Finish, TrialRunner
from noisescope.runs.store import Store
from noisescope.trials import Result, Results, Trial, missing

Propose = Callable[[Results], Iterable[Trial]]


class Progress(Protocol):
    """Told of every wave and of every trial that ends."""

    def wave(self, trials: int) -> None: ...

    def step(self, trial: Trial, result: Result, seconds: float) -> None: ...


class Executor(Protocol):
    """Runs trials, each once, and stores every result the moment it is there."""

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None: ...


def settle(propose: Propose, store: Store, execute: Executor, progress: Progress) -> None:
    """Run waves until nothing more is proposed. Whatever the store holds is not run again."""
    while wanted := missing(propose(store), store):
        progress.wave(len(wanted))
        execute(wanted, store, progress)


class InProcess:
    """Runs trials on a bench in this process: slices outside, trials inside, for the clean prefix of one slice."""

    def __init__(self, runner: TrialRunner) -> None:
        self.runner = runner

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None:
        waiting: deque[Callable[[], None]] = deque()
        behind = 0 if self.runner.device.type == "cpu" else 1
        for trial in sorted(trials, key=slice_order):
            started = time.perf_counter()
            finish = self.runner.begin(trial)
            waiting.append(functools.partial(_keep, trial, finish, started, store, progress))
            if len(waiting) > behind:  # an accelerator works on this trial while the last one is put away
                waiting.popleft()()
        while waiting:
            waiting.popleft()()


def _keep(trial: Trial, finish: Finish, started: float, store: Store, progress: Progress) -> None:
    result = finish()
    seconds = time.perf_counter() - started
    store.put(trial, result, seconds)
    progress.step(trial, result, seconds)


def slice_order(trial: Trial) -> tuple[str, int]:
    """Trials of one slice together; the sort is stable, so they keep their order otherwise."""
    return (trial.slice.data, trial.slice.start)


class Silent:
    """Progress for nobody."""

    def wave(self, trials: int) -> None:
        return

    def step(self, trial: Trial, result: Result, seconds: float) -> None:
        return
