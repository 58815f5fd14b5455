"""Tests the findings: the same fault in the layers a report warns about, and in others.

It uses samples that the diagnosis has not seen: a diagnosis that only described its own noise would fail here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.effects import correct_for_comparisons, task_loss
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Effect, WindowEffect, as_row
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


@dataclass(frozen=True)
class ChosenWindow:
    """Layers to break: those the report warns about most, those that diverge least, or others in between."""

    role: Literal["warned", "least", "between"]
    start_layer: int
    end_layer: int
    reported_kl: float


@dataclass(frozen=True, kw_only=True)
class CheckedWindow(ChosenWindow, Effect):
    """The effect of the fault in one window."""


@dataclass(frozen=True)
class CheckResult:
    """One fault in several windows, on samples that the diagnosis has not seen."""

    fault: str
    operators: tuple[str, ...]
    samples: int
    windows: tuple[CheckedWindow, ...]


def chosen_windows(report: Diagnosis) -> list[ChosenWindow]:
    """The window that a report warns of most, and others that share no layer with it or with each other."""
    section = report.layer_analysis
    rows = [] if section is None else [row for row in section.windows if row.injected and row.kl is not None]
    if section is None or len(rows) < 2:
        raise InvalidInput(
            "the report has fewer than two injected windows to choose from: run diagnose with the layer level first"
        )
    points = {point.layer_range: point.degradation.value or 0.0 for point in section.avalanche_points if point.decided}
    warned = max(rows, key=lambda row: (points.get(row.layer_range, 0.0), row.nats))
    chosen: list[WindowEffect] = [warned]
    for row in rows:
        if not any(row.shares_layers_with(other) for other in chosen):
            chosen.append(row)
    if len(chosen) < 2:
        raise InvalidInput(f"every window shares a layer with {warned.layer_range}: choose a smaller --window")
    least = min(chosen[1:], key=lambda row: row.nats)
    return [
        ChosenWindow(
            "warned" if row is warned else "least" if row is least else "between",
            row.start_layer,
            row.end_layer,
            row.nats,
        )
        for row in sorted(chosen, key=lambda row: row.start_layer)
    ]


@dataclass(frozen=True)
class FaultCheck:
    """One fault at the operators of each window."""

    name: str  # of the fault, for people
    fault: Any  # a perturbation
    windows: Sequence[ChosenWindow]
    operators: tuple[str, ...] = ("linear",)
    phase: ClassVar[str] = "simulated faults"

    def _injection(self, window: ChosenWindow) -> Injection:
        layers = frozenset(range(window.start_layer, window.end_layer + 1))
        return Injection(self.fault, operators=frozenset(self.operators), layers=layers, phases=frozenset({"forward"}))

    def propose(self, context: StudyContext, results: Results) -> list[Trial]:
        injections = [None, *(self._injection(window) for window in self.windows)]
        return [trial for injection in injections for trial in context.ask(injection, seeds=(0,))]

    def conclude(self, context: StudyContext, results: Results, notes: Sequence[str] = ()) -> CheckResult:
        effects = correct_for_comparisons([self._effect(context, results, window) for window in self.windows])
        rows = [as_row(row, CheckedWindow, **vars(window)) for row, window in zip(effects, self.windows, strict=True)]
        return CheckResult(self.name, self.operators, context.test[-1].stop, tuple(rows))

    def _effect(self, context: StudyContext, results: Results, window: ChosenWindow) -> Effect:
        clean, noisy = context.answer(results, None), context.answer(results, self._injection(window), seeds=(0,))
        assert clean is not None and noisy is not None
        failed = clean.error or noisy.error
        if failed:
            return Effect(evidence="failed", metric=context.metric_name, error=failed)
        return replace(task_loss(context, clean, noisy, 1.0, comparisons=len(self.windows)), evidence="injected")
