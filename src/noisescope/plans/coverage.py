"""How much of a model a precision plan covers: the linears of its blocks, out of all weights there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEARLY_ALL = 0.99  # routers and short filters are no news


def planned_share(report: Mapping[str, Any]) -> float | None:
    """Weights that a plan is about, over all weights of the blocks; None where the report does not count the latter."""
    planned, held = _counts(report)
    return planned / held if held else None


def coverage_notes(report: Mapping[str, Any]) -> list[str]:
    """Said where much of the model is in no plan: bits on average are then of a part."""
    share = planned_share(report)
    if share is None or share >= NEARLY_ALL:
        return []
    planned, held = _counts(report)
    return [
        f"the plan covers {planned:,} of the {held:,} weights of the blocks ({100 * share:.0f} %), and average bits "
        "are of these alone: what is no linear of its own, such as experts held as one tensor, stays at 16 bits"
    ]


def _counts(report: Mapping[str, Any]) -> tuple[int, int]:
    section = report["format_scores"]
    return sum(row["parameters"] for row in section["modules"]), section.get("block_parameters", 0)
