"""Plans from a report, carried out on its model and measured: number formats, SmoothQuant."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisescope import demo
from noisescope.api.plans import budget_of, plan_precision, predict_precision
from noisescope.api.preparation import encode_data, prepare_run
from noisescope.data.dataset import DataSet, built_in, read_data
from noisescope.diagnosis.context import Settings
from noisescope.diagnosis.effects import divergence, ratio
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.findings.finding import counted
from noisescope.injection import Injection
from noisescope.measures.format_costs import UNTOUCHED, is_planned, plan_injection, planned_weights
from noisescope.measures.smoothquant import W8A8, Smoothed, find_folds, rounded_kl, smooth
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import input_device
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.plans import KvCacheOptions, PrecisionOptions, SmoothquantOptions, VerifyOptions
from noisescope.options.shared import DataFile, ExecutionOptions, ScoringOptions
from noisescope.plans import precision, precision_results
from noisescope.plans.gate import refuse_architecture
from noisescope.plans.kv_cache import CarriedOut, KvCachePlan, rivals
from noisescope.plans.precision import Module, Plan, modules_of
from noisescope.plans.precision_results import NamedPlan, PlanData, PlanRow, PlanScores, PrecisionPlan, Verification
from noisescope.plans.refinement import Refinement
from noisescope.plans.smoothing import BeforeAndAfter, FoldRow, recommendations
from noisescope.plans.smoothing import SmoothingPlan as SmoothingPlan
from noisescope.probe.formats import Format
from noisescope.probe.noise import Gaussian
from noisescope.progress import Phase, plan
from noisescope.reports.saved_report import Report, diagnosis_of
from noisescope.trials import Slice


@takes_options(VerifyOptions, "data")
def verify_precision(subject: Subject, report: Report | Diagnosis, plan: Plan, options: VerifyOptions) -> PrecisionPlan:
    """The plan carried out by fake quantisation: KL and score beside uniform, rule and random plans.

    Samples are those after the ones that formats were scored on; a note says where there are no more. Random plans are
    drawn from the same formats, at the plan's own average bits or near them.
    """
    found = diagnosis_of(report)
    check_sizes(found, subject)
    planned = predict_precision(found, plan, formats=options.formats)
    if missing := sorted(plan.assignment.keys() - {unit.module for unit in subject.anatomy.units}):
        other = f"the report is of another model ({subject.source} was given)"
        raise InvalidInput(f"the model has no {missing[0]}: {other}")
    modules = modules_of(found, options.formats)
    rivals = [NamedPlan("plan", "plan", plan), *_rivals(found, modules, plan)]
    rule = next((rival.plan for rival in rivals if rival.kind == "bit rule"), None)
    drawn = precision.random_plans(modules, plan.average_bits, options.random, seed=options.seed)
    rivals += [NamedPlan(f"random {i}", "random", one) for i, one in enumerate(drawn)]
    given = options.source(find_data(found) if options.data is None else None)
    given = list(given) if isinstance(given, Iterator) else given  # read twice
    scored = encode_data(subject, given, planned.prediction.n, options.max_tokens, which="test")[0]
    held_out, seen_before = _held_out(given, planned.prediction.n, options.samples)
    count, settings = options.samples, Settings(Gaussian(0.05), levels=("layer",), seeds=(0,))
    scoring = ScoringOptions(data=held_out, samples=count, max_tokens=options.max_tokens, slice=count)
    prepared = prepare_run(subject, scoring, settings)
    prepared = replace(prepared, materials=(*prepared.materials, scored))
    samples = Slice(scored.fingerprint, 0, len(scored))
    question = Verification({rival.name: plan_injection(rival.plan.assignment, samples) for rival in rivals})
    run, verified = prepared.run(question, ExecutionOptions())
    own = verified.plans["plan"]
    rows = [_row(rival, verified.plans[rival.name], own) for rival in rivals]
    notes = [
        *precision_results.prediction_notes(planned.prediction, own.divergence.mean),
        *other_weights_note(found, run.model.fingerprint),
        *seen_before,
        "the bit rule was not applied: the loss of no window could be measured" if rule is None else rule.note,
        *verified.could_not_see,
    ]
    data = PlanData(run.data.samples, run.data.scored_tokens, run.data.fingerprint)
    return precision_results.measured_plan(planned, rows, data, notes=[note for note in notes if note])


@takes_options(PrecisionOptions, "data")
def refine_precision(
    subject: Subject, report: Report | Diagnosis, plan: Plan, options: PrecisionOptions
) -> tuple[Plan, tuple[str, ...]]:
    """The plan improved at its own operating point, on the samples that formats were scored on; what that gained."""
    found = diagnosis_of(report)
    check_sizes(found, subject)
    modules, count = modules_of(found, options.formats), precision.scores_of(found).n
    given = options.source(find_data(found) if options.data is None else None)
    scoring = ScoringOptions(data=given, samples=count, max_tokens=options.max_tokens, slice=count)
    prepared = prepare_run(subject, scoring, Settings(Gaussian(0.05), levels=("layer",), seeds=(0,)))
    samples = prepared.context.test[0]
    carried_out = functools.partial(plan_injection, samples=samples)
    question = Refinement(modules, budget_of(options), plan, options.refine, samples, carried_out)
    _, refined = prepared.run(question, ExecutionOptions())
    tried = len(refined.measured) - 1
    before = f"mean KL {refined.measured[0]:.3g}"
    on = f"{counted(count, 'sample')}, the same as those that formats were scored on"
    if refined.plan == plan:
        return plan, (f"refinement tried {counted(tried, 'change')} and kept none: {before} on {on}",)
    return refined.plan, (f"refined in {counted(tried, 'round')}: {before} to {refined.kl:.3g} on {on}",)


def add_precision_plan(
    subject: Subject, report: Report, average_bits: float, *, random: int = 16, samples: int = 64
) -> Report:
    """The report, and a precision plan carried out on its model."""
    plan = plan_precision(report, average_bits=average_bits)
    measured = verify_precision(subject, report, plan, random=random, samples=samples)
    return Report(replace(report.diagnosis, precision_plan=precision_results.without_random(measured)))


@takes_options(KvCacheOptions, "data")
def verify_kv_cache(
    subject: Subject, report: Report | Diagnosis, plan: KvCachePlan, options: KvCacheOptions
) -> KvCachePlan:
    """The plan carried out: its KL and score beside every layer rounded, and first and last layers kept instead."""
    found, asked = diagnosis_of(report), plan.question
    check_model(found, subject)
    given = find_data(found) if options.data is None else options.data
    held_out, seen_before = _held_out(given, found.run.data.samples, options.samples)
    count = options.samples
    scoring = ScoringOptions(data=held_out, samples=count, max_tokens=options.max_tokens, slice=count)
    prepared = prepare_run(subject, scoring, Settings(Gaussian(0.05), levels=("layer",), seeds=(0,)))
    fmt = Format(asked.format, asked.granularity, asked.group_size, asked.asymmetric)
    chosen = rivals(plan)
    run, verified = prepared.run(Verification({name: _cache_injection(fmt, plan, k) for name, k in chosen.items()}),
                                 ExecutionOptions())  # fmt: skip
    own = verified.plans["plan"]
    rows = tuple(
        CarriedOut(name, kept, one.divergence, one.score, one.clean_score, None if name == "plan" else one.over(own))
        for name, kept in chosen.items()
        for one in [verified.plans[name]]
    )
    notes = (*plan.notes, *other_weights_note(found, run.model.fingerprint), *seen_before, *verified.could_not_see)
    data = PlanData(run.data.samples, run.data.scored_tokens, run.data.fingerprint)
    return replace(plan, rows=rows, data=data, notes=notes)


def _cache_injection(fmt: Format, plan: KvCachePlan, kept: Sequence[int]) -> Injection | None:
    """Keys and values rounded in all other layers; None where none is left."""
    rounded = frozenset(row.layer for row in plan.layers) - frozenset(kept)
    if not rounded:
        return None
    return Injection(fmt, operators=frozenset({"kv_cache"}), layers=rounded, phases=frozenset({"forward"}))


def _rivals(found: Diagnosis, modules: Sequence[Module], plan: Plan) -> Iterator[NamedPlan]:
    """Uniform plans of every format offered, and the rule of the original method notes where it has a profile."""
    for name in modules[0].choices:
        if name != UNTOUCHED:
            yield NamedPlan(f"uniform {name}", "uniform", precision.uniform_plan(modules, name), name)
    sensitivity = precision.layer_sensitivity(found)
    if sensitivity:
        yield NamedPlan("bit rule", "bit rule", precision.rule_plan(modules_of(found), sensitivity, plan.average_bits))


def _row(rival: NamedPlan, carried: PlanScores, own: PlanScores) -> PlanRow:
    plan = rival.plan
    predicted = (plan.average_bits, plan.effective_bits, plan.predicted_mean_kl)
    measured = (carried.divergence, carried.score, carried.clean_score)
    over_plan = None if rival.kind == "plan" else carried.over(own)
    return PlanRow(rival.name, rival.kind, rival.format, *predicted, *measured, over_plan)


def _held_out(data: Any, scored: int, samples: int) -> tuple[Any, list[str]]:
    """Samples behind those that formats were scored on; where the data holds no more, all of them and a note."""
    if isinstance(data, (str, Path, DataFile)):
        data = read_data(data, limit=scored + samples)
    if not isinstance(data, DataSet):
        return data, []
    if len(data.items) > scored:
        return replace(data, items=data.items[scored:]), []
    held = f"the data holds {counted(len(data.items), 'sample')}, no more than the {scored} used to choose formats"
    return data, [f"{held}: the plan may be measured on the samples it was made from. Give more with --data"]


def token_batches(subject: Subject, data: Any, samples: int, max_tokens: int, *, which: str) -> list[Tensor]:
    """Token ids [1, T] of each sequence, whatever form data comes in."""
    material = encode_data(subject, data, samples, max_tokens, which=which)[0]
    device = input_device(subject.model)
    return [
        torch.tensor([s.ids], device=device) for group in material.encoded.sequences for s in group if len(s.ids) > 1
    ]


def smooth_outliers(
    subject: Subject,
    calibration: Any = None,
    *,
    alpha: float | None = None,
    places: frozenset[int] | None = None,
    samples: int = 16,
    max_tokens: int = 256,
) -> Smoothed:
    """A smoothed copy; the model itself is left alone. `alpha` None searches one per fold, `places` None is all."""
    batches = token_batches(subject, calibration, samples, max_tokens, which="calibration")
    return smooth(subject.model, batches, alpha=alpha, places=places, anatomy=subject.anatomy)


@takes_options(SmoothquantOptions, "data")
def plan_smoothquant(subject: Subject, report: Report | Diagnosis, options: SmoothquantOptions) -> SmoothingPlan:
    """SmoothQuant carried out on a copy: W8A8 KL before and after, and advice for each module with outliers.

    The first half of the samples calibrates, on the other half the KL is measured.
    """
    alpha, target, found = options.alpha, options.target, diagnosis_of(report)
    recommendations(found, (), target=target)  # refuses a report without channels before the work begins
    check_sizes(found, subject)
    given = options.source(find_data(found) if options.data is None else None)
    batches = token_batches(subject, given, options.samples, options.max_tokens, which="test")
    if len(batches) < 2:
        raise InvalidInput("SmoothQuant needs at least two samples: one to calibrate on, one to measure on")
    half = len(batches) // 2
    measured = 2 * (len(batches) - half)  # before and after
    phases = [Phase("calibration", half), Phase("folds", len(find_folds(subject.model, batches[0], subject.anatomy)))]
    with plan(*phases, Phase("exact", measured), Phase("rounded", measured)):
        smoothed = smooth(subject.model, batches[:half], alpha=alpha, anatomy=subject.anatomy)
        before = np.array(rounded_kl(subject.model, subject.model, batches[half:], W8A8, subject.anatomy))
        after = np.array(rounded_kl(smoothed.model, subject.model, batches[half:], W8A8))
    folds = tuple(
        FoldRow(fold.source, fold.targets, fold.place, fold.norm, done.alpha, done.largest_scale, done.gains)
        for done, fold in ((done, done.fold) for done in smoothed.folds)
    )
    return SmoothingPlan(
        scheme="W8A8: int8 weights with a scale per output channel, int8 activations with a scale per token",
        alpha=alpha,
        kl=BeforeAndAfter(divergence(before), divergence(after)),
        gain=ratio(before, after),
        float_error=smoothed.float_error,
        folds=folds,
        recommendations=recommendations(found, folds, target=target),
        notes=tuple(other_weights_note(found, model_fingerprint(subject.model))),
    )


def find_data(report: Report | Diagnosis) -> DataSet | str | Path:
    """What `diagnose` takes as data: the same file, the demo's problems, or the built-in text."""
    source = diagnosis_of(report).run.data.source
    if source == "demo":
        return demo.test_file()
    if source == "built-in text":
        return built_in()
    if not Path(source).exists():
        raise InvalidInput(
            f"the report was made on {source}, which is not there (absolute paths are not kept): give the data with "
            "--data"
        )
    return source


def check_model(report: Report | Diagnosis, subject: Subject) -> None:
    """Refuse a model of another architecture or depth than the report's; its weights may be others."""
    model = diagnosis_of(report).run.model
    refuse_architecture(model, subject.anatomy.architecture, len(subject.anatomy.blocks))


def check_sizes(report: Report | Diagnosis, subject: Subject) -> None:
    """Refuse, too, a model whose linears have other sizes than the report's: plans count its weights and channels."""
    found = diagnosis_of(report)
    check_model(found, subject)
    modules = dict(subject.model.named_modules())
    planned = {u.module: planned_weights(modules[u.module]) for u in subject.anatomy.units if is_planned(u)}
    for scored in found.format_scores.modules if found.format_scores is not None else ():
        count = sum(weight.numel() for weight in planned.get(scored.module, ()))
        _refuse_size(subject, f"weights in {scored.module}", scored.parameters, count)
    for name, row in found.channel_analysis.per_layer.items() if found.channel_analysis is not None else ():
        if name in planned and planned[name][0].dim() == 2:
            _refuse_size(subject, f"output channels in {name}", row.total_channels, planned[name][0].shape[0])


def _refuse_size(subject: Subject, what: str, reported: int, found: int) -> None:
    if found != reported:
        raise InvalidInput(
            f"the report counts {reported} {what}, and {subject.source} has {found}: it is of another model. Make a "
            "report of this one: noisescope diagnose MODEL -o DIR"
        )


def other_weights_note(report: Report | Diagnosis, fingerprint: str) -> list[str]:
    """A note where a model of the same sizes has other numbers than the report's."""
    if diagnosis_of(report).run.model.fingerprint == fingerprint:
        return []
    return [
        "the model's numbers are not those that the report was made on (other weights, another dtype or config): what "
        "the report predicts may not hold for it"
    ]
