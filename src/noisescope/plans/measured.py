"""A precision plan with what was predicted and, where it was carried out, measured: the report's `precision_plan`.

A plan is judged by the typical KL of held-out samples, beside uniform plans, the bit rule and random plans of the same
bits. Two plans are compared sample by sample: the typical ratio of their KL, with its interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from noisescope.diagnosis.rows import Divergence
from noisescope.plans.precision import Plan
from noisescope.plans.prediction import Prediction
from noisescope.stats import Estimate

Kind = Literal["plan", "uniform", "bit rule", "random"]


@dataclass(frozen=True)
class Rival:
    """A plan to measure, and what it is there for: the plan itself, or one to compare it with."""

    name: str
    kind: Kind
    plan: Plan
    format: str | None = None  # of a uniform plan


@dataclass(frozen=True)
class PlanRow:
    """One plan carried out. What `predicted_mean_kl` predicts is `kl.mean`; `kl.typical` is what plans are compared by.

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
class PrecisionPlan:
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
    verified: bool
    mean_kl: float | None
    typical_kl: float | None
    uniform_typical_kl: float | None
    uniform_format: str | None
    bit_rule_typical_kl: float | None
    bit_rule_bits: float | None
    random: RandomPlans
    rows: tuple[PlanRow, ...]
    data: PlanData | None
    notes: tuple[str, ...]


def predicted_plan(
    plan: Plan, prediction: Prediction, *, planned_share: float | None, notes: Sequence[str] = ()
) -> PrecisionPlan:
    """A plan before it is carried out."""
    return PrecisionPlan(
        **vars(plan),
        counts=plan.counts(),
        prediction=prediction,
        planned_share=planned_share,
        verified=False,
        mean_kl=None,
        typical_kl=None,
        uniform_typical_kl=None,
        uniform_format=None,
        bit_rule_typical_kl=None,
        bit_rule_bits=None,
        random=RandomPlans(0, None),
        rows=(),
        data=None,
        notes=tuple(notes),
    )


def measured_plan(
    planned: PrecisionPlan, rows: Sequence[PlanRow], data: PlanData, *, notes: Sequence[str] = ()
) -> PrecisionPlan:
    """The same with what was measured; `notes` come before those it has. Rows of random plans are summed up."""
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
