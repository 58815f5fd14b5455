"""How far the predicted KL of a precision plan can be trusted, and what to say where the measured one lies elsewhere.

A prediction adds up the scores of the chosen formats over modules. All modules are scored on the same few samples, so
their errors are correlated, and a report keeps no scores by sample. Whatever the correlation,

    standard error of the sum <= sum of the standard errors,

which is reported as a bound. It reflects the spread of the samples alone: neither that a plan is the least of many
noisy sums, whose own is too small for that reason, nor that predictions are of second order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import NONLINEAR
from noisescope.plans.precision import Module, Plan, scores_of
from noisescope.plans.words import counted, span
from noisescope.stats import Estimate
from noisescope.stats.continuous import student_quantile

LEVEL = 0.95


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
    half = None if bound is None else student_quantile(n, LEVEL) * bound
    return Prediction(
        value,
        None if half is None else max(value - half, 0.0),
        None if half is None else value + half,
        n,
        LEVEL,
        bound,
        # the report counts those of all its samples; formats are scored on the first
        round(data.scored_tokens * n / data.samples),
    )


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
        f"the measured mean KL {_interval(measured)} lies far {where} the predicted {_interval(prediction.estimate)}: "
        f"use the measured one. A prediction ({_evidence(prediction)}) shows which modules cost more than others, "
        "which is what the plan is based on; its size is no forecast"
    ]


def _evidence(prediction: Prediction) -> str:
    return f"{counted(prediction.n, 'sample')}, about {counted(prediction.scored_tokens, 'token')}"


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3g} {span(estimate, '.3g')}"
