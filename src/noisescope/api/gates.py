"""Whether a model got worse than its baseline: measured, decided, stored."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noisescope.api.plan_trials import check_model, find_data
from noisescope.api.preparation import Prepared, prepare_run, seeds_of
from noisescope.api.reports import now
from noisescope.api.run_cost import Cost
from noisescope.atomic_write import folder_inside
from noisescope.diagnosis import gate_baseline, operators
from noisescope.diagnosis.context import GROUP, Settings, StudyContext
from noisescope.diagnosis.report import Diagnosis, Run
from noisescope.diagnosis.section_types import GateNumbers
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.jsonform import from_json, to_json
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.sensitivity import GateBaselineOptions, GateOptions
from noisescope.options.shared import ExecutionOptions
from noisescope.plans.gate import conditions_row, decide, refuse_kind, refuse_other_samples
from noisescope.plans.gate_rows import GateBaseline, headline_of
from noisescope.plans.gate_rows import GateResult as GateResult
from noisescope.plans.gate_rows import ScoreChange as ScoreChange
from noisescope.probe.noise import Gaussian
from noisescope.reports.run_changes import trend
from noisescope.reports.saved_report import Report, diagnosis_of
from noisescope.runs.store import Store
from noisescope.text_escaping import last_part
from noisescope.trials import Results, Trial


@takes_options(GateOptions, "baseline", "data")
def gate(subject: Subject, options: GateOptions) -> GateResult:
    """The verdict on a model beside the report of an earlier one: plans/gate.py holds the rules.

    On the baseline's own samples every number is compared in pairs. `conditions` lists what else differs: dtype,
    device, attention path.

    >>> result = ns.gate(subject, report, batches)  # the report of ns.diagnose(subject, batches)
    >>> result.verdict in ("pass", "undecided"), result.paired
    (True, True)
    """
    started = time.perf_counter()
    prepared, before, run = _against_baseline(subject, options)
    after = _measured(prepared, options)
    conditions = conditions_row(run, prepared.facts, (before, after))
    worse_than, limit = 1 + options.max_worse, options.max_degradation
    decision = decide(before, after, worse_than=worse_than, max_degradation=limit, kl_floor=run.kl_floor)
    return GateResult(
        **vars(decision),
        headline=headline_of(decision, conditions),
        model=subject.source if options.full_paths else last_part(subject.source),
        baseline=GateBaseline(run.model.source, run.finished),
        step=options.step,
        finished=now(),
        seconds=time.perf_counter() - started,
        conditions=conditions,
    )


def _against_baseline(subject: Subject, options: GateOptions) -> tuple[Prepared, GateNumbers, Run]:
    """The baseline's question asked of a model, its numbers and its run; refused where they can't be compared."""
    given: Any = options.baseline
    report = diagnosis_of(Report.load(given) if isinstance(given, (str, Path)) else given)
    before, run = _kept(report), report.run
    check_model(report, subject)
    prepared = _prepared(
        subject,
        GateBaselineOptions(
            data=options.source(find_data(report) if options.data is None else None),
            noise_scale=run.settings.noise_scale or 0.0,
            metric=before.metric,
            generate=run.data.measure == "generate",
            seeds=before.seeds if options.seeds is None else options.seeds,
            **options.pick("samples", "effort", "max_tokens", "slice", "full_paths"),
        ),
    )
    refuse_kind(run.data, prepared.facts.data)
    if not options.other_samples:
        refuse_other_samples(run, prepared.facts.data, (before.samples, prepared.context.sample_hashes))
    return prepared, before, run


def cost_of_gate(subject: Subject, options: GateOptions) -> Cost:
    """What a gate would cost, from one timed sample."""
    return _against_baseline(subject, options)[0].cost(_Question())


@takes_options(GateBaselineOptions, "data")
def measure_baseline(subject: Subject, options: GateBaselineOptions) -> GateNumbers:
    """What a gate compares, of one model: the section that `diagnose` keeps in its report, without the diagnosis."""
    return _measured(_prepared(subject, options), options)


def _prepared(subject: Subject, options: GateBaselineOptions) -> Prepared:
    settings = Settings(
        Gaussian(options.noise_scale),
        levels=("operator",),
        operators=(GROUP,) if options.effort == "screen" else gate_baseline.OPERATORS,
        seeds=seeds_of(options.seeds),
    )
    return prepare_run(subject, options, settings)


def _measured(prepared: Prepared, options: ExecutionOptions) -> GateNumbers:
    _, (numbers, error) = prepared.run(_Question(), options)
    if numbers is None:
        raise NoisescopeError(f"the model could not be measured: {error}")
    if options.output is not None:
        with Store(options.output) as store:
            store.note(answered=to_json(prepared.facts))
    return numbers


class _Question:
    """The numbers of a gate as a question of their own; where there are none, why."""

    def propose(self, context: StudyContext, results: Results) -> list[Trial]:
        return gate_baseline.propose(context, results) + operators.propose(context, results)

    def conclude(
        self, context: StudyContext, results: Results, notes: Sequence[str] = ()
    ) -> tuple[GateNumbers | None, str]:
        clean = context.scoring_all_tokens.answer(results, None)
        return gate_baseline.conclude(context, results), "" if clean is None else clean.error


def keep(result: GateResult, folder: str | Path) -> list[Path]:
    """Add a verdict to the history in a folder, and draw the trend of all of them again; the paths of the figures."""
    from noisescope.reports.figure_files import save_figures

    with Store(folder) as store:
        store.add_gate(to_json(result))
        history = [from_json(GateResult, row, f"gate {number}") for number, row in enumerate(store.gates(), 1)]
        damaged = store.damaged_gates
    if damaged:
        warnings.warn(f"{damaged} earlier gates in {folder} failed the checksum and are left out", stacklevel=2)
    return save_figures(trend(history), folder_inside(Path(folder), "trend"))


def _kept(report: Diagnosis) -> GateNumbers:
    """The baseline's own numbers; refused where there are none, or where they are of another noise."""
    if report.run.settings.question is not None:
        raise InvalidInput(
            f"this report is of {report.run.settings.question.name}, and a gate repeats noise: noisescope diagnose "
            f"MODEL -o baseline, without --perturbation"
        )
    if report.gate is None:
        raise InvalidInput(
            "this report has no numbers for a gate: it was made with a metric of your own, or "
            "without the operator level. Make the baseline again: noisescope diagnose MODEL -o baseline"
        )
    noise = repr(Gaussian(report.run.settings.noise_scale or 0.0))
    if report.gate.noise != noise:
        raise InvalidInput(f"a gate repeats {noise}, and this baseline was measured under {report.gate.noise}")
    return report.gate
