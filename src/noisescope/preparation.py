"""From a model and data to something that can be run: a frame of questions with the material to ask them on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from noisescope import __version__, tasks
from noisescope.costs import Cost, estimate
from noisescope.data import DataSet, built_in, read_data
from noisescope.diagnosis.frame import DEFAULT_OPERATORS, LEVELS, Frame, Settings
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts, Run, SettingsFacts
from noisescope.diagnosis.report import Cost as RunCost
from noisescope.errors import InvalidInput, unknown
from noisescope.jsonform import to_json
from noisescope.metrics.divergence import KL_FLOOR
from noisescope.model import Subject
from noisescope.probe.noise import Gaussian
from noisescope.runs.batches import Material, whole_samples
from noisescope.runs.bench import Bench
from noisescope.runs.execute import Executor, InProcess, Progress, Silent, settle
from noisescope.runs.fingerprints import conditions
from noisescope.runs.forwards import device_name
from noisescope.runs.store import Store
from noisescope.trials import Results, Slice, Trial, content_id, slices

EXECUTORS = ("local", "ray")
METRICS = ("accuracy", "next_token_accuracy", "agreement")
FEW = 8  # samples for curvature and gradients: a second derivative is dear


@dataclass(frozen=True)
class Options:
    """How a run is carried out; nothing here changes a number."""

    output: str | Path | None = None
    executor: str = "local"
    workers: int = 2
    address: str | None = None  # of a Ray cluster
    progress: Progress | None = None
    retry_failed: bool = False
    command: Any = None  # how to repeat this, for `noisescope runs resume`


def prepare_diagnosis(
    subject: Subject,
    data: Any,
    *,
    noise_scale: float = 0.05,
    perturbation: Any = None,
    levels: Iterable[str] = LEVELS,
    operators: Iterable[str] | None = None,
    window: int = 3,
    step: int = 1,
    outlier_threshold: float = 10.0,
    seeds: int | Sequence[int] = 3,
    effort: str = "standard",
    target_degradation: float = 0.10,
    highest_scale: float = 0.20,
    **measured: Any,
) -> Prepared:
    """A diagnosis ready to run, or to say what it would cost."""
    settings = Settings(
        Gaussian(noise_scale) if perturbation is None else perturbation,
        levels=(levels,) if isinstance(levels, str) else tuple(levels),
        operators=DEFAULT_OPERATORS if operators is None else tuple(operators),
        window=window,
        step=step,
        outlier_threshold=outlier_threshold,
        seeds=seeds_of(seeds),
        effort=effort,
        target_degradation=target_degradation,
        highest_scale=highest_scale,
    )
    return prepare(subject, data, settings=settings, **measured)


C = TypeVar("C", covariant=True)


class Question(Protocol[C]):
    """A pure pair: the trials wanted now ([] means done), and what their results say."""

    def propose(self, frame: Frame, results: Results) -> list[Trial]: ...

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> C: ...


@dataclass(frozen=True)
class Prepared:
    """A frame with the material to measure it on."""

    subject: Subject
    frame: Frame
    materials: tuple[Material, ...]
    metric: Callable[..., Any] | None
    asked: Asked
    notes: tuple[str, ...]

    def run(self, question: Question[C], options: Options) -> tuple[Run, C]:
        """Settle all trials of a question; the facts of the run, and what the question concludes."""
        started = time.perf_counter()
        progress = options.progress or Silent()
        with Store(options.output) as store:
            if options.retry_failed:
                store.forget_failures()
            before = len(store)
            store.note(asked=to_json(self.asked), **({} if options.command is None else {"command": options.command}))
            if self.frame.measure == "score":
                Bench(self.subject, self.materials).check_causal(self.frame.test[0])
            with self._executor(options) as (execute, cost):
                settle(lambda results: question.propose(self.frame, results), store, execute, progress)
                forwards, notes = cost()
            found = question.conclude(self.frame, store, self.notes)
            run = Run(
                **vars(self.asked),
                cost=RunCost(
                    seconds=time.perf_counter() - started,
                    trials=len(store),
                    trials_run_now=len(store) - before,
                    forwards=forwards / sum(map(len, self.materials[0].encoded.sequences)),
                ),
                notes=(*store.damage(), *notes),
                finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                versions=versions(),
                host=platform.node(),
                store=None if options.output is None else str(options.output),
            )
        return run, found

    def _executor(self, options: Options) -> Any:
        if options.executor == "local":
            return _local(self.subject, self.materials, self.metric)
        if options.executor == "ray":
            from noisescope.runs.on_ray import on_ray

            return on_ray(self.subject, self.materials, self.metric, options)
        raise unknown("executor", options.executor, EXECUTORS)

    def cost(self, question: Question[C]) -> Cost:
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


def prepare(
    subject: Subject,
    data: Any,
    *,
    settings: Settings,
    calibration: Any = None,
    samples: int = 100,
    calibration_samples: int = 1000,
    metric: str | Callable[..., Any] = "accuracy",
    generate: bool | None = False,
    max_tokens: int = 256,
    max_new_tokens: int = 256,
    slice_samples: int = 50,
) -> Prepared:
    """Read the data, encode it, cut it into slices, and say what was chosen."""
    for name, value in (("samples", samples), ("slice_samples", slice_samples), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidInput(f"{name} must be at least 1, got {value}")
    test, test_set = material_of(subject, data, samples, max_tokens, which="test")
    notes = list(_data_notes(test, test_set, samples))
    materials = [test]
    calibration_slice = None
    if "channel" in settings.levels and calibration_samples > 0:
        if calibration is None and (data is not None or subject.source != "demo"):
            source: Any = test_set if test_set is not None else data
            extra = material_of(subject, source, calibration_samples, max_tokens, which="test", whole=True)[0]
            notes.append("no calibration data was given: channels were captured on the test data")
        else:
            extra = material_of(subject, calibration, calibration_samples, max_tokens, which="calibration")[0]
        materials.append(extra)
        calibration_slice = Slice(extra.fingerprint, 0, len(extra))
    if generate is None:
        generate = test.kind in ("answer", "chat") and bool(test.prompts)
    if generate and not test.prompts:
        raise InvalidInput(f"generation needs prompts with answers; this data is of kind {test.kind!r}")
    own = metric if callable(metric) else None
    if own is None and metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    measure = "custom" if own is not None else "generate" if generate else "score"
    extra_settings: dict[str, Any] = {}
    if own is not None:
        extra_settings = {"metric": own}
    elif generate:
        extra_settings = {"max_new_tokens": max_new_tokens, "texts": content_id([test.prompts, test.answers])}
        if metric != "accuracy":
            raise InvalidInput(f"generation measures accuracy alone; metric {metric!r} is teacher-forced")
    whole = whole_samples(test)
    if own is None and whole.fingerprint != test.fingerprint:
        materials.append(whole)
    anatomy = subject.anatomy
    frame = Frame(
        settings=settings,
        conditions=conditions(subject),
        sites=tuple(unit.site(operator) for unit in anatomy.units for operator in unit.operators if unit.certain),
        doubtful=frozenset(op for unit in anatomy.units if not unit.certain for op in unit.operators)
        - anatomy.operators(),
        blocks=len(anatomy.blocks),
        test=slices(test.fingerprint, len(test), slice_samples),
        calibration=calibration_slice,
        few=None if own is not None else Slice(test.fingerprint, 0, min(FEW, len(test))),
        measure=measure,
        measure_settings=extra_settings,
        metric="accuracy" if own is not None or generate else str(metric),
        chance=_chance(test, test_set, "custom" if own is not None else str(metric)),
        whole=() if own is not None else slices(whole.fingerprint, len(whole), slice_samples),
        names=tuple(content_id(one.ids)[:16] for (one,) in whole.encoded.sequences),
    )
    asked = Asked(
        model=ModelFacts(
            source=subject.source,
            architecture=anatomy.architecture,
            fingerprint=frame.conditions.model,
            blocks=frame.blocks,
            notes=tuple(anatomy.notes),
        ),
        data=DataFacts(
            source="tokenised batches" if test_set is None else test_set.source,
            kind=test.kind,
            samples=len(test),
            scored_tokens=_scored(test),
            fingerprint=test.fingerprint,
            note="" if test_set is None else test_set.note,
            measure=measure,
        ),
        settings=_settings_facts(settings),
        metric=frame.metric if own is None else content_id(own),
        conditions=frame.conditions,
        device=device_name(subject.model),
        kl_floor=KL_FLOOR,
    )
    return Prepared(subject, frame, tuple(materials), own, asked, tuple(notes))


def material_of(
    subject: Subject, data: Any, count: int, max_tokens: int, *, which: str, whole: bool = False
) -> tuple[Material, DataSet | None]:
    """Encoded samples from whatever form data comes in."""
    found = _data_set(subject, data, count, which)
    if found is None:
        encoded = tasks.from_batches(data)
        encoded = replace(encoded, sequences=encoded.sequences[:count])
        return Material(encoded, "text"), None
    encoded = tasks.encode(found, subject.tokenizer, max_tokens=max_tokens)
    labels = tuple(item.label for item in found.items) if found.kind == "choice" else ()
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    if found.kind in ("answer", "chat"):
        prompts = tuple(tasks.prompts(found, subject.tokenizer))
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
    if isinstance(data, (str, Path)):
        return read_data(Path(data).expanduser().absolute(), limit=count)  # a report is read from other folders, too
    return None


def _data_notes(test: Material, found: DataSet | None, wanted: int) -> Iterable[str]:
    if found is not None and found.note and found.source != "demo":
        yield found.note
    if len(test) < wanted:
        yield f"the data holds {len(test)} samples, {wanted} were asked for"
    if test.encoded.truncated:
        yield f"{test.encoded.truncated} of {len(test)} samples were cut to fit (--max-tokens)"
    yield from test.encoded.notes


def _chance(test: Material, found: DataSet | None, metric: str) -> float:
    """What guessing gets: of one's own metric nothing is known, and tokens are guessed as the commonest one."""
    if metric == "custom" or metric == "agreement":
        return 0.0
    if metric == "next_token_accuracy" or test.kind == "text":
        return _commonest(test)
    return 0.0 if found is None else tasks.chance(found)


def _commonest(test: Material) -> float:
    """The share of the commonest scored token: what always saying the same would get right."""
    tokens = Counter(token for group in test.encoded.sequences for s in group for token in s.ids[s.start :])
    return max(tokens.values()) / max(sum(tokens.values()), 1)


def _scored(test: Material) -> int:
    return sum(len(s.ids) - s.start for group in test.encoded.sequences for s in group)


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        if seeds < 1:
            raise InvalidInput(f"at least one seed is needed, got seeds={seeds}")
        return tuple(range(seeds))
    return tuple(seeds)


def _settings_facts(settings: Settings) -> SettingsFacts:
    chosen = {**vars(settings), "perturbation": repr(settings.perturbation), "noise_scale": settings.scale}
    return SettingsFacts(**chosen)


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    found = {"noisescope": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "numpy", "scipy"):
        found[name] = importlib.metadata.version(name)
    return found
