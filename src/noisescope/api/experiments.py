"""The experiment of phases wired together: the bundled model's problems, the store, processes, verdicts, a report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisescope import progress
from noisescope.api.preparation import progress_of
from noisescope.api.reports import end_facts
from noisescope.atomic_write import folder_inside
from noisescope.demo.experiment_tasks import Arithmetic, arithmetic, practice
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.model.loading import load
from noisescope.options.base import takes_options
from noisescope.options.experiment_and_run_commands import PhasesOptions
from noisescope.options.shared import ExecutionOptions
from noisescope.reports import experiment as report_rows
from noisescope.reports.experiment import PhasesReport as PhasesReport
from noisescope.reports.experiment import PhasesRequest, PhasesResult, PhasesRun, TrainingSettings
from noisescope.runs.store import Store
from noisescope.sites import Place
from noisescope.training import schedules
from noisescope.training.criteria import criteria, theory
from noisescope.training.hypotheses import UNMEASURABLE, CurvePoint, Outcome, arm_row, judge
from noisescope.training.phases_experiment import Arm, Design, Job, rounding
from noisescope.training.trial_processes import check_device, run_all
from noisescope.trials import Result, content_id

PROFILED = 100  # samples of the screen that gives an adaptive arm its factors


@takes_options(PhasesOptions)
def phases(options: PhasesOptions) -> PhasesReport:
    """Train the bundled model's task under several kinds of noise, and ask each trained model under noise.

    What is done is kept in `output`; the same call goes on from there, also after `seconds` were up. Nothing is kept
    without a folder. A script that asks for several `workers` must do so under `if __name__ == "__main__":`.
    """
    training = options.pick("steps", "batch", "rate", "examples", "layers", "width")
    make_task = arithmetic
    if options.method == "grpo":
        import noisescope.training.grpo  # noqa: F401  without TRL this raises here, not once for each training

        make_task = practice
    task = make_task(options.start, tests=options.samples, **training)
    chosen = tuple(Arm.of(text, options.noise_scale) for text in options.arms)
    started = time.time()
    with Store(options.output) as store, _work_folder(options.output) as folder:
        if options.resumes is not None:
            store.mend()
        if options.retry_failed:
            store.forget_failures()
        design = Design(
            task=task,
            arms=chosen,
            seeds=tuple(range(options.seeds)),
            levels=options.noise_levels,
            noise_seeds=options.noise_seeds,
            operators=frozenset(options.operators),
            factors=_factors(task, store) if any(arm.kind == "adaptive" for arm in chosen) else {},
            device=options.device,
        )
        about = _asked(design, options.noise_scale, options.start)
        store.note(asked=to_json(about), **({} if options.repeat is None else {"command": options.repeat}))
        _settle(
            design, store, folder, options, deadline=math.inf if options.seconds is None else started + options.seconds
        )
        kept = store.counts()
        cost = report_rows.PhasesCost(time.time() - started, kept.seconds, kept.trials)
        ended = end_facts(options.output, full_paths=options.full_paths)
        del ended["store"]
        run = PhasesRun(**vars(about), cost=cost, notes=tuple(store.damage()), **ended)
        with store.interpreting():
            report = PhasesReport(conclude(design, store, options.noise_scale, run=run))
        if options.output is not None:
            store.note(report=report.data)
    return report


def _settle(design: Design, store: Store, folder: Path, options: ExecutionOptions, *, deadline: float) -> None:
    """Train what the store does not have."""
    wanted = [(trial, arm, seed) for trial, arm, seed in design.trials() if trial.id not in store]
    if not wanted:
        return  # a report of what is there needs no device
    if options.executor == "local":
        check_device(design.device)
    own, workers = progress_of(options), options.workers
    own.wave(len(wanted))
    progress.begin("problems")
    task: Any = design.task
    cache = folder / f"problems-{content_id([task.settings.examples, task.settings.tests])[:12]}.npz"
    task.prepare(cache, workers=workers)
    jobs = [
        Job(design, arm, seed, cache, folder / f"{trial.id[:16]}.checkpoint", deadline) for trial, arm, seed in wanted
    ]
    ended = run_all(jobs, workers=workers, executor=options.executor, address=options.address)
    with progress.plan(progress.Phase("trainings", len(jobs))):
        for job, result, seconds in progress.track("trainings", ended, steps=len(jobs)):
            if result is not None:
                trial = design.trial(job.arm, job.seed)
                store.put(trial, result, seconds)
                own.step(trial, result, seconds)


def conclude(design: Design, store: Store, scale: float, *, run: PhasesRun) -> PhasesResult:
    """The report from what is in the store."""
    found: dict[str, dict[int, Outcome]] = {str(arm): {} for arm in design.arms}
    failures: list[str] = []
    missing = 0
    for trial, arm, seed in design.trials():
        result = store.get(trial.id)
        if result is None:
            missing += 1
        elif result.failed:
            failures.append(f"{arm}, seed {seed}: {result.error}")
        else:
            found[str(arm)][seed] = outcome(result, design.levels)
    hypotheses = judge(criteria(design.arms, design.levels, scale), found)
    trained = sum(map(len, found.values()))
    arms = [arm_row(name, runs, design.levels) for name, runs in found.items() if runs]
    notes = [f"failed: {failure}" for failure in failures]
    notes += [f"{row.name}: {row.estimate.note}" for row in hypotheses if row.verdict == UNMEASURABLE]
    notes += [note for arm in design.arms if (note := rounding(design, arm))]
    if missing:
        notes.append(f"{missing} of {len(design.trials())} trainings are not done yet: run the same command again")
    return PhasesResult(
        run=run,
        arms=tuple(arms),
        seeds=tuple(design.seeds),
        n=design.task.samples,
        levels=tuple(design.levels),
        trained=report_rows.Trained(trained, len(failures), len(design.trials())),
        hypotheses=tuple(hypotheses),
        theory=theory(hypotheses),
        could_not_see=tuple(notes),
    )


def outcome(result: Result, levels: Sequence[float]) -> Outcome:
    """A stored row as the statistics need it."""
    columns: dict[float, list[tuple[float | None, ...]]] = {level: [] for level in levels}
    for name, values in result.values.items():
        from_each = np.abs(np.asarray(levels) - float(name.partition("/")[0]))
        columns[levels[int(from_each.argmin())]].append(values)  # older stores have the first six digits only
    answers = {level: np.asarray(values, dtype=np.float64).T for level, values in columns.items()}
    curve = [CurvePoint(point["step"], point["gradient_norm"], point["held_out"]) for point in result.facts["curve"]]
    return Outcome(answers, curve, result.facts["training_injections"])


def _factors(task: Arithmetic, store: Store) -> dict[Place, float]:
    """Of each layer of the bundled model, by its predicted KL; kept in the store, for a trial's id holds them."""
    from noisescope.api.diagnosis import diagnose

    known = store.fact("factors")
    if known is None:
        report = diagnose(load("demo"), effort="screen", level="layer", samples=PROFILED)
        known = {str(layer): factor for layer, factor in schedules.from_report(report).items()}
        store.note(factors=known)
    if task.start == "scratch" and len(known) != task.settings.layers:
        raise InvalidInput(
            f"an adaptive arm takes its factors from the bundled model of {len(known)} layers, and the model to train "
            f"has {task.settings.layers}: train one of {len(known)}, or leave the arm out"
        )
    return {int(layer): factor for layer, factor in known.items()}


@contextlib.contextmanager
def _work_folder(output: str | Path | None) -> Iterator[Path]:
    """Where training problems and checkpoints lie: what can be made again, apart from the store."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="noisescope-") as name:
            yield Path(name)
        return
    yield folder_inside(Path(output), "work")


def _asked(design: Design, scale: float, start: str) -> PhasesRequest:
    task: Any = design.task
    details = dataclasses.asdict(task)
    settings = {**details.pop("settings"), **details}
    named = {field.name: settings.pop(field.name, None) for field in dataclasses.fields(TrainingSettings)}
    return PhasesRequest(
        model=report_rows.TaskSource(
            "the bundled model, trained on" if start == "bundled" else "a new model, from scratch"
        ),
        data=report_rows.ProblemSource(task.data_name(), task.samples),
        settings=report_rows.PhasesSettings(
            arms=tuple(str(arm) for arm in design.arms),
            seeds=len(design.seeds),
            noise_scale=scale,
            noise_levels=tuple(design.levels),
            noise_seeds=design.noise_seeds,
            operators=tuple(sorted(design.operators)),
            factors={str(layer): factor for layer, factor in design.factors.items()},
            training=TrainingSettings(**{**named, "method": task.method, "others": settings}),
        ),
        device=design.device,
    )
