"""`ns.experiment`: the experiment of phases wired together (tasks, the store, processes, verdicts, a report)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisescope import progress
from noisescope.api.preparation import progress_of
from noisescope.api.reports import end_facts
from noisescope.atomic_write import folder_inside
from noisescope.data.dataset import DataSet, read_data
from noisescope.demo.experiment_tasks import arithmetic, practice
from noisescope.demo.train import Settings
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.model.fingerprint import model_fingerprint
from noisescope.options.base import takes_options
from noisescope.options.experiment_and_run_commands import PhasesOptions
from noisescope.options.shared import ExecutionOptions, Source, with_fields
from noisescope.reports import experiment as report_rows
from noisescope.reports.experiment import PhasesReport as PhasesReport
from noisescope.reports.experiment import PhasesRequest, PhasesResult, PhasesRun, TrainingSettings
from noisescope.runs.store import Store
from noisescope.sites import Place
from noisescope.training import schedules
from noisescope.training.criteria import criteria, of_second, theory
from noisescope.training.hypotheses import UNMEASURABLE, CurvePoint, Outcome, arm_row, judge
from noisescope.training.phases_experiment import RULES, SAME, Arm, Design, Factors, Job, Task, rounding
from noisescope.training.trial_processes import check_device, run_all
from noisescope.training.tuning_task import Tuning, load_quietly, tuning
from noisescope.trials import Result

PROFILED = 100  # samples of the diagnosis that gives arms with a rule their factors
SMOOTH = {"adaptive": "equalised", "sensitive": "concentrated"}  # kinds of arms by `schedules.from_report`


@takes_options(PhasesOptions)
def phases(options: PhasesOptions) -> PhasesReport:
    """Train a model under several kinds of noise, and ask each trained model under noise.

    That is the bundled model on its own task, or your `model` on your `data`. What is done is kept in `output`; the
    same call goes on from there, also after `seconds` were up. Nothing is kept without a folder. A script that asks for
    several `workers` must do so under `if __name__ == "__main__":`.
    """
    tasks = _tasks(options)
    chosen = tuple(Arm.of(text, options.noise_scale, matched=options.match_doses) for text in options.arms)
    started = time.time()
    with Store(options.output) as store, _work_folder(options.output) as folder:
        if options.resumes is not None:
            store.mend()
        if options.retry_failed:
            store.forget_failures()
        designs = {
            name: Design(
                task=task,
                arms=chosen,
                seeds=tuple(range(options.seeds)),
                levels=options.noise_levels,
                noise_seeds=options.noise_seeds,
                operators=frozenset(options.operators),
                factors=_factors(task, chosen, store, name, matched=options.match_doses),
                device=options.device,
                same_noise=options.same_noise,
            )
            for name, task in tasks.items()
        }
        design = designs[""]
        about = _asked(design, options.noise_scale, [task.model_name() for task in tasks.values()])
        store.note(asked=to_json(about), **({} if options.repeat is None else {"command": options.repeat}))
        deadline = math.inf if options.seconds is None else started + options.seconds
        _settle(designs.values(), store, folder, options, deadline=deadline)
        kept = store.counts()
        cost = report_rows.PhasesCost(time.time() - started, kept.seconds, kept.trials)
        ended = end_facts(options.output, full_paths=options.full_paths)
        del ended["store"]
        run = PhasesRun(**vars(about), cost=cost, notes=tuple(store.damage()), **ended)
        with store.interpreting():
            report = PhasesReport(conclude(designs, store, options.noise_scale, run=run))
        if options.output is not None:
            store.note(report=report.data)
    return report


def _tasks(options: PhasesOptions) -> dict[str, Task]:
    """What is trained, under "", and the second model and task under their names."""
    if options.method == "grpo":
        import noisescope.training.grpo  # noqa: F401  without TRL this raises here, not once for each training
    training = options.pick("steps", "batch", "rate", "examples")
    if options.model is None:
        make_task = practice if options.method == "grpo" else arithmetic
        return {"": make_task(options.start, tests=options.samples, **training, **options.pick("layers", "width"))}
    data, held_out = (
        _read(options, options.data),
        None if options.held_out is None else _read(options, options.held_out),
    )
    settings = {**training, **options.pick("samples", "epochs", "lora", "method", "max_tokens")}
    settings["longest_answer"] = options.max_new_tokens if options.generate or options.method == "grpo" else 0
    tasks: dict[str, Task] = {"": _tuning(options.model, data, held_out, **settings)}
    if options.second_model is not None:
        tasks["second model"] = _tuning(options.second_model, data, held_out, **settings)
    if options.second_data is not None:
        tasks["second task"] = _tuning(options.model, _read(options, options.second_data), None, **settings)
    return tasks


def _read(options: PhasesOptions, source: Source) -> DataSet:
    if isinstance(source, DataSet):
        return source
    return read_data(with_fields(source, options.prompt_field, options.answer_field))  # type: ignore[arg-type]


def _tuning(model: str, data: DataSet, held_out: DataSet | None, **settings: Any) -> Tuning:
    subject = load_quietly(model, dtype="float32")
    return tuning(subject, model, data, held_out, weights=model_fingerprint(subject.model), **settings)


def _settle(
    designs: Iterable[Design], store: Store, folder: Path, options: ExecutionOptions, *, deadline: float
) -> None:
    """Train what the store does not have."""
    asked = {trial.id: (one, trial, arm, seed) for one in designs for trial, arm, seed in one.trials()}
    wanted = [job for name, job in asked.items() if name not in store]
    if not wanted:
        return  # a report of what is there needs no device
    if options.executor == "local":
        check_device(wanted[0][0].device)
    own, workers = progress_of(options), options.workers
    own.wave(len(wanted))
    progress.begin("problems")
    caches = {one.task: one.task.prepare(folder, workers=workers) for one, *_ in wanted}
    keep = None if options.output is None else folder_inside(Path(options.output), "checkpoints")
    jobs = []
    for one, trial, arm, seed in wanted:
        kept = None if keep is None else keep / f"{arm}-seed-{seed}-{one.training_id(arm, seed)[:12]}".replace(":", "-")
        jobs.append(Job(one, arm, seed, caches[one.task], folder / f"{trial.id[:16]}.checkpoint", deadline, kept))
    ended = run_all(jobs, workers=workers, executor=options.executor, address=options.address)
    with progress.plan(progress.Phase("trainings", len(jobs))):
        for job, result, seconds in progress.track("trainings", ended, steps=len(jobs)):
            if result is not None:
                trial = job.design.trial(job.arm, job.seed)
                store.put(trial, result, seconds)
                own.step(trial, result, seconds)


def conclude(designs: Mapping[str, Design], store: Store, scale: float, *, run: PhasesRun) -> PhasesResult:
    """The report from what is in the store."""
    design = designs[""]
    found: dict[str, dict[int, Outcome]] = {}
    arms: list[report_rows.ArmRow] = []
    failures: list[str] = []
    asked = [criteria(design.arms, design.levels, scale, same_noise=design.same_noise)]
    for name, one in designs.items():
        of = f", {name}" if name else ""
        found |= {f"{arm}{of}": {} for arm in one.arms}
        for trial, arm, seed in one.trials():
            result = store.get(trial.id)
            if result is not None and result.failed:
                failures.append(f"{arm}{of}, seed {seed}: {result.error}")
            elif result is not None:
                found[f"{arm}{of}"][seed] = outcome(result, design.levels)
        rows = [(arm, f"{arm}{of}") for arm in one.arms if found[f"{arm}{of}"]]
        arms += [arm_row(key, found[key], design.levels, dose=arm.dose(one.task.steps)) for arm, key in rows]
        if name:
            asked.append(of_second(name, asked[0], design.arms, design.levels))
    hypotheses = judge([row for several in asked for row in several], found)
    trained, of_all = sum(map(len, found.values())), sum(len(one.trials()) for one in designs.values())
    notes = [f"failed: {failure}" for failure in failures]
    notes += [f"{row.name}: {row.estimate.note}" for row in hypotheses if row.verdict == UNMEASURABLE]
    notes += [note for one in designs.values() for arm in one.arms if (note := rounding(one, arm))]
    notes += [note for one in designs.values() if isinstance(one.task, Tuning) for note in one.task.cut()]
    missing = of_all - trained - len(failures)
    if missing:
        notes.append(f"{missing} of {of_all} trainings are not done yet: run the same command again")
    return PhasesResult(
        run=run,
        arms=tuple(arms),
        seeds=tuple(design.seeds),
        n=design.task.samples,
        levels=tuple(design.levels),
        trained=report_rows.Trained(trained, len(failures), of_all),
        hypotheses=tuple(hypotheses),
        theory=theory(hypotheses),
        could_not_see=tuple(notes),
    )


def outcome(result: Result, levels: Sequence[float]) -> Outcome:
    """A stored row as the statistics need it."""
    answers: dict[str, dict[float, list[tuple[float | None, ...]]]] = {}
    for name, values in result.values.items():
        before, _, column = name.rpartition(": ")
        from_each = np.abs(np.asarray(levels) - float(column.partition("/")[0]))
        level = levels[int(from_each.argmin())]  # older stores have the first six digits only
        answers.setdefault(before, {level: [] for level in levels})[level].append(values)
    arrays = {
        before: {level: np.asarray(values, dtype=np.float64).T for level, values in columns.items() if values}
        for before, columns in answers.items()
    }
    curve = [CurvePoint(point["step"], point["gradient_norm"], point["held_out"]) for point in result.facts["curve"]]
    numbers = sorted(int(number) for name in arrays if (number := name.removeprefix("epoch ")).isdecimal())
    epochs = tuple(arrays[f"epoch {number}"] for number in numbers)
    same = arrays.get(SAME.removesuffix(": "), {})
    return Outcome(arrays[""], curve, result.facts["training_injections"], same, epochs)


def _factors(task: Task, arms: Sequence[Arm], store: Store, name: str, *, matched: bool) -> Factors:
    """Of each rule and layer, from a diagnosis of the model; kept in the store, for a trial's id holds them."""
    from noisescope.api.diagnosis import diagnose

    rules = dict.fromkeys(arm.kind for arm in arms if arm.kind in RULES)
    if rules and (layers := task.about().get("layers", Settings.layers)) != Settings.layers:
        raise InvalidInput(
            f"an adaptive arm takes its factors from the bundled model of {Settings.layers} layers, and the model to "
            f"train has {layers}: train one of {Settings.layers}, or leave the arm out"
        )
    found: dict[str, dict[Place, float]] = {}
    for rule in rules:
        key = "factors" + (f" {rule}" if rule != "adaptive" else "") + (" matched" if matched else "") + name
        known = store.fact(key)
        if known is None:
            effort = "screen" if rule in SMOOTH else "standard"  # the notes' rules are of measured losses
            source, data = (task.files.model, task.files.train) if isinstance(task, Tuning) else ("demo", None)
            report = diagnose(load_quietly(source), data, effort=effort, level="layer", samples=PROFILED)
            factors = schedules.from_report(report, SMOOTH.get(rule, rule), matched=matched)
            known = {str(layer): factor for layer, factor in factors.items()}
            store.note(**{key: known})
        found[rule] = {int(layer): factor for layer, factor in known.items()}
    return found


@contextlib.contextmanager
def _work_folder(output: str | Path | None) -> Iterator[Path]:
    """Where training problems and checkpoints lie: what can be made again, apart from the store."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="noisescope-") as name:
            yield Path(name)
        return
    yield folder_inside(Path(output), "work")


def _asked(design: Design, scale: float, models: Sequence[str]) -> PhasesRequest:
    task, settings = design.task, design.task.about()
    named = {field.name: settings.pop(field.name, None) for field in dataclasses.fields(TrainingSettings)}
    factors = {
        f"{rule} {layer}" if len(design.factors) > 1 else str(layer): factor
        for rule, several in design.factors.items()
        for layer, factor in several.items()
    }
    return PhasesRequest(
        model=report_rows.TaskSource(", ".join(dict.fromkeys(models))),
        data=report_rows.ProblemSource(task.data_name(), task.samples),
        settings=report_rows.PhasesSettings(
            arms=tuple(str(arm) for arm in design.arms),
            seeds=len(design.seeds),
            noise_scale=scale,
            noise_levels=tuple(design.levels),
            noise_seeds=design.noise_seeds,
            operators=tuple(sorted(design.operators)),
            factors=factors,
            training=TrainingSettings(**{**named, "others": settings}),
        ),
        device=design.device,
    )
