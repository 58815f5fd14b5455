"""The findings put to the test: the same fault in the layers a report warns of, and in those it calls robust.

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


def chosen_windows(report: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The window that a report warns of most, and the injected one that diverges least and shares no layer with it."""
    section = report.get("layer_analysis") or {}
    rows = [row for row in section.get("windows", []) if row["evidence"] == "injected" and "kl" in row]
    if len(rows) < 2:
        raise InvalidInput("the report has no two injected windows to choose from: diagnose the layer level first")
    ends = {row["layer_range"]: (row["start_layer"], row["end_layer"]) for row in rows}
    cost = {row["layer_range"]: row["kl"]["value"] for row in rows}
    points = [point for point in section["avalanche_points"] if point["sure"]]
    warned = max(points, key=lambda p: p["degradation"])["layer_range"] if points else max(cost, key=cost.__getitem__)
    first, last = ends[warned]
    apart = [name for name, (start, end) in ends.items() if end < first or start > last]
    if not apart:
        raise InvalidInput(f"every window shares a layer with {warned}: choose a smaller --window")
    return {"warned": ends[warned], "robust": ends[min(apart, key=cost.__getitem__)]}


@dataclass(frozen=True)
class Check:
    """One fault at the operators of each window."""

    name: str  # of the fault, for people
    fault: Any  # a perturbation
    windows: Mapping[str, tuple[int, int]]  # role -> (first, last) layer
    operators: tuple[str, ...] = ("linear",)

    def _injection(self, window: tuple[int, int]) -> Injection:
        layers = frozenset(range(window[0], window[1] + 1))
        return Injection(self.fault, operators=frozenset(self.operators), layers=layers, phases=frozenset({"forward"}))

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        injections = [None, *(self._injection(window) for window in self.windows.values())]
        return [trial for injection in injections for trial in frame.ask(injection, seeds=(0,))]

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
        clean = frame.answer(results, None)
        rows: list[Row] = []
        for role, window in self.windows.items():
            noisy = frame.answer(results, self._injection(window), seeds=(0,))
            row: Row = {"role": role, "start_layer": window[0], "end_layer": window[1]}
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
