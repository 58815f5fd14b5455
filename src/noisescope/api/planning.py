"""Precision plans from a report, carried out on the model and measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope.api.precision import plan_precision
from noisescope.api.preparing import prepare
from noisescope.api.reported import check_sizes, data_of, other_numbers
from noisescope.data import DataSet, read_data
from noisescope.diagnosis.frame import Settings
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.options.groups import ExecutionOptions
from noisescope.options.planning import VerifyOptions
from noisescope.options.signatures import asks
from noisescope.plans.bit_rule import layer_sensitivity, rule_plan
from noisescope.plans.coverage import coverage_notes, planned_share
from noisescope.plans.precision import Module, Plan, modules_of, random_plans, uniform_plan
from noisescope.plans.prediction import prediction_notes, prediction_of
from noisescope.plans.verification import Verification
from noisescope.plans.words import counted
from noisescope.probe.noise import Gaussian
from noisescope.quantisation.fake import plan_injection
from noisescope.quantisation.formats import UNTOUCHED
from noisescope.reports.report import Report

RULE, RANDOM = "bit rule", "random"


@asks(VerifyOptions, "data")
def verify_precision(subject: Subject, report: Mapping[str, Any], plan: Plan, asked: VerifyOptions) -> dict[str, Any]:
    """The plan carried out by fake quantisation: KL and accuracy beside uniform, rule and random plans.

    Samples are those after the ones that formats were scored on; a note says where there are no more. Random plans are
    drawn from the same formats, at the plan's own average bits within 0.02.
    """
    check_sizes(report, subject)
    modules = modules_of(report, asked.formats)
    missing = sorted(plan.assignment.keys() - {unit.module for unit in subject.anatomy.units})
    if missing:
        raise InvalidInput(
            f"the model has no {missing[0]}: the report is of another model ({subject.source} was given)"
        )
    rivals, notes = _rivals(report, modules, plan)
    scored = report["format_scores"]["n"]
    unseen, seen_before = _unseen(data_of(report) if asked.data is None else asked.data, scored, asked.samples)
    drawn = random_plans(modules, plan.average_bits, asked.random, seed=asked.seed)
    plans = {"plan": plan, **rivals, **{f"{RANDOM} {i}": one for i, one in enumerate(drawn)}}
    prepared = prepare(
        subject,
        unseen,
        settings=Settings(Gaussian(0.05), levels=("layer",), seeds=(0,)),
        samples=asked.samples,
        calibration_samples=0,
        max_tokens=asked.max_tokens,
        slice=asked.samples,
    )
    injections = {name: plan_injection(one.assignment) for name, one in plans.items()}
    measured = prepared.run(Verification(injections), ExecutionOptions())
    rows = [_row(name, one, measured["verification"][name]) for name, one in plans.items()]
    predicted = prediction_of(report, modules, plan)
    return {
        **_result(plan, rows),
        "prediction": predicted,
        "planned_share": planned_share(report),
        "data": measured["run"]["data"],
        "notes": [
            *prediction_notes(predicted, measured["verification"]["plan"]["kl"]),
            *coverage_notes(report),
            *other_numbers(report, measured["run"]["model"]["fingerprint"]),
            *seen_before,
            *notes,
            *measured["could_not_see"],
        ],
    }


def with_precision_planned(
    subject: Subject, report: Report, average_bits: float, *, random: int = 16, samples: int = 64
) -> Report:
    """The report, and a precision plan carried out on its model."""
    plan = plan_precision(report, average_bits=average_bits)
    measured = verify_precision(subject, report, plan, random=random, samples=samples)
    rows = [row for row in measured["rows"] if not row["name"].startswith(RANDOM)]
    found = {**plan.to_dict(), "counts": plan.counts(), **measured, "rows": rows}
    found["data"] = {name: measured["data"][name] for name in ("samples", "scored_tokens", "fingerprint")}
    return Report({**report, "precision_plan": found})


def _rivals(report: Mapping[str, Any], modules: Sequence[Module], plan: Plan) -> tuple[dict[str, Plan], list[str]]:
    """Uniform plans of every format offered, and the rule of the original method notes."""
    offered = [name for name in modules[0].choices if name != UNTOUCHED]
    found = {f"uniform {name}": uniform_plan(modules, name) for name in offered}
    sensitivity = layer_sensitivity(report)
    if not sensitivity:
        return found, ["the bit rule has nothing to go by: the loss of no window could be measured"]
    found[RULE] = rule_plan(modules_of(report), sensitivity, plan.average_bits)
    return found, [found[RULE].note] if found[RULE].note else []


def _row(name: str, plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "average_bits": plan.average_bits,
        "effective_bits": plan.effective_bits,
        "predicted_kl": plan.predicted_kl,
        **measured,
    }


def _result(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers a reader asks for first, and all rows."""
    kl = {row["name"]: row["kl"]["value"] for row in rows}
    uniform = [row for row in rows if row["name"].startswith("uniform")]
    fits = [row for row in uniform if row["average_bits"] <= plan.average_bits + 1e-9]
    best = min(fits, key=lambda row: (-row["average_bits"], row["kl"]["value"]), default=None)
    drawn = [kl[row["name"]] for row in rows if row["name"].startswith(RANDOM)]
    return {
        "average_bits": plan.average_bits,
        "effective_bits": plan.effective_bits,
        "kl": kl["plan"],
        "predicted_kl": plan.predicted_kl,
        "uniform_kl": None if best is None else best["kl"]["value"],
        "uniform_format": None if best is None else best["name"].removeprefix("uniform "),
        "seeds_rule_kl": kl.get(RULE),
        "seeds_rule_bits": next((row["average_bits"] for row in rows if row["name"] == RULE), None),
        "random": {"n": len(drawn), "median_kl": statistics.median(drawn) if drawn else None},
        "rows": list(rows),
    }


def _unseen(data: Any, scored: int, samples: int) -> tuple[Any, list[str]]:
    """Samples behind those that formats were scored on; where the data holds no more, all of them and a note."""
    if isinstance(data, (str, Path)):
        data = read_data(data, limit=scored + samples)
    if not isinstance(data, DataSet):
        return data, []
    if len(data.items) > scored:
        return replace(data, items=data.items[scored:]), []
    held = f"the data holds {counted(len(data.items), 'sample')}, no more than the {scored} that formats are scored on"
    return data, [f"{held}: the plan may be measured on the very samples it was made from. Give more with --data"]
