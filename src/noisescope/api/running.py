"""A prepared run carried out: trials settled here or on Ray, stored, and made into a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from noisescope.api.costs import Cost, estimate
from noisescope.api.facts import ended
from noisescope.diagnosis.frame import Frame
from noisescope.model import Subject
from noisescope.options.groups import ExecutionOptions
from noisescope.plans.migration import rank_places
from noisescope.reports.report import Report
from noisescope.runs.batches import Material
from noisescope.runs.bench import Bench
from noisescope.runs.execute import Executor, InProcess, Progress, Silent, settle
from noisescope.runs.store import Store


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
    about: dict[str, Any]  # for the report's `run`: what was asked
    notes: tuple[str, ...]

    def run(self, diagnosis: Any, options: ExecutionOptions) -> Report:
        """Settle all trials of a diagnosis (an object with propose and conclude) and build its report."""
        started = time.perf_counter()
        progress = progress_of(options)
        with Store(options.output) as store:
            if options.retry_failed:
                store.forget_failures()
            before = len(store)
            store.note(asked=self.about, **({} if options.repeat is None else {"command": options.repeat}))
            if self.frame.measure == "score":
                Bench(self.subject, self.materials).check_causal(self.frame.test[0])
            with self._executor(options) as (execute, cost):
                settle(lambda results: diagnosis.propose(self.frame, results), store, execute, progress)
                forwards, notes = cost()
            sections = diagnosis.conclude(self.frame, store, [*self.notes])
            if (sections.get("layer_analysis") or {}).get("layers"):
                sections["migration_plan"] = rank_places(sections)
            run = {
                **self.about,
                "cost": {
                    "seconds": time.perf_counter() - started,
                    "trials": len(store),
                    "trials_run_now": len(store) - before,
                    "forwards": forwards / sum(map(len, self.materials[0].encoded.sequences)),  # of the test data
                },
                "notes": notes,
                **ended(),
                "store": None if options.output is None else str(options.output),
            }
            report = Report({"schema_version": sections.pop("schema_version"), "run": run, **sections})
            if options.output is not None:
                store.note(report=report.data)  # `noisescope report` draws it again, without torch
        return report

    def _executor(self, options: ExecutionOptions) -> Any:
        if options.executor == "local":
            return _local(self.subject, self.materials, self.metric)
        from noisescope.runs.on_ray import on_ray

        return on_ray(self.subject, self.materials, self.metric, options)

    def cost(self, diagnosis: Any) -> Cost:
        """What a run would cost, from one timed forward."""
        with Bench(self.subject, self.materials, metric=self.metric) as bench:
            return estimate(bench, self.frame, diagnosis.propose)


class _local:
    """The executor of this process, as a context: it holds the model open."""

    def __init__(self, subject: Subject, materials: Iterable[Material], metric: Callable[..., Any] | None) -> None:
        self.bench = Bench(subject, materials, metric=metric)

    def __enter__(self) -> tuple[Executor, Callable[[], tuple[float, list[str]]]]:
        self.bench.__enter__()
        return InProcess(self.bench), lambda: (self.bench.forwards, list(self.bench.notes))

    def __exit__(self, *error: Any) -> None:
        self.bench.__exit__(*error)
