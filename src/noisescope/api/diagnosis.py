"""What is sensitive to numerical error, whether that answer holds, and the demo of all steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope import demo
from noisescope.api.plan_trials import add_precision_plan
from noisescope.api.preparation import Prepared, Question, load_subject, prepare_diagnosis, prepare_run, seeds_of
from noisescope.api.roundoff import roundoff
from noisescope.api.run_cost import Cost
from noisescope.data.dataset import read_data
from noisescope.diagnosis import all_levels, findings_check
from noisescope.diagnosis import robustness_curve as curve
from noisescope.diagnosis.context import Settings
from noisescope.diagnosis.report import Diagnosis, Robustness
from noisescope.faults.simulator import faulty
from noisescope.localization.locate import locate
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions
from noisescope.options.shared import ExecutionOptions, LoadingOptions, Options, ScoringOptions
from noisescope.plans.migration import rank_places
from noisescope.probe.formats import Format
from noisescope.probe.noise import Gaussian
from noisescope.reports.saved_report import DiagnosisReport, LocateSection, Report
from noisescope.runs.store import Store


@takes_options(DiagnoseOptions, "data")
def diagnose(subject: Subject, options: DiagnoseOptions) -> Report:
    """Which operators, layers and channels are sensitive to numerical error.

    >>> import noisescope as ns
    >>> report = ns.diagnose(ns.load("demo"), samples=2, effort="screen", level="layer")
    >>> report.value.executive_summary.top_findings[0].component
    'layer 0'
    >>> frame = report.to_frame()  # every row, for pandas; in a notebook `report` alone shows the findings
    >>> paths = report.save("out", formats=["json", "html"])

    With `perturbation="int4"` and the like, what rounding weights, activations or the KV cache (`on`) costs instead.
    With `output` results are stored there as they come, and the same call resumes.
    """
    run, found = prepare_diagnosis(subject, options=options).run(all_levels, options)
    diagnosis = DiagnosisReport.from_diagnosis(Diagnosis.of(run, found))
    by_noise = run.settings.question is None
    if by_noise and diagnosis.layer_analysis is not None and any(row.nats for row in diagnosis.layer_analysis.layers):
        diagnosis = replace(diagnosis, migration_plan=rank_places(diagnosis))
    return _kept(Report(diagnosis), options.output)


def prepare_question(subject: Subject, options: DiagnoseOptions | RobustnessOptions) -> tuple[Prepared, Question[Any]]:
    """What a command asks, and the data that it is asked on."""
    if isinstance(options, DiagnoseOptions):
        return prepare_diagnosis(subject, options=options), all_levels
    levels = curve.checked_levels(options.noise_levels)
    settings = Settings(
        Gaussian(max(levels)), levels=("operator",), layer_operators=options.operators, seeds=seeds_of(options.seeds)
    )
    return prepare_run(subject, options, settings), curve.RobustnessQuestion(levels)


def cost_of_run(subject: Subject, options: DiagnoseOptions | RobustnessOptions) -> Cost:
    """What a run would cost, from one timed sample."""
    prepared, question = prepare_question(subject, options)
    return prepared.cost(question)


@takes_options(RobustnessOptions, "data")
def robustness(subject: Subject, options: RobustnessOptions) -> Report:
    """Accuracy and retention at several noise levels, with intervals; with `rounding`, what round-off alone does.

    >>> import noisescope as ns
    >>> report = ns.robustness(ns.load("demo"), samples=4, seeds=1, noise_levels=(0, 0.05), generate=False)
    >>> report.to_frame()[["noise_level", "accuracy_n"]].values.tolist()
    [[0.0, 4.0], [0.05, 4.0]]
    """
    if options.rounding:
        return _kept(roundoff(subject, options), options.output)
    prepared, question = prepare_question(subject, options)
    run, found = prepared.run(question, options)
    return _kept(Report(Robustness(run=run, **vars(found))), options.output)


def check_findings(
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
    check = findings_check.FaultCheck(name or str(fault), fault, findings_check.chosen_windows(report.diagnosis))
    settings = Settings(Gaussian(0.05), levels=("layer",), seeds=(0,))
    prepared = prepare_run(subject, ScoringOptions(data=data, samples=samples, slice=samples), settings)
    _, found = prepared.run(check, ExecutionOptions())
    return _kept(Report(replace(report.diagnosis, check=found)), output)


def add_located_fault(subject: Subject, report: Report, fault: str, *, output: str | Path | None = None) -> Report:
    """The report, and what `locate` says of the model while a simulated fault is in it."""
    with faulty(subject.model, fault, anatomy=subject.anatomy) as scope:
        verdict = locate(subject, quick=True)
    found = LocateSection.of(verdict.to_dict(), simulated=fault, elements_changed=scope.changed)
    return _kept(Report(replace(report.diagnosis, locate=found)), output)


def _kept(report: Report, output: str | Path | None) -> Report:
    """The run's store keeps the report as it is now: `noisescope report` draws it again, without torch."""
    if output is not None:
        with Store(output) as store:
            store.note(report=report.data)
    return report


SAMPLES = 64  # of the demo, with two seeds: enough for a significant avalanche point within a minute
HELD_OUT = 100
BITS = 5
BROKEN = "stuck_bit:bit=16@6/linear/down_proj"  # the fault that the demo simulates, and has to locate
FAULT = "int4"  # 4-bit integers with one scale per tensor


def run_demo(output: Path, announce: Callable[[str], None], *, resumes: str | None = None) -> Report:
    """A diagnosis of the bundled model, its findings checked, its precision planned, and a fault located.

    `announce` gets a line as each step begins.
    """
    problems = read_data(demo.test_file(), limit=SAMPLES + HELD_OUT)
    unseen = replace(problems, items=problems.items[SAMPLES:])
    subject = load_subject(LoadingOptions(model="demo"))
    options = Options(output=output, repeat={"name": "demo", "options": {}}, resumes=resumes)
    report = diagnose(subject, samples=SAMPLES, seeds=2, slice=SAMPLES, calibration_samples=128, options=options)
    announce("2. simulating a fault where the report warns, and where it does not")
    name = "4-bit integers (one scale per tensor)"
    report = check_findings(subject, report, unseen, Format(FAULT), name=name, samples=HELD_OUT, output=output)
    announce(f"3. planning {BITS} bits per weight, and measuring what that costs")
    report = add_precision_plan(subject, report, BITS)
    announce("4. breaking one operation on purpose, and looking for it without a reference")
    return add_located_fault(subject, report, BROKEN, output=output)
