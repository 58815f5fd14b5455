"""From a model, data and settings to a frame of questions with the material to ask them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from noisescope.api.facts import settings_facts
from noisescope.api.materials import chance_of, data_notes, material_of, scored_tokens
from noisescope.api.running import Prepared
from noisescope.data import DataSet
from noisescope.diagnosis.frame import Frame, Settings
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts
from noisescope.errors import InvalidInput
from noisescope.metrics.divergence import KL_FLOOR
from noisescope.model import Subject
from noisescope.options.choices import DEFAULT_OPERATORS
from noisescope.options.diagnosing import DiagnoseOptions
from noisescope.options.groups import MeasuringOptions, ScoringOptions
from noisescope.options.signatures import asks
from noisescope.probe.noise import Gaussian
from noisescope.runs.batches import Material, whole_samples
from noisescope.runs.bench import conditions
from noisescope.runs.forwards import device_name
from noisescope.trials import Slice, content_id, slices

FEW = 8  # samples for curvature and gradients: a second derivative is dear


@asks(DiagnoseOptions, "data")
def prepare_diagnosis(subject: Subject, asked: DiagnoseOptions) -> Prepared:
    """A diagnosis ready to run, or to say what it would cost."""
    settings = Settings(
        Gaussian(asked.noise_scale) if asked.perturbation is None else asked.perturbation,
        levels=asked.level,
        operators=DEFAULT_OPERATORS if asked.operators is None else asked.operators,
        window=asked.window,
        step=asked.step,
        outlier_threshold=asked.outlier_threshold,
        seeds=seeds_of(asked.seeds),
        effort=asked.effort,
        target_degradation=asked.target_degradation,
        highest_scale=asked.highest_scale,
    )
    return prepared_for(subject, asked, settings)


@asks(MeasuringOptions, "data")
def prepare(subject: Subject, asked: MeasuringOptions, *, settings: Settings) -> Prepared:
    """Settings of your own ready to run: the data read, encoded and cut into slices."""
    return prepared_for(subject, asked, settings)


def prepared_for(subject: Subject, asked: ScoringOptions, settings: Settings) -> Prepared:
    """Read the data, encode it, cut it into slices, and say what was chosen."""
    test, test_set = material_of(subject, asked.data, asked.samples, asked.max_tokens, which="test")
    notes = list(data_notes(test, test_set, asked.samples))
    materials = [test]
    calibration = None
    if "channel" in settings.levels and isinstance(asked, MeasuringOptions) and asked.calibration_samples > 0:
        extra, more = _calibration(subject, asked, test_set)
        notes += more
        materials.append(extra)
        calibration = Slice(extra.fingerprint, 0, len(extra))
    generate = _generates(asked, test)
    own = asked.metric if callable(asked.metric) else None
    measure = "custom" if own is not None else "generate" if generate else "score"
    extra_settings: dict[str, Any] = {}
    if own is not None:
        extra_settings = {"metric": own}
    elif generate:
        extra_settings = {
            "max_new_tokens": asked.max_new_tokens,
            "texts": content_id([test.prompts, test.answers]),
        }
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
        test=slices(test.fingerprint, len(test), asked.slice),
        calibration=calibration,
        few=None if own is not None else Slice(test.fingerprint, 0, min(FEW, len(test))),
        measure=measure,
        measure_settings=extra_settings,
        metric="accuracy" if own is not None or generate else str(asked.metric),
        chance=chance_of(test, test_set, "custom" if own is not None else str(asked.metric)),
        whole=() if own is not None else slices(whole.fingerprint, len(whole), asked.slice),
        names=tuple(content_id(one.ids)[:16] for (one,) in whole.encoded.sequences),
    )
    about = _asked(subject, frame, test, test_set, own)
    return Prepared(subject, frame, tuple(materials), own, about, tuple(notes))


def _calibration(subject: Subject, asked: MeasuringOptions, test_set: DataSet | None) -> tuple[Material, list[str]]:
    """What channels are captured on, and a note where that is the test data."""
    count, tokens = asked.calibration_samples, asked.max_tokens
    if asked.calibration is None and (asked.data is not None or subject.source != "demo"):
        source: Any = test_set if test_set is not None else asked.data
        extra = material_of(subject, source, count, tokens, which="test")[0]
        return extra, ["no calibration data was given: channels were captured on the test data"]
    return material_of(subject, asked.calibration, count, tokens, which="calibration")[0], []


def _generates(asked: ScoringOptions, test: Material) -> bool:
    if callable(asked.metric):
        return bool(asked.generate)
    by_itself = test.kind in ("answer", "chat") and bool(test.prompts)
    generate = by_itself if asked.generate is None else asked.generate
    if generate and not test.prompts:
        raise InvalidInput(f"generation needs prompts with answers; this data is of kind {test.kind!r}")
    if generate and asked.metric != "accuracy":
        raise InvalidInput(f"generation measures accuracy alone; metric {asked.metric!r} is teacher-forced")
    return generate


def _asked(
    subject: Subject, frame: Frame, test: Material, test_set: DataSet | None, own: Callable[..., Any] | None
) -> Asked:
    """For the report's `run`: what was asked."""
    return Asked(
        model=ModelFacts(
            source=subject.source,
            architecture=subject.anatomy.architecture,
            fingerprint=frame.conditions.model,
            blocks=frame.blocks,
            notes=tuple(subject.anatomy.notes),
        ),
        data=DataFacts(
            source="tokenised batches" if test_set is None else test_set.source,
            kind=test.kind,
            samples=len(test),
            scored_tokens=scored_tokens(test),
            fingerprint=test.fingerprint,
            note="" if test_set is None else test_set.note,
            measure=frame.measure,
        ),
        settings=settings_facts(frame.settings),
        metric=frame.metric if own is None else content_id(own),
        conditions=frame.conditions,
        device=device_name(subject.model),
        kl_floor=KL_FLOOR,
    )


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
