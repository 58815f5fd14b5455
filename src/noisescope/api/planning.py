"""Precision plans from a report, carried out on the model and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope.api.precision import plan_precision, predicted_precision
from noisescope.api.preparing import prepare
from noisescope.api.reported import check_sizes, data_of, other_numbers
from noisescope.data import DataSet, read_data
from noisescope.diagnosis.frame import Settings
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.options.groups import ExecutionOptions
from noisescope.options.planning import VerifyOptions
from noisescope.options.signatures import asks
from noisescope.plans.bit_rule import layer_sensitivity, rule_plan
from noisescope.plans.measured import PlanData, PlanRow, PrecisionPlan, Rival, measured_plan, without_random
from noisescope.plans.precision import Module, Plan, modules_of, random_plans, uniform_plan
from noisescope.plans.prediction import prediction_notes
from noisescope.plans.verification import Carried, Verification
from noisescope.plans.words import counted
from noisescope.probe.noise import Gaussian
from noisescope.quantisation.fake import plan_injection
from noisescope.quantisation.formats import UNTOUCHED
from noisescope.reports.report import Report, diagnosis_of


@asks(VerifyOptions, "data")
def verify_precision(subject: Subject, report: Report | Diagnosis, plan: Plan, asked: VerifyOptions) -> PrecisionPlan:
    """The plan carried out by fake quantisation: KL and score beside uniform, rule and random plans.

    Samples are those after the ones that formats were scored on; a note says where there are no more. Random plans are
    drawn from the same formats, at the plan's own average bits within 0.02.
    """
    found = diagnosis_of(report)
    check_sizes(found, subject)
    planned = predicted_precision(found, plan, formats=asked.formats)
    missing = sorted(plan.assignment.keys() - {unit.module for unit in subject.anatomy.units})
    if missing:
        raise InvalidInput(
            f"the model has no {missing[0]}: the report is of another model ({subject.source} was given)"
        )
    modules = modules_of(found, asked.formats)
    rivals = [Rival("plan", "plan", plan), *_rivals(found, modules, plan)]
    drawn = random_plans(modules, plan.average_bits, asked.random, seed=asked.seed)
    rivals += [Rival(f"random {i}", "random", one) for i, one in enumerate(drawn)]
    given = data_of(found) if asked.data is None else asked.data
    held_out, seen_before = _held_out(given, planned.prediction.n, asked.samples)
    prepared = prepare(
        subject,
        held_out,
        settings=Settings(Gaussian(0.05), levels=("layer",), seeds=(0,)),
        samples=asked.samples,
        calibration_samples=0,
        max_tokens=asked.max_tokens,
        slice=asked.samples,
    )
    question = Verification({rival.name: plan_injection(rival.plan.assignment) for rival in rivals})
    run, verified = prepared.run(question, ExecutionOptions())
    own = verified.plans["plan"]
    rows = [_row(rival, verified.plans[rival.name], own) for rival in rivals]
    notes = [
        *prediction_notes(planned.prediction, own.divergence.mean),
        *other_numbers(found, run.model.fingerprint),
        *seen_before,
        *_rule_notes(rivals),
        *verified.could_not_see,
    ]
    return measured_plan(
        planned, rows, PlanData(run.data.samples, run.data.scored_tokens, run.data.fingerprint), notes=notes
    )


def with_precision_planned(
    subject: Subject, report: Report, average_bits: float, *, random: int = 16, samples: int = 64
) -> Report:
    """The report, and a precision plan carried out on its model."""
    plan = plan_precision(report, average_bits=average_bits)
    measured = verify_precision(subject, report, plan, random=random, samples=samples)
    return Report(replace(report.diagnosis, precision_plan=without_random(measured)))


def _rivals(found: Diagnosis, modules: Sequence[Module], plan: Plan) -> Iterator[Rival]:
    """Uniform plans of every format offered, and the rule of the original method notes where it has a profile."""
    for name in modules[0].choices:
        if name != UNTOUCHED:
            yield Rival(f"uniform {name}", "uniform", uniform_plan(modules, name), name)
    sensitivity = layer_sensitivity(found)
    if sensitivity:
        yield Rival("bit rule", "bit rule", rule_plan(modules_of(found), sensitivity, plan.average_bits))


def _rule_notes(rivals: Sequence[Rival]) -> list[str]:
    rule = next((rival.plan for rival in rivals if rival.kind == "bit rule"), None)
    if rule is None:
        return ["the bit rule was not applied: the loss of no window could be measured"]
    return [rule.note] if rule.note else []


def _row(rival: Rival, carried: Carried, own: Carried) -> PlanRow:
    plan = rival.plan
    return PlanRow(
        rival.name,
        rival.kind,
        rival.format,
        plan.average_bits,
        plan.effective_bits,
        plan.predicted_mean_kl,
        carried.divergence,
        carried.score,
        carried.clean_score,
        None if rival.kind == "plan" else carried.over(own),
    )


def _held_out(data: Any, scored: int, samples: int) -> tuple[Any, list[str]]:
    """Samples behind those that formats were scored on; where the data holds no more, all of them and a note."""
    if isinstance(data, (str, Path)):
        data = read_data(data, limit=scored + samples)
    if not isinstance(data, DataSet):
        return data, []
    if len(data.items) > scored:
        return replace(data, items=data.items[scored:]), []
    held = f"the data holds {counted(len(data.items), 'sample')}, no more than the {scored} used to choose formats"
    return data, [f"{held}: the plan may be measured on the samples it was made from. Give more with --data"]
