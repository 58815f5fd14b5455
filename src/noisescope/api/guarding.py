"""Whether a model got worse than its baseline: measured, decided, kept."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noisescope.api.preparing import prepared_for, seeds_of
from noisescope.api.reported import check_model, data_of
from noisescope.api.running import Prepared
from noisescope.diagnosis import gauge, operators
from noisescope.diagnosis.frame import GROUP, Frame, Settings
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.model import Subject
from noisescope.options.diagnosing import GateOptions, GaugeOptions
from noisescope.options.groups import ExecutionOptions
from noisescope.options.signatures import asks
from noisescope.plans.comparable import conditions_row, refuse_kind, refuse_other_samples
from noisescope.plans.gate import decide
from noisescope.probe.noise import Gaussian
from noisescope.reports.report import Report
from noisescope.reports.trend import trend
from noisescope.runs.store import Store
from noisescope.trials import Results, Trial

SCHEMA_VERSION = 1


@asks(GateOptions, "baseline", "data")
def gate(subject: Subject, asked: GateOptions) -> dict[str, Any]:
    """The verdict on a model beside the report of an earlier one: plans/gate.py says how it is decided.

    On the baseline's own samples every number is compared in pairs. Under "conditions" stands what else differs:
    dtype, device, attention path.
    """
    report = Report.load(asked.baseline) if isinstance(asked.baseline, Path) else asked.baseline
    before, run = _kept(report), report["run"]
    check_model(report, subject)
    started = time.perf_counter()
    prepared = _prepared(
        subject,
        GaugeOptions(
            data=data_of(report) if asked.data is None else asked.data,
            noise_scale=run["settings"]["noise_scale"],
            metric=before["metric"],
            generate=run["data"]["measure"] == "generate",
            samples=asked.samples,
            seeds=before["seeds"] if asked.seeds is None else asked.seeds,
            effort=asked.effort,
            max_tokens=asked.max_tokens,
            slice=asked.slice,
        ),
    )
    refuse_kind(run, prepared.about)
    if not asked.other_samples:
        refuse_other_samples(run, prepared.about, (before["samples"], prepared.frame.names))
    now = _measured(prepared, asked)
    limits = {"worse_than": 1 + asked.max_worse, "max_degradation": asked.max_degradation}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": subject.source,
        "baseline": {"model": run["model"]["source"], "finished": run["finished"]},
        "step": asked.step,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - started,
        "conditions": conditions_row(run, prepared.about, (before, now)),
        **decide(before, now, **limits, kl_floor=float(run["kl_floor"])),
    }


@asks(GaugeOptions, "data")
def gauged(subject: Subject, asked: GaugeOptions) -> dict[str, Any]:
    """What a gate compares, of one model: the section that `diagnose` keeps in its report, without the diagnosis."""
    return _measured(_prepared(subject, asked), asked)


def _prepared(subject: Subject, asked: GaugeOptions) -> Prepared:
    settings = Settings(
        Gaussian(asked.noise_scale),
        levels=("operator",),
        operators=(GROUP,) if asked.effort == "screen" else gauge.OPERATORS,
        seeds=seeds_of(asked.seeds),
    )
    return prepared_for(subject, asked, settings)


def _measured(prepared: Prepared, options: ExecutionOptions) -> dict[str, Any]:
    found = prepared.run(_Gauge(), options)
    if found["gate"] is None:
        raise NoisescopeError(f"the model could not be measured: {found['error']}")
    return dict(found["gate"])


class _Gauge:
    """The pair of this question."""

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        return gauge.propose(frame, results) + operators.propose(frame, results)

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
        clean = frame.over_whole.answer(results, None)
        return {
            "schema_version": SCHEMA_VERSION,
            "gate": gauge.conclude(frame, results),
            "error": "" if clean is None else clean.error,
        }


def keep(result: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Add a verdict to the history in a folder, and draw the trend of all of them again; the paths of the figures."""
    from noisescope.reports.figures import save_figures

    with Store(folder) as store:
        store.add_gate(result)
        history = store.gates()
    return save_figures(trend(history), Path(folder) / "trend")


def _kept(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The baseline's own numbers; refused where there are none, or where they are of another noise."""
    section: Mapping[str, Any] | None = report.get("gate")
    if section is None:
        raise InvalidInput(
            "this report has no numbers for a gate: it was made by an earlier noisescope, by a metric of your own, or "
            "without the operator level. Make the baseline again: noisescope diagnose MODEL -o baseline"
        )
    noise = repr(Gaussian(report["run"]["settings"]["noise_scale"]))
    if section["noise"] != noise:
        raise InvalidInput(f"a gate repeats {noise}, and this baseline was measured under {section['noise']}")
    return section
