"""How far the predicted KL of a precision plan can be trusted, and what to say where the measured one lies elsewhere.

A prediction adds up the scores of the chosen formats over modules. All modules are scored on the same few samples, so
their errors go together, and a report keeps no scores by sample. Whatever the correlation,

    standard error of the sum <= sum of the standard errors,

which is told as a bound. It knows the spread of the samples alone: not that a plan is the least of many noisy sums,
whose own is too small for that reason, nor that predictions are of second order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.diagnosis.effects import PARTED, Row
from noisescope.plans.precision import Module, Plan
from noisescope.plans.words import counted, span
from noisescope.stats.continuous import student_quantile

LEVEL = 0.95


def prediction_of(report: Mapping[str, Any], modules: Sequence[Module], plan: Plan) -> Row:
    """The plan's predicted KL with the bound of its standard error, the interval by it, samples and scored tokens."""
    n, data = report["format_scores"]["n"], report["run"]["data"]
    errors = [module.choices[plan.assignment[module.name]].standard_error for module in modules]
    known = [error for error in errors if error is not None]
    value, bound = plan.predicted_kl, sum(known) if len(known) == len(errors) else None
    half = None if bound is None else student_quantile(n, LEVEL) * bound
    return {
        "value": value,
        "low": None if half is None else max(value - half, 0.0),
        "high": None if half is None else value + half,
        "n": n,
        "level": LEVEL,
        "largest_standard_error": bound,
        # the report counts those of all its samples; formats are scored on the first
        "scored_tokens": round(data["scored_tokens"] * n / data["samples"]),
    }


def prediction_told(prediction: Row) -> str:
    """The predicted KL in words."""
    bound = prediction["largest_standard_error"]
    error = "no standard error" if bound is None else f"standard error at most {bound:.2g}"
    return f"{prediction['value']:.4g} ({error}; {_evidence(prediction)})"


def prediction_notes(prediction: Row, measured: Row) -> list[str]:
    """Said where both intervals lie apart, and the measured KL is more than twice the predicted, or less than half."""
    ends = (prediction["low"], prediction["high"], measured["low"], measured["high"])
    if any(end is None for end in ends):
        return []
    if measured["low"] > prediction["high"] and measured["value"] > PARTED * prediction["value"]:
        where = "above"
    elif measured["high"] < prediction["low"] and PARTED * measured["value"] < prediction["value"]:
        where = "below"
    else:
        return []
    return [
        f"the measured KL {_interval(measured)} lies far {where} the predicted {_interval(prediction)}: go by the "
        f"measured. A prediction ({_evidence(prediction)}) tells which modules cost more than others, which is what "
        "the plan stands on; its size is no forecast"
    ]


def _evidence(prediction: Row) -> str:
    return f"{counted(prediction['n'], 'sample')}, about {counted(prediction['scored_tokens'], 'token')}"


def _interval(row: Row) -> str:
    return f"{row['value']:.3g} {span(row, '.3g')}"
