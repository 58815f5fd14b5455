"""What is sensitive to numerical error, and whether that answer held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope.api.costs import Cost
from noisescope.api.preparing import prepare, prepare_diagnosis, prepared_for, seeds_of
from noisescope.diagnosis import check, whole
from noisescope.diagnosis import robustness as curve
from noisescope.diagnosis.frame import Settings
from noisescope.diagnosis.report import Diagnosis, Robustness
from noisescope.faults.simulator import faulty
from noisescope.locators.locate import locate
from noisescope.model import Subject
from noisescope.options.diagnosing import DiagnoseOptions, RobustnessOptions
from noisescope.options.groups import ExecutionOptions
from noisescope.options.signatures import asks
from noisescope.plans.migration import rank_places
from noisescope.probe.noise import Gaussian
from noisescope.reports.report import Report
from noisescope.reports.values import DiagnosisReport, LocateSection
from noisescope.runs.store import Store


@asks(DiagnoseOptions, "data")
def diagnose(subject: Subject, asked: DiagnoseOptions) -> Report:
    """Which operators, layers and channels are sensitive to numerical error.

        report = ns.diagnose(ns.load("demo"))
        report.save("out/")

    With `output` results are stored there as they come, and the same call resumes.
    """
    run, found = prepare_diagnosis(subject, options=asked).run(whole, asked)
    diagnosis = DiagnosisReport.from_diagnosis(Diagnosis.of(run, found))
    if diagnosis.layer_analysis is not None and any(row.nats for row in diagnosis.layer_analysis.layers):
        diagnosis = replace(diagnosis, migration_plan=rank_places(diagnosis))
    return _kept(Report(diagnosis), asked.output)


def cost_of_diagnosis(subject: Subject, asked: DiagnoseOptions) -> Cost:
    """What a diagnosis would cost, from one timed forward."""
    return prepare_diagnosis(subject, options=asked).cost(whole)


@asks(RobustnessOptions, "data")
def robustness(subject: Subject, asked: RobustnessOptions) -> Report:
    """Accuracy and retention at several noise levels, with intervals."""
    levels = curve.checked_levels(asked.noise_levels)
    settings = Settings(
        Gaussian(max(levels)), levels=("operator",), layer_operators=asked.operators, seeds=seeds_of(asked.seeds)
    )
    run, found = prepared_for(subject, asked, settings).run(curve.RobustnessQuestion(levels), asked)
    return _kept(Report(Robustness(run=run, **vars(found))), asked.output)


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
    asked = check.Check(name or str(fault), fault, check.chosen_windows(report.diagnosis))
    settings = Settings(Gaussian(0.05), levels=("layer",), seeds=(0,))
    prepared = prepare(subject, data, settings=settings, samples=samples, calibration_samples=0, slice=samples)
    _, found = prepared.run(asked, ExecutionOptions())
    return _kept(Report(replace(report.diagnosis, check=found)), output)


def with_fault_located(subject: Subject, report: Report, fault: str, *, output: str | Path | None = None) -> Report:
    """The report, and what `locate` says of the model while a simulated fault is in it."""
    with faulty(subject.model, fault, anatomy=subject.anatomy) as scope:
        verdict = locate(subject)
    found = LocateSection.of(verdict.to_dict(), simulated=fault, elements_changed=scope.changed)
    return _kept(Report(replace(report.diagnosis, locate=found)), output)


def _kept(report: Report, output: str | Path | None) -> Report:
    """The run's store keeps the report as it is now: `noisescope report` draws it again, without torch."""
    if output is not None:
        with Store(output) as store:
            store.note(report=report.data)
    return report
