"""A precision plan with its prediction and, if it was run, its measurement: the report's `precision_plan`.

A plan is judged by the typical KL of held-out samples, beside uniform plans, the bit rule and random plans of the same
bits. Two plans are compared sample by sample: the typical ratio of their KL, with its interval. `frontier` says what
fewer bits cost at best: predicted KL over average bits per weight, for mixes of number formats.

A prediction adds up the scores of the chosen formats over modules. All modules are scored on the same few samples, so
their errors are correlated, and a report keeps no scores by sample. Whatever the correlation,

    standard error of the sum <= sum of the standard errors,

which is reported as a bound. It reflects the spread of the samples alone: neither that a plan is the least of many
noisy sums, whose own is too small for that reason, nor that predictions are of second order.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.diagnosis.effects import divergence, paired, ratio
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import NONLINEAR, Divergence
from noisescope.diagnosis.section_types import FormatScores
from noisescope.errors import NoisescopeError
from noisescope.findings.finding import counted, span
from noisescope.injection import Injection
from noisescope.plans.precision import Module, Plan, scores_of
from noisescope.sites import place_ranges
from noisescope.stats import Estimate
from noisescope.stats.continuous import student_quantile
from noisescope.tables import Sheet, Table, Tabular
from noisescope.trials import Results, Trial

NEARLY_ALL = 0.99  # of the weights are planned: routers and short filters need no note
LEVEL = 0.95
OVER_PLAN = "KL over the plan's: the ratio of both, sample by sample on the same samples; below 1 it diverges less"
Kind = Literal["plan", "uniform", "bit rule", "random"]


def planned_share(found: Diagnosis) -> float | None:
    """Weights that a plan is about, over all weights of the blocks; None where the blocks have none."""
    scores = scores_of(found)
    return _planned(scores) / scores.block_parameters if scores.block_parameters else None


def coverage_notes(found: Diagnosis) -> list[str]:
    """A note if a plan covers only a fraction of the weights: the average bits then count only that fraction."""
    share, scores = planned_share(found), scores_of(found)
    if share is None or share >= NEARLY_ALL:
        return []
    return [
        f"the plan covers {_planned(scores):,} of the {scores.block_parameters:,} weights in the blocks "
        f"({100 * share:.0f} %), and the average bits count only these: weights that were not scored stay at 16 bits"
    ]


def _planned(scores: FormatScores) -> int:
    return sum(row.parameters for row in scores.modules)


# -- what is predicted


@dataclass(frozen=True)
class Prediction:
    """A plan's predicted mean KL, nats per token. The interval is made from the largest standard error it may have."""

    value: float
    low: float | None
    high: float | None
    n: int
    level: float
    largest_standard_error: float | None
    scored_tokens: int  # of the samples on which formats were scored, about

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high, self.n, self.level)


def prediction_of(found: Diagnosis, modules: Sequence[Module], plan: Plan) -> Prediction:
    """The plan's predicted KL with the bound of its standard error, the interval by it, samples and scored tokens."""
    n, data = scores_of(found).n, found.run.data
    errors = [module.choices[plan.assignment[module.name]].standard_error for module in modules]
    known = [error for error in errors if error is not None]
    value, bound = plan.predicted_mean_kl, sum(known) if len(known) == len(errors) else None
    low = high = None
    if bound is not None:
        half = student_quantile(n, LEVEL) * bound
        low, high = max(value - half, 0.0), value + half
    tokens = round(data.scored_tokens * n / data.samples)  # the report counts all samples, formats have the first
    return Prediction(value, low, high, n, LEVEL, bound, tokens)


def prediction_sentence(prediction: Prediction) -> str:
    """The predicted KL in words."""
    bound = prediction.largest_standard_error
    error = "no standard error" if bound is None else f"standard error at most {bound:.2g}"
    return f"{prediction.value:.4g} ({error}; {_evidence(prediction)})"


def prediction_notes(prediction: Prediction, measured: Estimate) -> list[str]:
    """A note where the measured mean KL is more than twice the predicted, or less than half, beyond both intervals."""
    if measured.value is None or prediction.low is None or prediction.high is None:
        return []
    if measured.above(prediction.high) and measured.value > NONLINEAR * prediction.value:
        where = "above"
    elif measured.below(prediction.low) and NONLINEAR * measured.value < prediction.value:
        where = "below"
    else:
        return []
    return [
        f"the measured mean KL {_interval(measured)} lies far {where} the predicted "
        f"{_interval(prediction.estimate)}: trust the measured one. A prediction ({_evidence(prediction)}) ranks "
        f"modules by cost, which is what the plan uses; its absolute size is not a forecast"
    ]


def _evidence(prediction: Prediction) -> str:
    return f"{counted(prediction.n, 'sample')}, about {counted(prediction.scored_tokens, 'token')}"


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3g} {span(estimate, '.3g')}"


# -- the plan with its measurements


@dataclass(frozen=True)
class NamedPlan:
    """A plan to measure, and what it is there for: the plan itself, or one to compare it with."""

    name: str
    kind: Kind
    plan: Plan
    format: str | None = None  # of a uniform plan


@dataclass(frozen=True)
class PlanRow:
    """The measurement of one plan. `predicted_mean_kl` predicts `kl.mean`; plans are compared by `kl.typical`.

    `over_plan` is its KL over that of the plan, sample by sample; None for the plan itself.
    """

    name: str
    kind: Kind
    format: str | None
    average_bits: float
    effective_bits: float
    predicted_mean_kl: float
    kl: Divergence
    accuracy: Estimate
    clean_accuracy: float
    over_plan: Estimate | None


@dataclass(frozen=True)
class RandomPlans:
    """Plans drawn at random with the plan's average bits: how many, and the median of their typical KL."""

    n: int
    median_typical_kl: float | None


@dataclass(frozen=True)
class PlanData:
    """The held-out samples on which plans were measured."""

    samples: int
    scored_tokens: int
    fingerprint: str


@dataclass(frozen=True)
class PrecisionPlan(Tabular):
    """A number format for each linear with what it comes to; what was measured only where `verified`.

    KLs are in nats per token: `mean_kl` is the mean over samples, as `predicted_mean_kl` is, those with `typical` in
    their names are of a typical sample. Their intervals are in `rows`. `uniform_typical_kl` is of the format with the
    most bits that fit, and of those the one that costs least.
    """

    method: str
    assignment: Mapping[str, str]
    counts: Mapping[str, int]
    average_bits: float
    effective_bits: float
    megabytes: float
    predicted_mean_kl: float
    note: str
    prediction: Prediction
    planned_share: float | None
    verified: bool = False
    mean_kl: float | None = None
    typical_kl: float | None = None
    uniform_typical_kl: float | None = None
    uniform_format: str | None = None
    bit_rule_typical_kl: float | None = None
    bit_rule_bits: float | None = None
    random: RandomPlans = RandomPlans(0, None)
    rows: tuple[PlanRow, ...] = ()
    data: PlanData | None = None
    notes: tuple[str, ...] = ()

    def named(self, form: str) -> list[str]:
        """The modules of one format, those of several layers together: "model.layers.{0-2,5}.mlp.up_proj"."""
        layers: dict[str, list[int]] = {}
        for module in (module for module, chosen in self.assignment.items() if chosen == form):
            before, *rest = re.split(r"\.(\d+)\.", module, maxsplit=1)
            layers.setdefault(f"{before}.*.{rest[1]}" if rest else module, []).extend(map(int, rest[:1]))
        ranges = {name: place_ranges(found) for name, found in layers.items()}
        return [name.replace("*", f"{{{ranges[name]}}}" if len(layers[name]) > 1 else ranges[name]) for name in layers]

    def sheet(self) -> Sheet:
        modules = Table(("module", "format"), tuple(self.assignment.items()))
        tables = {"modules": modules, "plans": Table.of(PlanRow, self.rows)}
        title = f"{self.method}: {self.average_bits:.3g} bits per weight, {self.megabytes:.3g} MB"
        counts = ", ".join(f"{name}: {counted(count, 'module')}" for name, count in self.counts.items())
        lines = (f"{counts}.", f"Predicted mean KL {prediction_sentence(self.prediction)}.", *self.notes)
        if not self.verified:
            return Sheet(title, tables, {"module": "module", "format": "format"}, lines)
        compared = Table.of(PlanRow, (row for row in self.rows if row.kind != "random"))
        heads = {"name": "plan", "average_bits": "bits", "kl_typical": "typical KL", "accuracy": "score"}
        lines = (*lines[:2], f"{OVER_PLAN}.", *self.notes)
        return Sheet(title, tables, heads | {"over_plan": "KL over the plan's"}, lines, compared)


def predicted_plan(
    plan: Plan, prediction: Prediction, *, planned_share: float | None, notes: Sequence[str] = ()
) -> PrecisionPlan:
    """A plan before it is measured."""
    return PrecisionPlan(
        **vars(plan), counts=plan.counts(), prediction=prediction, planned_share=planned_share, notes=tuple(notes)
    )


def measured_plan(
    planned: PrecisionPlan, rows: Sequence[PlanRow], data: PlanData, *, notes: Sequence[str] = ()
) -> PrecisionPlan:
    """The same with its measurement; `notes` come before its own. Rows of random plans are summarised."""
    own = next(row for row in rows if row.kind == "plan")
    rule = next((row for row in rows if row.kind == "bit rule"), None)
    uniform = _best_uniform(rows, planned.average_bits)
    drawn = [row.kl.typical.value for row in rows if row.kind == "random" and row.kl.typical.value is not None]
    return replace(
        planned,
        verified=True,
        mean_kl=own.kl.mean.value,
        typical_kl=own.kl.typical.value,
        uniform_typical_kl=None if uniform is None else uniform.kl.typical.value,
        uniform_format=None if uniform is None else uniform.format,
        bit_rule_typical_kl=None if rule is None else rule.kl.typical.value,
        bit_rule_bits=None if rule is None else rule.average_bits,
        random=RandomPlans(len(drawn), statistics.median(drawn) if drawn else None),
        rows=tuple(rows),
        data=data,
        notes=(*notes, *planned.notes),
    )


def without_random(plan: PrecisionPlan) -> PrecisionPlan:
    """For a report: random plans stay as a count and a median."""
    return replace(plan, rows=tuple(row for row in plan.rows if row.kind != "random"))


def _best_uniform(rows: Sequence[PlanRow], average_bits: float) -> PlanRow | None:
    fits = [row for row in rows if row.kind == "uniform" and row.average_bits <= average_bits + 1e-9]
    return min(
        fits,
        key=lambda row: (-row.average_bits, float("inf") if row.kl.typical.value is None else row.kl.typical.value),
        default=None,
    )


# -- plans carried out on the model, all on the same samples


@dataclass(frozen=True)
class PlanScores:
    """The measurement of one plan: KL and score of each sample, with the score of the unmodified model."""

    kl: Array
    accuracy: Array
    clean_accuracy: Array

    @property
    def divergence(self) -> Divergence:
        return divergence(self.kl)

    @property
    def score(self) -> Estimate:
        return stats.mean(self.accuracy)

    @property
    def clean_score(self) -> float:
        return float(self.clean_accuracy.mean())

    def over(self, other: PlanScores) -> Estimate:
        """The typical ratio of this plan's KL to another's on the same sample."""
        return ratio(self.kl, other.kl)


@dataclass(frozen=True)
class VerifiedPlans:
    """The measured plans by name, and what could not be measured."""

    plans: Mapping[str, PlanScores]
    could_not_see: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """Plans by name as injections (None: nothing is rounded); a diagnosis of KL and score under each."""

    injections: Mapping[str, Injection | None]
    phase: ClassVar[str] = "precision plans"

    def propose(self, frame: StudyContext, results: Results) -> list[Trial]:
        asked = dict.fromkeys([None, *self.injections.values()])
        return [trial for injection in asked for trial in frame.ask(injection, seeds=(0,))]

    def conclude(self, frame: StudyContext, results: Results, notes: Sequence[str] = ()) -> VerifiedPlans:
        plans = {name: self._carried(frame, results, injection) for name, injection in self.injections.items()}
        return VerifiedPlans(plans, tuple(notes))

    def _carried(self, frame: StudyContext, results: Results, injection: Injection | None) -> PlanScores:
        clean = frame.answer(results, None)
        rounded = clean if injection is None else frame.answer(results, injection, seeds=(0,))
        assert clean is not None and rounded is not None
        for answer in (clean, rounded):
            if answer.error:
                raise NoisescopeError(f"a plan could not be run: {answer.error}")
        before, after = paired(frame, clean, rounded)
        kl = np.zeros(len(before)) if injection is None else rounded.mean("kl")
        return PlanScores(kl, after.mean(axis=1), before)


def frontier(modules: Sequence[Module]) -> list[tuple[float, float]]:
    """(average bits, predicted KL) from the fewest bits to the most, each bit spent where it gains most.

    The lower convex hull of all plans: what lies between two of its points an optimal plan may undercut a little.
    """
    weights = sum(module.parameters for module in modules)
    hulls = [_hull(module, weights) for module in modules]
    bits, cost = (sum(hull[0][at] for hull in hulls) for at in (0, 1))
    steps = [(b[0] - a[0], b[1] - a[1]) for hull in hulls for a, b in itertools.pairwise(hull)]
    found = [(bits, cost)]
    for more, gain in sorted(steps, key=lambda step: step[1] / step[0]):
        bits, cost = bits + more, cost + gain
        found.append((bits, cost))
    return found


def _hull(module: Module, weights: int) -> list[tuple[float, float]]:
    """The formats of a module that a convex trade of bits for KL would use, from the fewest bits."""
    share = module.parameters / weights
    points = sorted((choice.bits * share, choice.predicted_kl) for choice in module.choices.values())
    hull: list[tuple[float, float]] = []
    for bits, cost in points:
        if hull and cost >= hull[-1][1]:  # no gain
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (bits, cost)):
            hull.pop()
        hull.append((bits, cost))
    return hull


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
