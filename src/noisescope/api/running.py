"""A prepared question carried out: trials settled here or on Ray, stored, and concluded from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from noisescope.api.costs import Cost, estimate
from noisescope.api.facts import ended
from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.report import Asked, Run
from noisescope.diagnosis.report import Cost as RunCost
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.options.groups import ExecutionOptions
from noisescope.runs.batches import Material
from noisescope.runs.bench import Bench
from noisescope.runs.execute import Executor, InProcess, Progress, Silent, settle
from noisescope.runs.store import Store
from noisescope.trials import Results, Trial

C = TypeVar("C", covariant=True)


class Question(Protocol[C]):
    """A pure pair: the trials wanted now ([] means done), and what their results say."""

    def propose(self, frame: Frame, results: Results) -> list[Trial]: ...

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> C: ...


def progress_of(options: ExecutionOptions) -> Progress:
    progress: Any = options.progress
    return Silent() if progress is None else progress


@dataclass(frozen=True)
class Prepared:
    """A frame with the material to measure it on."""

    subject: Subject
    frame: Frame
    materials: tuple[Material, ...]
    metric: Callable[..., Any] | None
    asked: Asked
    notes: tuple[str, ...]

    def run(self, question: Question[C], options: ExecutionOptions) -> tuple[Run, C]:
        """Settle all trials of a question; the facts of the run, and what the question concludes."""
        started = time.perf_counter()
        progress = progress_of(options)
        with Store(options.output) as store:
            if options.retry_failed:
                store.forget_failures()
            before = len(store)
            store.note(asked=to_json(self.asked), **({} if options.repeat is None else {"command": options.repeat}))
            if self.frame.measure == "score":
                Bench(self.subject, self.materials).check_causal(self.frame.test[0])
            with self._executor(options) as (execute, cost):
                settle(lambda results: question.propose(self.frame, results), store, execute, progress)
                forwards, notes = cost()
            found = question.conclude(self.frame, store, self.notes)
            spent = RunCost(
                seconds=time.perf_counter() - started,
                trials=len(store),
                trials_run_now=len(store) - before,
                forwards=forwards / sum(map(len, self.materials[0].encoded.sequences)),
            )
            run = Run(
                **vars(self.asked),
                cost=spent,
                notes=(*store.damage(), *notes),
                **ended(),
                store=None if options.output is None else str(options.output),
            )
        return run, found

    def _executor(self, options: ExecutionOptions) -> Any:
        if options.executor == "local":
            return _local(self.subject, self.materials, self.metric)
        from noisescope.runs.on_ray import on_ray

        return on_ray(self.subject, self.materials, self.metric, options)

    def cost(self, question: Question[Any]) -> Cost:
        """What a run would cost, from one timed forward."""
        with Bench(self.subject, self.materials, metric=self.metric) as bench:
            return estimate(bench, self.frame, question.propose)


@contextmanager
def _local(
    subject: Subject, materials: Iterable[Material], metric: Callable[..., Any] | None
) -> Iterator[tuple[Executor, Callable[[], tuple[float, list[str]]]]]:
    """The executor of this process, as a context: it holds the model open."""
    with Bench(subject, materials, metric=metric) as bench:
        yield InProcess(bench), lambda: (bench.forwards, list(bench.notes))
