"""What a row of a diagnosis says for a plan: what noise there costs, and whether that is sure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noisescope.diagnosis.effects import SURE

Row = Mapping[str, Any]


def cost(row: Row) -> float:
    """Nats a token: injected where that is known, else predicted, else 0."""
    for name in ("kl", "predicted_kl"):
        if (row.get(name) or {}).get("value"):
            return float(row[name]["value"])
    return 0.0


def sure_loss(row: Row) -> float | None:
    """The share of the accuracy that noise there costs; None where it was not injected or is not sure."""
    loss: float | None = (row.get("degradation") or {}).get("value")
    return loss if row.get("evidence") == "injected" and (row.get("p_corrected") or 1.0) < SURE else None
