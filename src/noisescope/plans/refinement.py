"""A precision plan improved at its own operating point: screened, changed, measured, kept where its KL is lower.

Scores of single linears leave out how their errors act together. So the plan is carried out, and one backward gives how
its KL changes with the format of each linear (measures/format_slopes.py). With s the slope of a change from format a to
b, and c the scores of these formats, whose errors are taken as independent of each other,

    predicted change of KL = s + k (c_a + c_b),     k = KL measured / KL predicted, of the first plan.

The best change within the budget that touches at most a share of the weights is measured the same way. It is kept if
its KL is lower on the samples that score, and the next one may touch twice as many weights; else half as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from noisescope.diagnosis.context import StudyContext
from noisescope.errors import NoisescopeError
from noisescope.injection import Injection
from noisescope.plans.precision import Budget, Module, Plan, plan_of, solve
from noisescope.trials import Result, Results, Slice, Trial

FIRST_SHARE = 0.25  # of the weights may change at once, at first


@dataclass(frozen=True)
class Refined:
    """The best plan found, and the mean KL of every plan that was measured, in order; the first is the one given."""

    plan: Plan
    kl: float
    measured: tuple[float, ...]


@dataclass(frozen=True)
class Refinement:
    """Rounds of screening a plan at its operating point, on one slice of samples."""

    modules: Sequence[Module]
    budget: Budget
    start: Plan
    rounds: int
    samples: Slice
    injection: Callable[[Mapping[str, str]], Injection | None]  # that carries a plan out
    phase: ClassVar[str] = "refining the plan"
    _solved: dict[tuple[str, float], Plan] = field(default_factory=dict, compare=False)  # every wave asks again

    def propose(self, frame: StudyContext, results: Results) -> list[Trial]:
        try:
            _, asked = self._replayed(frame, results)
        except NoisescopeError:  # a failed trial: conclude reports it
            return []
        return [] if asked is None else [asked]

    def conclude(self, frame: StudyContext, results: Results, notes: Sequence[str] = ()) -> Refined:
        found, _ = self._replayed(frame, results)
        assert found is not None
        return found

    def trial(self, frame: StudyContext, assignment: Mapping[str, str]) -> Trial:
        formats = tuple(self.modules[0].choices)
        return Trial(frame.conditions, "format_slopes", self.samples, self.injection(assignment), {"formats": formats})

    def _replayed(self, frame: StudyContext, results: Results) -> tuple[Refined | None, Trial | None]:
        """What the results so far come to, and the trial that is missing."""
        best, tried, share = self.start, {tuple(self.start.assignment.items())}, FIRST_SHARE
        asked = self.trial(frame, best.assignment)
        if asked.id not in results:
            return None, asked
        at = _checked(results[asked.id])
        first = lowest = mean_kl(at)
        measured = [first]
        scale = first / self.start.predicted_mean_kl if self.start.predicted_mean_kl > 0 else 1.0
        smallest = min(module.parameters for module in self.modules) / sum(m.parameters for m in self.modules)
        while len(measured) <= self.rounds and share >= smallest:
            key = (self.trial(frame, best.assignment).id, share)
            if key not in self._solved:
                self._solved[key] = self._changed(best, at, scale, share)
            changed = self._solved[key]
            if tuple(changed.assignment.items()) in tried:
                share /= 2
                continue
            tried.add(tuple(changed.assignment.items()))
            asked = self.trial(frame, changed.assignment)
            if asked.id not in results:
                return Refined(best, lowest, tuple(measured)), asked
            there = _checked(results[asked.id])
            measured.append(mean_kl(there))
            if measured[-1] < lowest:
                best, at, lowest, share = changed, there, measured[-1], min(2 * share, 1.0)
            else:
                share /= 2
        return Refined(best, lowest, tuple(measured)), None

    def _changed(self, plan: Plan, at: Result, scale: float, share: float) -> Plan:
        """The best change of a plan that touches at most this share of the weights."""
        names, weights = list(at.facts["formats"]), sum(module.parameters for module in self.modules)
        own = np.array([[m.choices[f].predicted_kl for f in names] for m in self.modules])
        now = np.array([names.index(plan.assignment[module.name]) for module in self.modules])
        current = own[np.arange(len(now)), now][:, None]
        independent = scale * np.where(own < current, 2 * (own - current), 0.0)  # for fused experts: none is measured
        known = at.facts["slopes"]
        slopes = np.array([known.get(m.name, other) for m, other in zip(self.modules, independent, strict=True)])
        costs = slopes + scale * (own + current)
        costs[np.arange(len(now)), now] = 0.0
        moved, touched = [], []
        for module, row, kept in zip(self.modules, costs, now, strict=True):
            choices = {f: replace(module.choices[f], predicted_kl=float(c)) for f, c in zip(names, row, strict=True)}
            moved.append(replace(module, choices=choices))
            touched.append({f: (f != names[kept]) * module.parameters / weights for f in names})
        limits = [*self.budget.limits(self.modules), ("share of weights", share, touched)]
        found = solve(moved, limits)
        return plan_of(self.modules, found.assignment, f"{self.start.method}, refined", found.note)


def mean_kl(result: Result) -> float:
    return float(np.mean([np.nan if one is None else one for one in result.values["kl"]]))


def _checked(result: Result) -> Result:
    if result.failed:
        raise NoisescopeError(f"a plan could not be refined: {result.error}")
    return result
