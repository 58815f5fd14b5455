"""`ns.plan`: what to do about a report. The functions are the commands `noisescope plan ...`, with their options.

Torch is loaded only where a plan is carried out on the model. In the examples `subject` is a model, `batches` its data
and `report` what `ns.diagnose(subject, batches)` gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from noisescope.api import plans
from noisescope.api.reports import as_report, write_text
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.options.base import takes_options
from noisescope.options.plans import (
    FaultTestOptions,
    KvCacheOptions,
    MigrationOptions,
    PrecisionOptions,
    SmoothquantOptions,
)
from noisescope.plans import migration as places
from noisescope.plans.fault_tests import FaultTestResult, FaultTests, generate
from noisescope.plans.kv_cache import KvCachePlan, kv_cache_plan
from noisescope.plans.migration import MigrationSteps
from noisescope.plans.precision_results import PrecisionPlan
from noisescope.plans.smoothing import SmoothingPlan
from noisescope.reports.saved_report import Report

if TYPE_CHECKING:
    from noisescope.model.loading import Subject

    Model: TypeAlias = Subject | Callable[[], Subject] | None

ReportSource: TypeAlias = Report | Diagnosis | Mapping[str, Any] | str | Path


@takes_options(PrecisionOptions)
def precision(report: ReportSource, options: PrecisionOptions, *, subject: Model = None) -> PrecisionPlan:
    """A number format for each linear of the blocks, at the least predicted KL that the budget allows.

    `report` is the report of a diagnosis with the layer level, or the path of one. With `refine` the plan is improved
    on `subject`, round by round. With `verify` it is carried out there and measured beside uniform, rule-based and
    random plans. `subject` may be a function that loads the model: it is called once the plan is made.

    >>> plan = ns.plan.precision(report, average_bits=5, formats="int4,int8")
    >>> plan.average_bits <= 5, set(plan.assignment.values()) <= {"int4", "int8"}
    (True, True)
    >>> plan.verified, plan.typical_kl  # predicted, not measured
    (False, None)
    """
    found = as_report(report)
    options = plans.with_formats_of_tool(found, options)
    plan = plans.plan_precision(found, options=options)
    notes: tuple[str, ...] = ()
    if options.refine:
        from noisescope.api.plan_trials import refine_precision

        subject = _model(subject, "refine")
        plan, notes = refine_precision(subject, found, plan, options=options)
    result = plans.predict_precision(found, plan, formats=options.formats)
    # a tool that can't take the plan is refused before the work of verifying it
    export = None if options.export is None else plans.export_precision(found, plan, options)
    if options.verify:
        from noisescope.api.plan_trials import verify_precision

        result = verify_precision(_model(subject, "verify"), found, plan, options=options)
    result = replace(result, notes=(*notes, *result.notes))
    if options.output is not None and export is not None:
        write_text(options.output, export.text)
        result = replace(result, notes=(*result.notes, *export.notes))
    return result


@takes_options(KvCacheOptions)
def kv_cache(report: ReportSource, options: KvCacheOptions, *, subject: Model = None) -> KvCachePlan:
    """The layers whose keys and values keep 16 bits, from a report of `ns.diagnose(..., on="kv-cache")`.

    With `verify` the plan is carried out on `subject` and measured beside every layer rounded, and the first and last
    layers kept.

    >>> cached = ns.diagnose(subject, batches, perturbation="int8", on="kv-cache", effort="screen")
    >>> plan = ns.plan.kv_cache(cached, keep_layers=1)
    >>> len(plan.kept), len(plan.rounded)
    (1, 1)
    """
    found = as_report(report)
    plan = kv_cache_plan(found.diagnosis, keep_layers=options.keep_layers, max_kl=options.max_kl)
    export = None if options.export is None else plans.export_kv_cache(plan, options.export)
    if options.verify:
        from noisescope.api.plan_trials import verify_kv_cache

        plan = verify_kv_cache(_model(subject, "verify"), found, plan, options=options)
    if options.output is not None and export is not None:
        write_text(options.output, export.text)
        plan = replace(plan, notes=(*plan.notes, *export.notes))
    return plan


@takes_options(SmoothquantOptions)
def smoothquant(report: ReportSource, options: SmoothquantOptions, *, subject: Model = None) -> SmoothingPlan:
    """SmoothQuant carried out on a copy of `subject`: W8A8 KL before and after, and advice for modules with outliers.

    >>> plan = ns.plan.smoothquant(report, subject=subject, data=batches, alpha=0.5)
    >>> plan.gain.n, plan.to_frame("folds")["place"].tolist()
    (3, [0, 0, 0, 0, 1, 1, 1, 1])
    """
    from noisescope.api.plan_trials import plan_smoothquant

    return plan_smoothquant(_model(subject, "smoothquant"), as_report(report), options=options)


@takes_options(MigrationOptions)
def migration(report: ReportSource, options: MigrationOptions) -> MigrationSteps:
    """Which places to validate first on new hardware, in which precision, and the commands to run next.

    >>> plan = ns.plan.migration(report, device="npu")
    >>> [priority.priority for priority in plan.priorities]
    [1, 2, 3]
    >>> sorted(plan.to_frame()["place"], key=str)
    [0, 1, 'embed', 'final_norm', 'lm_head']
    """
    path = Path(report) if isinstance(report, (str, Path)) else Path("report.json")
    file = path / "report.json" if path.is_dir() else path
    return places.plan_migration(as_report(report).diagnosis, path=str(file), **options.pick("device", "model", "data"))


@takes_options(FaultTestOptions, "data")
def fault_tests(
    report: ReportSource,
    options: FaultTestOptions,
    *,
    subject: Model = None,
    on_result: Callable[[FaultTestResult], None] = lambda result: None,
) -> FaultTests:
    """Tests that break on purpose what a report warns of; with `run` they are carried out on `subject`.

    `on_result` is called with each result as soon as it is known.

    >>> found = ns.plan.fault_tests(report, run=True, subject=subject, data=batches, limit=1)
    >>> found.tests[0].test_type, found.verdict in ("pass", "fail", "undecided")
    ('operator_fault', True)
    """
    source = as_report(report)
    tests = tuple(generate(source.diagnosis)[: options.limit])
    if not options.run:
        return FaultTests(tests)
    from noisescope.api.fault_tests import run_report_tests

    model = _model(subject, "run")
    return FaultTests(tests, tuple(run_report_tests(model, source, tests, options, on_result=on_result)))


def _model(subject: Model, asked: str) -> Subject:
    """The model itself, loaded where a function was given."""
    if subject is None:
        raise InvalidInput(f"{asked} needs the model: give it as subject=ns.load(...)")
    return subject() if callable(subject) else subject
