"""Gates over time as two curves: divergence over the baseline's, and what noise costs. Drawn like any report's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noisescope.reports.document import Bar, Curve, Document, Section, Table
from noisescope.reports.words import Row, estimate, percent, text, whole


def trend(history: Sequence[Row]) -> Document:
    """A document of a store's gates, the oldest first: at their steps where all have one, else at their numbers."""
    steps: list[Any] = [row.get("step") for row in history]
    across = "gate" if None in steps else "step"
    places = [float(at) for at in (range(1, len(steps) + 1) if None in steps else steps)]
    # Ratios are drawn without intervals: theirs hold for all rows of a gate together, a chart's are 95 % each.
    ratios = tuple((at, Bar("", estimate(row["worst"]["ratio"]))) for at, row in zip(places, history, strict=True))
    losses = tuple((at, Bar("", estimate(_worst_loss(row)))) for at, row in zip(places, history, strict=True))
    last = history[-1] if history else {"worse_than": None, "max_degradation_allowed": None}
    body = tuple(
        (
            text(number),
            whole(row.get("step")),
            text(row["finished"]),
            text(row["verdict"]),
            text(row["worst"]["name"]),
            estimate(row["worst"]["ratio"]),
            text(percent(row["max_degradation"])),
        )
        for number, row in enumerate(history, 1)
    )
    head = (
        "gate",
        "step",
        "finished",
        "verdict",
        "worst row",
        "divergence over the baseline's",
        "accuracy lost under noise",
    )
    blocks = (
        Curve("gate-divergence", "Divergence under noise over the baseline's, the worst row", across, "ratio", ratios,
              last["worse_than"]),
        Curve("gate-degradation", "Accuracy lost under noise, the largest", across, "share of the clean accuracy",
              losses, last["max_degradation_allowed"]),
        Table("gates", head, body),
    )  # fmt: skip
    return Document("noisescope: gates over time", (), (Section("trend", "Gates over time", blocks),))


def _worst_loss(row: Row) -> Row:
    rows = [limit["degradation"] for limit in row["limits"] if limit["degradation"]["value"] is not None]
    return max(rows, key=lambda loss: float(loss["value"]), default={"value": None})
