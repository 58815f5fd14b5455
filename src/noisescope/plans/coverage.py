"""How much of a model a precision plan covers: the linears of its blocks, out of all weights there."""

from __future__ import annotations

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.sections import FormatScores
from noisescope.plans.precision import scores_of

NEARLY_ALL = 0.99  # routers and short filters need no note


def planned_share(found: Diagnosis) -> float | None:
    """Weights that a plan is about, over all weights of the blocks; None where the blocks have none."""
    scores = scores_of(found)
    return _planned(scores) / scores.block_parameters if scores.block_parameters else None


def coverage_notes(found: Diagnosis) -> list[str]:
    """A note where a plan covers only a fraction of the weights: average bits are then of that fraction."""
    share, scores = planned_share(found), scores_of(found)
    if share is None or share >= NEARLY_ALL:
        return []
    return [
        f"the plan covers {_planned(scores):,} of the {scores.block_parameters:,} weights of the blocks "
        f"({100 * share:.0f} %), and average bits are of these alone: weights that are not in a linear module, such as "
        "experts stored in one tensor, stay at 16 bits"
    ]


def _planned(scores: FormatScores) -> int:
    return sum(row.parameters for row in scores.modules)
