"""Gates over time as two curves: divergence over the baseline's, and what noise costs. Drawn like any report's."""

from __future__ import annotations

from collections.abc import Sequence

from noisescope.reports.document import Bar, Curve, Document, Section, Table
from noisescope.reports.words import Row, estimate, percent, text


def trend(history: Sequence[Row]) -> Document:
    """A document of a store's gates, the oldest first; a gate without a step of its own stands at its number."""
    places = [float(at if row.get("step") is None else row["step"]) for at, row in enumerate(history, 1)]
    across = "gate" if all(row.get("step") is None for row in history) else "step"
    # Ratios are drawn without intervals: theirs hold for all rows of a gate together, a chart's are 95 % each.
    ratios = tuple((at, Bar("", estimate(row["worst"]["ratio"]))) for at, row in zip(places, history, strict=True))
    losses = tuple((at, Bar("", estimate(_worst_loss(row)))) for at, row in zip(places, history, strict=True))
    last = history[-1] if history else {"worse_than": None, "max_degradation_allowed": None}
    body = tuple(
        (
            text(f"{at:g}"),
            text(row["finished"]),
            text(row["verdict"]),
            text(row["worst"]["name"]),
            estimate(row["worst"]["ratio"]),
            text(percent(row["max_degradation"])),
        )
        for at, row in zip(places, history, strict=True)
    )
    head = (across, "finished", "verdict", "worst row", "divergence over the baseline's", "accuracy lost under noise")
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
