"""What to do about outlier channels, by the tables of the original method notes, with what it would gain.

======================  ==============================================================================================
largest over median     W8A8
======================  ==============================================================================================
above 50                SmoothQuant, alpha 0.75
20 to 50                scales of their own (per-channel quantisation)
10 to 20                watch: one scale a tensor may do
======================  ==============================================================================================

For W4A16 it is AWQ, whatever the ratio above 10. Gains are measured on the linears that read the same channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.findings import outlier_advice

TARGETS = ("W8A8", "W4A16")
SMOOTH, APART, WATCHED = 50.0, 20.0, 10.0


def method_for(max_ratio: float, target: str = "W8A8") -> tuple[str, float | None]:
    """(method, alpha) for a module whose largest channel is `max_ratio` times the median."""
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    if max_ratio <= WATCHED:
        return "none", None
    if target == "W4A16":
        return "AWQ", None
    if max_ratio > SMOOTH:
        return "SmoothQuant", 0.75
    return ("per-channel", None) if max_ratio > APART else ("watch", None)


def recommendations(
    report: Mapping[str, Any], folds: Sequence[Mapping[str, Any]], *, target: str = "W8A8"
) -> list[dict[str, Any]]:
    """A row for each module with outliers, the largest first: the notes' method, and the measured gain of each.

    `folds` are rows of `Folded.to_dict`. Gains of a module are those of the fold that it feeds or reads; for a block's
    residual stream, of the folds of the next block, whose norms read it.
    """
    channels = (report.get("channel_analysis") or {}).get("per_layer")
    if channels is None:
        raise InvalidInput("the report has no channels: run `noisescope diagnose` with the channel level")
    rows = []
    for name, found in channels.items():
        method, alpha = method_for(found["max_ratio"], target)
        if method == "none":
            continue
        near = _near(name, found, folds)
        gains = {key: max(fold["gains"][key] for fold in near) for key in near[0]["gains"]} if near else {}
        rows.append(
            {
                "component": name,
                "max_ratio": found["max_ratio"],
                "method": method,
                "alpha": alpha,
                "gains": gains,
                "best": max(gains, key=lambda key: gains[key]) if gains else None,
                "advice": outlier_advice(target),
            }
        )
    return sorted(rows, key=lambda row: -row["max_ratio"])


def _near(name: str, found: Mapping[str, Any], folds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    touching = [fold for fold in folds if name == fold["source"] or name in fold["targets"]]
    if touching or not isinstance(found["layer"], int):
        return touching
    return [fold for fold in folds if fold["place"] == found["layer"] + 1]
