"""From options to a run: the model loaded, the data encoded and cut into slices, the question carried out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from noisescope.api.reports import end_facts
from noisescope.api.run_cost import Cost, SampleCost, TrialProgress, estimate, plan_trials, time_sample
from noisescope.api.run_question import format_settings, given_command, tied_modules
from noisescope.data import tokens
from noisescope.data.dataset import DataSet, built_in, read_data
from noisescope.diagnosis.context import Settings, StudyContext
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts, Run, SettingsFacts
from noisescope.diagnosis.report import Cost as RunCost
from noisescope.errors import InvalidInput
from noisescope.jsonform import to_json
from noisescope.measures.divergence import KL_FLOOR
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import device_name
from noisescope.model.import_without_torchao import import_transformers
from noisescope.model.loading import Subject, load
from noisescope.options.base import takes_options
from noisescope.options.fields import DEFAULT_OPERATORS, GAUSSIAN
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.options.shared import (
    DataFile,
    DeviceOptions,
    ExecutionOptions,
    LoadingOptions,
    MeasuringOptions,
    ReportModelOptions,
    ScoringOptions,
)
from noisescope.probe.noise import Gaussian
from noisescope.progress import begin, heard
from noisescope.runs.batches import Material, whole_samples
from noisescope.runs.store import Store
from noisescope.runs.trial_runner import (
    Executor,
    LocalExecutor,
    NoProgress,
    Progress,
    TrialRunner,
    conditions,
    run_waves,
)
from noisescope.text_escaping import last_part, shown
from noisescope.trials import Results, Slice, Trial, content_id, slices

C = TypeVar("C", covariant=True)
PATHS_CUT = "absolute paths are cut to their last part; the same command with --full-paths keeps them"
MOST_SEEDS = 100_000
FEW = 8  # samples for curvature and gradients: a second derivative is dear


def load_subject(options: LoadingOptions) -> Subject:
    """The model of a command."""
    return _loaded(options.model, options.dtype, options)


def load_report_subject(report: Mapping[str, Any], options: ReportModelOptions) -> Subject:
    """The model that a report is of, in the dtype it was measured in; or another one."""
    run = report["run"]
    dtype = options.dtype or run["conditions"]["dtype"]
    if options.model:
        return _loaded(options.model, dtype, options)
    source = run["model"]["source"]
    try:
        found = _loaded(source, dtype, options)
    except InvalidInput as error:
        raise InvalidInput(f"{error} (the report names its model so: give it with --model)") from error
    # a path that was cut to its last part may be another model's here
    same_numbers = dtype == run["conditions"]["dtype"] and options.revision is None
    if same_numbers and model_fingerprint(found.model) != run["model"]["fingerprint"]:
        raise InvalidInput(
            f"{source} is not the model of the report, which has another fingerprint: give the model you mean with "
            "--model"
        )
    return found


def load_quietly() -> None:
    """What a command imports and loads from here on prints nothing of its own."""
    import_transformers()
    from transformers.utils import logging

    logging.disable_progress_bar()


def _loaded(model: str, dtype: str | None, options: DeviceOptions) -> Subject:
    """Without the loader's own progress bars."""
    begin("loading")
    load_quietly()
    return load(model, dtype=dtype, **options.pick("device", "device_map", "stream", "revision", "trust_remote_code"))


def encode_data(
    subject: Subject, data: Any, count: int, max_tokens: int, *, which: str
) -> tuple[Material, DataSet | None]:
    """Encoded samples from whatever form data comes in."""
    found = _data_set(subject, data, count, which)
    if found is None:
        encoded = tokens.from_batches(data)
        encoded = replace(encoded, sequences=encoded.sequences[:count])
        return Material(encoded, "text"), None
    encoded = tokens.encode(found, subject.tokenizer, max_tokens=max_tokens)
    labels = tuple(item.label for item in found.items) if found.kind == "choice" else ()
    if found.kind not in ("answer", "chat"):
        return Material(encoded, found.kind, labels), found
    prompts = tuple(tokens.prompts(found, subject.tokenizer))
    answers = tuple(item.answer or item.messages[-1][1] for item in found.items)
    return Material(encoded, found.kind, labels, prompts, answers), found


def _data_set(subject: Subject, data: Any, count: int, which: str) -> DataSet | None:
    """A data set of at most `count` items, or None where `data` is tokenised batches."""
    if data is None and subject.source == "demo":
        from noisescope import demo

        path = demo.test_file() if which == "test" else demo.calibration_file()
        return replace(read_data(path, limit=count), source="demo", note="the bundled model's own problems")
    if data is None:
        return built_in().take(count)
    if isinstance(data, DataSet):
        return data.take(count)
    if isinstance(data, (str, Path, DataFile)):
        return read_data(data, limit=count)
    return None


def data_notes(test: Material, found: DataSet | None, wanted: int) -> Iterable[str]:
    if found is not None and found.note and found.source != "demo":
        yield found.note
    if len(test) < wanted:
        yield f"the data holds {len(test)} samples, {wanted} were asked for"
    yield from test.encoded.notes


def chance_of(test: Material, found: DataSet | None, metric: str) -> float:
    """What guessing gets: of one's own metric nothing is known, and the best guess of a token is the commonest one."""
    if metric in ("custom", "agreement", "perplexity"):
        return 0.0
    if metric == "next_token_accuracy" or test.kind == "text":
        counts = Counter(token for group in test.encoded.sequences for s in group for token in s.ids[s.start :])
        return max(counts.values()) / max(sum(counts.values()), 1)
    return 0.0 if found is None else tokens.chance(found)


@takes_options(DiagnoseOptions, "data")
def prepare_diagnosis(subject: Subject, options: DiagnoseOptions) -> Prepared:
    """A diagnosis ready to run, or to say what it would cost."""
    on, noise = options.format_on, options.perturbation
    chosen = options.pick("window", "step", "outlier_threshold", "effort")
    if on is not None:
        return prepare_run(subject, options, format_settings(subject, options, on, levels=options.level, **chosen))
    settings = Settings(
        Gaussian(options.noise_scale) if noise in (None, GAUSSIAN) else noise,
        levels=options.level,
        operators=DEFAULT_OPERATORS if options.operators is None else options.operators,
        seeds=seeds_of(options.seeds),
        **chosen,
        **options.pick("target_degradation", "highest_scale"),
    )
    return prepare_run(subject, options, settings)


@takes_options(MeasuringOptions, "data")
def prepare(subject: Subject, options: MeasuringOptions, *, settings: Settings) -> Prepared:
    """Settings of your own ready to run: the data read, encoded and cut into slices."""
    return prepare_run(subject, options, settings)


def prepare_run(subject: Subject, options: ScoringOptions, settings: Settings) -> Prepared:
    """Read the data, encode it, cut it into slices, and say what was chosen."""
    if isinstance(subject, (str, Path)):
        raise InvalidInput(f"expected a loaded model, got its name: give ns.load({shown(str(subject))})")
    test, test_set = encode_data(subject, options.source(), options.samples, options.max_tokens, which="test")
    notes = list(data_notes(test, test_set, options.samples))
    materials = [test]
    calibration = None
    if "channel" in settings.levels and isinstance(options, MeasuringOptions) and options.calibration_samples > 0:
        extra, more = _calibration(subject, options, test_set)
        notes += more
        materials.append(extra)
        calibration = Slice(extra.fingerprint, 0, len(extra))
    generate = _generates(options, test)
    own = options.metric if callable(options.metric) else None
    measure, measure_settings = "score", dict[str, Any]()
    if own is not None:
        measure, measure_settings = "custom", {"metric": own}
    elif generate:
        texts = content_id([test.prompts, test.answers])
        measure, measure_settings = "generate", {"max_new_tokens": options.max_new_tokens, "texts": texts}
    whole = whole_samples(test)
    if own is None and whole.fingerprint != test.fingerprint:
        materials.append(whole)
    anatomy = subject.anatomy
    possible = (operator for unit in anatomy.units if not unit.certain for operator in unit.operators)
    context = StudyContext(
        settings=settings,
        conditions=conditions(subject),
        sites=tuple(unit.site(operator) for unit in anatomy.units for operator in unit.injectable if unit.certain),
        uncertain_operators=frozenset(possible) - anatomy.operators(),
        blocks=len(anatomy.blocks),
        test=slices(test.fingerprint, len(test), options.slice),
        calibration=calibration,
        curvature_slice=None if own is not None else Slice(test.fingerprint, 0, min(FEW, len(test))),
        measure=measure,
        measure_settings=measure_settings,
        metric="accuracy" if own is not None or generate else str(options.metric),
        chance=chance_of(test, test_set, "custom" if own is not None else str(options.metric)),
        all_token_slices=() if own is not None else slices(whole.fingerprint, len(whole), options.slice),
        sample_hashes=tuple(content_id(one.ids)[:16] for (one,) in whole.encoded.sequences),
        tied=tied_modules(subject),
    )
    facts = _facts(subject, context, test, test_set, own)
    executed = isinstance(options, ExecutionOptions)  # a plan that is carried out has no such options
    if not (isinstance(options, ExecutionOptions) and options.full_paths):
        facts, whole_paths = _with_short_paths(facts), facts
        notes += [PATHS_CUT] if executed and facts != whole_paths else []
    return Prepared(subject, context, tuple(materials), own, facts, tuple(notes))


def _calibration(subject: Subject, options: MeasuringOptions, test_set: DataSet | None) -> tuple[Material, list[str]]:
    """What channels are captured on, and a note where that is the test data."""
    count, tokens = options.calibration_samples, options.max_tokens
    if options.calibration is None and (options.data is not None or subject.source != "demo"):
        source: Any = test_set if test_set is not None else options.source()
        extra = encode_data(subject, source, count, tokens, which="test")[0]
        return extra, ["no calibration data was given: channels were captured on the test data"]
    given = options if options.calibration is None else replace(options, data=options.calibration)
    source = options.calibration if options.calibration is None else given.source()
    return encode_data(subject, source, count, tokens, which="calibration")[0], []


def _generates(options: ScoringOptions, test: Material) -> bool:
    if callable(options.metric):
        return bool(options.generate)
    by_itself = test.kind in ("answer", "chat") and bool(test.prompts) and options.metric == "accuracy"
    generate = by_itself if options.generate is None else options.generate
    if generate and not test.prompts:
        raise InvalidInput(
            f"generation needs prompts with answers, and this data is of kind {test.kind!r}: leave --generate out, or "
            "name the fields by --prompt-field and --answer-field"
        )
    if generate and options.metric != "accuracy":
        raise InvalidInput(f"generation measures accuracy alone; metric {options.metric!r} is teacher-forced")
    return generate


def _facts(
    subject: Subject, context: StudyContext, test: Material, test_set: DataSet | None, own: Callable[..., Any] | None
) -> Asked:
    """For the report's `run`: what was asked."""
    settings = context.settings
    chosen = {**vars(settings), "perturbation": repr(settings.perturbation), "noise_scale": settings.scale}
    chosen["question"] = settings.question
    del chosen["on"]
    return Asked(
        model=ModelFacts(
            source=subject.source,
            architecture=subject.anatomy.architecture,
            fingerprint=context.conditions.model,
            blocks=context.blocks,
            notes=tuple(subject.anatomy.notes),
        ),
        data=DataFacts(
            source="tokenised batches" if test_set is None else test_set.source,
            kind=test.kind,
            samples=len(test),
            scored_tokens=sum(len(s.ids) - s.start for group in test.encoded.sequences for s in group),
            fingerprint=test.fingerprint,
            note="" if test_set is None else test_set.note,
            measure=context.measure,
            available=len(test) if test_set is None else max(test_set.available, len(test)),
        ),
        settings=SettingsFacts(**chosen),
        metric=context.metric if own is None else content_id(own),
        conditions=context.conditions,
        device=device_name(subject.model),
        kl_floor=KL_FLOOR,
    )


def _with_short_paths(facts: Asked) -> Asked:
    """A report is for sharing: where a file lies on this machine is nobody's business."""
    model, data = facts.model, facts.data
    return replace(
        facts,
        model=replace(model, source=last_part(model.source)),
        data=replace(data, source=last_part(data.source)),
    )


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int) and seeds > MOST_SEEDS:
        raise InvalidInput(f"seeds must be at most {MOST_SEEDS}, got {seeds}")
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


class Question(Protocol[C]):
    """A pure pair: the trials wanted now ([] means done), and what their results say."""

    def propose(self, context: StudyContext, results: Results) -> list[Trial]: ...

    def conclude(self, context: StudyContext, results: Results, notes: Sequence[str] = ()) -> C: ...


def progress_of(options: ExecutionOptions) -> Progress:
    progress: Any = options.progress
    return NoProgress() if progress is None else progress


@dataclass(frozen=True)
class Prepared:
    """A question's context with the material to measure it on."""

    subject: Subject
    context: StudyContext
    materials: tuple[Material, ...]
    metric: Callable[..., Any] | None
    facts: Asked
    notes: tuple[str, ...]

    def run(self, question: Question[C], options: ExecutionOptions) -> tuple[Run, C]:
        """Settle all trials of a question; the facts of the run, and what the question concludes."""
        started = time.perf_counter()
        planned = plan_trials(self.context, question.propose, self.subject.anatomy) if heard() else []
        follow = TrialProgress(self.context, planned, progress_of(options), getattr(question, "phase", None))
        self._refuse_another_model(options)
        with Store(options.output) as store:
            if options.resumes is not None:
                store.mend()
            if options.retry_failed:
                store.forget_failures()
            store.note(asked=to_json(self.facts), **({} if options.repeat is None else {"command": options.repeat}))
            if self.context.measure == "score":
                TrialRunner(self.subject, self.materials).check_causal(self.context.test[0])
            with self._executor(options) as (execute, cost), follow.following(store) as progress:
                run_waves(lambda results: self._proposed(question, store, results), store, execute, progress)
                forwards, notes = cost()
            with store.interpreting():
                found = question.conclude(self.context, store, self.notes)
            spent = RunCost(
                seconds=time.perf_counter() - started,
                trials=store.counts().trials,
                trials_run_now=store.added,
                forwards=forwards / sum(map(len, self.materials[0].encoded.sequences)),
            )
            ended = end_facts(options.output, full_paths=options.full_paths)
            command = None if self.subject.loading is None else given_command(options, self.subject.source, self.facts)
            run = Run(**vars(self.facts), cost=spent, notes=(*store.damage(), *notes), **ended, command=command)
        return run, found

    def _proposed(self, question: Question[C], store: Store, results: Results) -> list[Trial]:
        with store.interpreting():
            return question.propose(self.context, results)

    def _refuse_another_model(self, options: ExecutionOptions) -> None:
        """A resumed run is of the model it was of, or it is another run."""
        model = self.facts.model
        if options.resumes and options.resumes != model.fingerprint:
            raise InvalidInput(
                f"{self.subject.source} is not the model that the run in {options.output} measured (fingerprint "
                f"{model.fingerprint[:12]}, and that one had {options.resumes[:12]}): put the model back, or measure "
                "this one into another folder (-o)"
            )

    @contextmanager
    def _executor(self, options: ExecutionOptions) -> Iterator[tuple[Executor, Callable[[], tuple[float, list[str]]]]]:
        """What runs the trials while it is open, and afterwards what that cost: here, or on Ray."""
        if options.executor == "local":
            with TrialRunner(self.subject, self.materials, metric=self.metric, memory=options.memory) as runner:
                yield LocalExecutor(runner), lambda: (runner.forwards, list(runner.notes))
            return
        from noisescope.runs.ray_executor import on_ray

        with on_ray(self.subject, self.materials, self.metric, options) as executor:
            yield executor

    def time_sample(self) -> SampleCost:
        """What one sample costs here, measured."""
        with TrialRunner(self.subject, self.materials, metric=self.metric) as runner:
            return time_sample(runner, self.context)

    def cost(self, question: Question[Any]) -> Cost:
        """What a run would cost, from one timed sample."""
        with TrialRunner(self.subject, self.materials, metric=self.metric) as runner:
            return estimate(runner, self.context, question.propose)
