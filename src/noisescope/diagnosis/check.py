"""The findings put to the test: the same fault in the layers a report warns of, and in others.

On samples that the diagnosis has not seen: a diagnosis that only described its own noise would fail here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noisescope.diagnosis.effects import Row, correct_looks, task_loss
from noisescope.diagnosis.frame import Frame
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.trials import Results, Trial

KEPT = ("baseline_acc", "noisy_acc", "noisy_acc_interval", "degradation", "band", "p", "p_corrected")


def chosen_windows(report: Mapping[str, Any]) -> list[Row]:
    """The window that a report warns of most, and others that share no layer with it or with each other.

    Each has its role ("warned", "least" for the one that diverges least, "between") and the report's KL.
    """
    section = report.get("layer_analysis") or {}
    rows = [row for row in section.get("windows", []) if row["evidence"] == "injected" and "kl" in row]
    if len(rows) < 2:
        raise InvalidInput("the report has no two injected windows to choose from: diagnose the layer level first")
    sure = {point["layer_range"]: point["degradation"] for point in section["avalanche_points"] if point["sure"]}
    warned = max(rows, key=lambda row: (sure.get(row["layer_range"], 0.0), row["kl"]["value"]))
    chosen = [warned]
    for row in rows:
        if all(row["start_layer"] > other["end_layer"] or row["end_layer"] < other["start_layer"] for other in chosen):
            chosen.append(row)
    if len(chosen) < 2:
        raise InvalidInput(f"every window shares a layer with {warned['layer_range']}: choose a smaller --window")
    least = min(chosen[1:], key=lambda row: row["kl"]["value"])
    roles = {id(warned): "warned", id(least): "least"}
    return [
        {
            "role": roles.get(id(row), "between"),
            "start_layer": row["start_layer"],
            "end_layer": row["end_layer"],
            "reported_kl": row["kl"]["value"],
        }
        for row in sorted(chosen, key=lambda row: row["start_layer"])
    ]


@dataclass(frozen=True)
class Check:
    """One fault at the operators of each window."""

    name: str  # of the fault, for people
    fault: Any  # a perturbation
    windows: Sequence[Row]  # of chosen_windows
    operators: tuple[str, ...] = ("linear",)

    def _injection(self, window: Row) -> Injection:
        layers = frozenset(range(window["start_layer"], window["end_layer"] + 1))
        return Injection(self.fault, operators=frozenset(self.operators), layers=layers, phases=frozenset({"forward"}))

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        injections = [None, *(self._injection(window) for window in self.windows)]
        return [trial for injection in injections for trial in frame.ask(injection, seeds=(0,))]

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
        clean = frame.answer(results, None)
        rows: list[Row] = []
        for window in self.windows:
            noisy = frame.answer(results, self._injection(window), seeds=(0,))
            row: Row = dict(window)
            if clean is None or noisy is None or clean.error or noisy.error:
                rows.append({**row, "error": next(a.error for a in (clean, noisy) if a is not None and a.error)})
                continue
            loss = task_loss(frame, clean, noisy, 1.0)
            rows.append({**row, **{name: value for name, value in loss.items() if name in KEPT}})
        correct_looks(rows)
        return {
            "schema_version": 1,
            "check": {"fault": self.name, "operators": list(self.operators), "windows": rows},
            "could_not_see": list(notes),
        }
