"""Run waves of trials: ask which are wanted, run those without a result, until none is wanted any more."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from noisescope.runs.store import Store
from noisescope.runs.trial_runner import Finish, TrialRunner
from noisescope.trials import Result, Results, Trial, missing


class Progress(Protocol):
    """Called at the start of every wave and at the end of every trial."""

    def wave(self, trials: int) -> None: ...
    def step(self, trial: Trial, result: Result, seconds: float) -> None: ...


class NoProgress:
    """A Progress that shows nothing."""

    def wave(self, trials: int) -> None: ...
    def step(self, trial: Trial, result: Result, seconds: float) -> None: ...


class Executor(Protocol):
    """Runs trials, each once, and stores every result the moment it is there."""

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None: ...


def run_waves(
    propose: Callable[[Results], Iterable[Trial]], store: Store, execute: Executor, progress: Progress
) -> None:
    """Run waves until nothing more is proposed. Whatever the store holds is not run again."""
    while wanted := missing(propose(store), store):
        progress.wave(len(wanted))
        execute(wanted, store, progress)


@dataclass(frozen=True)
class LocalExecutor:
    """Runs trials in this process, slice by slice: the runner keeps the clean prefix of one slice at a time."""

    runner: TrialRunner

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None:
        waiting: deque[Callable[[], None]] = deque()
        behind = 0 if self.runner.device.type == "cpu" else 1
        for trial in sorted(trials, key=lambda trial: (trial.slice.data, trial.slice.start)):  # stable within a slice
            started = time.perf_counter()
            waiting.append(functools.partial(_store, trial, self.runner.begin(trial), started, store, progress))
            if len(waiting) > behind:  # an accelerator works on this trial while the last one is put away
                waiting.popleft()()
        while waiting:
            waiting.popleft()()


def _store(trial: Trial, finish: Finish, started: float, store: Store, progress: Progress) -> None:
    result = finish()
    seconds = time.perf_counter() - started
    store.put(trial, result, seconds)
    progress.step(trial, result, seconds)
