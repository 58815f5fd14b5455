"""What can't stand numerical error, and whether that answer held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from noisescope.diagnosis import check, whole
from noisescope.diagnosis import robustness as curve
from noisescope.diagnosis.frame import LEVELS, Settings
from noisescope.faults.simulator import faulty
from noisescope.locators.locate import locate
from noisescope.model import Subject
from noisescope.preparation import Options, prepare, prepare_diagnosis, seeds_of
from noisescope.probe.noise import Gaussian
from noisescope.reports.report import Report
from noisescope.runs.store import Store


def diagnose(
    subject: Subject,
    data: Any = None,
    *,
    calibration: Any = None,
    noise_scale: float = 0.05,
    perturbation: Any = None,
    levels: Iterable[str] = LEVELS,
    operators: Iterable[str] | None = None,
    window: int = 3,
    step: int = 1,
    outlier_threshold: float = 10.0,
    samples: int = 100,
    calibration_samples: int = 1000,
    seeds: int | Sequence[int] = 3,
    metric: str | Callable[..., Any] = "accuracy",
    effort: str = "standard",
    generate: bool = False,
    max_tokens: int = 256,
    max_new_tokens: int = 256,
    slice_samples: int = 50,
    options: Options | None = None,
) -> Report:
    """Which operators, layers and channels can't stand numerical error.

        report = ns.diagnose(ns.load("demo"))
        report.save("out/")

    `data` is a file (JSONL, JSON, CSV, Parquet), a DataSet, tokenised batches, or None (the demo's own set, else
    built-in text). `metric` is what bands are taken of: "accuracy" (the task's), "next_token_accuracy", "agreement", or
    a callable (model, batches) -> one score per sample. `generate` scores answers by generation, not teacher-forced.
    With `options.output` results are stored there as they come, and the same call resumes.
    """
    return prepare_diagnosis(
        subject,
        data,
        calibration=calibration,
        noise_scale=noise_scale,
        perturbation=perturbation,
        levels=levels,
        operators=operators,
        window=window,
        step=step,
        outlier_threshold=outlier_threshold,
        samples=samples,
        calibration_samples=calibration_samples,
        seeds=seeds,
        metric=metric,
        effort=effort,
        generate=generate,
        max_tokens=max_tokens,
        max_new_tokens=max_new_tokens,
        slice_samples=slice_samples,
    ).run(whole, options or Options())


def robustness(
    subject: Subject,
    data: Any = None,
    *,
    noise_levels: Sequence[float] = (0.0, 0.05, 0.10),
    samples: int = 100,
    seeds: int | Sequence[int] = 3,
    metric: str | Callable[..., Any] = "accuracy",
    operators: Iterable[str] = ("gemm",),
    generate: bool | None = None,
    max_tokens: int = 256,
    max_new_tokens: int = 256,
    slice_samples: int = 50,
    options: Options | None = None,
) -> Report:
    """Accuracy and retention at several noise levels, with intervals."""
    levels = curve.checked_levels(noise_levels)
    prepared = prepare(
        subject,
        data,
        calibration=None,
        settings=Settings(
            Gaussian(max(levels)), levels=("operator",), layer_operators=tuple(operators), seeds=seeds_of(seeds)
        ),
        samples=samples,
        calibration_samples=0,
        metric=metric,
        generate=generate,
        max_tokens=max_tokens,
        max_new_tokens=max_new_tokens,
        slice_samples=slice_samples,
    )
    return prepared.run(curve.Robustness(levels), options or Options())


def put_to_the_test(
    subject: Subject,
    report: Report,
    data: Any,
    fault: Any,
    *,
    name: str | None = None,
    samples: int = 100,
    output: str | Path | None = None,
) -> Report:
    """The report, and whether it was right: one fault in the layers it warns of, and in others.

    `data` must be other samples than the report's. With the report's own `output` its store keeps the new one, too.
    """
    asked = check.Check(name or str(fault), fault, check.chosen_windows(report))
    settings = Settings(Gaussian(0.05), levels=("layer",), seeds=(0,))
    prepared = prepare(subject, data, settings=settings, samples=samples, calibration_samples=0, slice_samples=samples)
    checked = prepared.run(asked, Options())
    whole_report = Report({**report, "check": {**checked["check"], "samples": checked["run"]["data"]["samples"]}})
    return _kept(whole_report, output)


def with_fault_located(subject: Subject, report: Report, fault: str, *, output: str | Path | None = None) -> Report:
    """The report, and what `locate` says of the model while a simulated fault is in it."""
    with faulty(subject.model, fault, anatomy=subject.anatomy) as scope:
        verdict = locate(subject)
    found = {**verdict.to_dict(), "simulated": fault, "elements_changed": scope.changed}
    return _kept(Report({**report, "locate": found}), output)


def _kept(report: Report, output: str | Path | None) -> Report:
    """The run's store keeps the report as it is now."""
    if output is not None:
        with Store(output) as store:
            store.note(report=report.data)
    return report
