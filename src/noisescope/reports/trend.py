"""Gates over time as two curves: divergence over the baseline's, and what noise costs. Drawn like any report's."""

from __future__ import annotations

from collections.abc import Sequence

from noisescope.plans.gate_rows import GateResult
from noisescope.reports.document import Bar, Cell, Curve, Document, Section, Table
from noisescope.reports.words import estimate, percent, plain, text, whole

HEAD = ("gate", "step", "finished", "verdict", "worst row", "divergence over the baseline's", "score lost under noise")


def trend(history: Sequence[GateResult]) -> Document:
    """A document of a store's gates, the oldest first: at their steps where all have one, else at their numbers."""
    steps = [gate.step for gate in history if gate.step is not None]
    numbered = len(steps) < len(history)
    places = [float(at) for at in (range(1, len(history) + 1) if numbered else steps)]
    across, last = "gate" if numbered else "step", history[-1] if history else None
    # Drawn without intervals: those of a gate hold for all its rows together, a chart's are 95 % each.
    ratios = _points(places, [gate.worst.ratio.value for gate in history])
    losses = _points(places, [gate.max_degradation for gate in history])
    blocks = (
        Curve("gate-divergence", "Divergence under noise over the baseline's, the worst row", across, "ratio", ratios,
              None if last is None else last.worse_than),
        Curve("gate-degradation", "Score lost under noise, the largest", across, "share of the clean score", losses,
              None if last is None else last.max_degradation_allowed),
        Table("gates", HEAD, tuple(_row(number, gate) for number, gate in enumerate(history, 1))),
    )  # fmt: skip
    return Document("noisescope: gates over time", (), (Section("trend", "Gates over time", blocks),))


def _points(places: Sequence[float], values: Sequence[float | None]) -> tuple[tuple[float, Bar], ...]:
    return tuple((at, Bar("", plain(value))) for at, value in zip(places, values, strict=True))


def _row(number: int, gate: GateResult) -> tuple[Cell, ...]:
    return (
        text(number),
        whole(gate.step),
        text(gate.finished),
        text(gate.headline),
        text(gate.worst.name),
        estimate(gate.worst.ratio),
        text(percent(gate.max_degradation)),
    )
