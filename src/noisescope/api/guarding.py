"""Whether a model got worse than its baseline: measured, decided, kept."""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescope.api.reported import check_model, data_of, diagnosis_of
from noisescope.diagnosis import gauge, operators
from noisescope.diagnosis.frame import GROUP, Frame
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.sections import GateNumbers
from noisescope.errors import InvalidInput, NoisescopeError, unknown
from noisescope.findings import LIMITS
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.plans.comparable import conditions_row, refuse_kind, refuse_other_samples
from noisescope.plans.gate import decide, refuse_limits
from noisescope.plans.gate_rows import GateBaseline, GateResult, headline_of
from noisescope.preparation import Options, Prepared, prepare_diagnosis
from noisescope.probe.noise import Gaussian
from noisescope.reports.report import Report
from noisescope.reports.trend import trend
from noisescope.runs.store import Store
from noisescope.trials import Results, Trial

EFFORTS = ("screen", "standard")


def gate(
    subject: Subject,
    baseline: Report | Diagnosis | str | Path,
    data: Any = None,
    *,
    samples: int = 50,
    seeds: int | Sequence[int] | None = None,
    effort: str = "screen",
    worse_than: float = LIMITS["gate_worse_than_baseline"],
    max_degradation: float = LIMITS["gate_degradation"],
    other_samples: bool = False,
    max_tokens: int = 256,
    slice_samples: int = 50,
    step: int | None = None,
    options: Options | None = None,
) -> GateResult:
    """The verdict on a model beside the report of an earlier one: plans/gate.py says how it is decided.

    `effort` "screen" predicts what noise does in every operator and injects it into all products once per seed;
    "standard" injects it into every operator, so that the limit on the score holds for each. `data` is the baseline's
    unless given; the same samples are compared in pairs. `other_samples` says that the data hold others from the same
    source, which are refused without it. Seeds are the baseline's, too. `conditions` lists what else differs: dtype,
    device, attention path.
    """
    refuse_limits(worse_than, max_degradation)
    report = diagnosis_of(Report.load(baseline) if isinstance(baseline, (str, Path)) else baseline)
    before, run = _kept(report), report.run
    check_model(report, subject)
    started = time.perf_counter()
    prepared = _prepared(
        subject,
        data_of(report) if data is None else data,
        noise_scale=run.settings.noise_scale,
        metric=before.metric,
        generate=run.data.measure == "generate",
        samples=samples,
        seeds=before.seeds if seeds is None else seeds,
        effort=effort,
        max_tokens=max_tokens,
        slice_samples=slice_samples,
    )
    refuse_kind(run.data, prepared.asked.data)
    if not other_samples:
        refuse_other_samples(run.data, prepared.asked.data, (before.samples, prepared.frame.names))
    now = _measured(prepared, options)
    conditions = conditions_row(run, prepared.asked, (before, now))
    decision = decide(before, now, worse_than=worse_than, max_degradation=max_degradation, kl_floor=run.kl_floor)
    return GateResult(
        **vars(decision),
        headline=headline_of(decision, conditions),
        model=subject.source,
        baseline=GateBaseline(run.model.source, run.finished),
        step=step,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        conditions=conditions,
    )


def gauged(subject: Subject, data: Any, *, options: Options | None = None, **asked: Any) -> GateNumbers:
    """What a gate compares, of one model: the section that `diagnose` keeps in its report, without the diagnosis."""
    return _measured(_prepared(subject, data, **asked), options)


def _prepared(
    subject: Subject, data: Any, *, noise_scale: float = 0.05, effort: str = "screen", **asked: Any
) -> Prepared:
    if effort not in EFFORTS:
        raise unknown("effort", effort, EFFORTS)
    return prepare_diagnosis(
        subject,
        data,
        perturbation=Gaussian(noise_scale),
        levels=("operator",),
        operators=(GROUP,) if effort == "screen" else gauge.OPERATORS,
        **asked,
    )


def _measured(prepared: Prepared, options: Options | None) -> GateNumbers:
    _, found = prepared.run(_Question(), options or Options())
    if found.numbers is None:
        raise NoisescopeError(f"the model could not be measured: {found.error}")
    return found.numbers


@dataclass(frozen=True)
class _Found:
    """What a gate compares, or why there is none."""

    numbers: GateNumbers | None
    error: str


class _Question:
    """The numbers of a gate as a question of their own."""

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        return gauge.propose(frame, results) + operators.propose(frame, results)

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> _Found:
        clean = frame.over_whole.answer(results, None)
        return _Found(gauge.conclude(frame, results), "" if clean is None else clean.error)


def keep(result: GateResult, folder: str | Path) -> list[Path]:
    """Add a verdict to the history in a folder, and draw the trend of all of them again; the paths of the figures."""
    from noisescope.reports.figures import save_figures

    with Store(folder) as store:
        store.add_gate(to_json(result))
        history = store.gates()
        damaged = store.damaged_gates
    if damaged:
        warnings.warn(f"{damaged} earlier gates in {folder} failed the checksum and are left out", stacklevel=2)
    return save_figures(trend(history), Path(folder) / "trend")


def _kept(report: Diagnosis) -> GateNumbers:
    """The baseline's own numbers; refused where there are none, or where they are of another noise."""
    if report.gate is None:
        raise InvalidInput(
            "this report has no numbers for a gate: it was made with a metric of your own, or without the operator "
            "level. Make the baseline again: noisescope diagnose MODEL -o baseline"
        )
    noise = repr(Gaussian(report.run.settings.noise_scale))
    if report.gate.noise != noise:
        raise InvalidInput(f"a gate repeats {noise}, and this baseline was measured under {report.gate.noise}")
    return report.gate
