"""Accuracy over noise levels: the critical threshold by bisection, and accuracy and retention at given levels.

The critical threshold is the noise at which a tenth of the accuracy is gone. One (seed, sample, site) has one draw at
every scale, so the curve of degradation over scale is nearly monotone even for few samples, and bisection is sound. The
interval comes from the samples: drawn again with replacement, each draw's curve (made monotone) is inverted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Answer, Array, StudyContext
from noisescope.diagnosis.effects import StudyResults, clean_score, correct_for_comparisons
from noisescope.diagnosis.perplexity import PERPLEXITY, share_kept
from noisescope.diagnosis.report import RobustnessCurve
from noisescope.diagnosis.rows import Effect, LevelEffect, as_row
from noisescope.diagnosis.section_types import Threshold, Tried
from noisescope.errors import InvalidInput
from noisescope.findings import NOT_MEASURABLE, band
from noisescope.injection import checked_scale
from noisescope.trials import Results, Trial

TOLERANCE = 0.001  # bisection ends when the threshold is known to this
_RESAMPLES = 1000


@dataclass(frozen=True)
class Bisection:
    """The state of the bisection: what was tried, the bounds of the threshold, and what to try next."""

    tried: tuple[tuple[float, Array], ...]  # (scale, accuracy per sample)
    low: float
    high: float | None  # None: not reached at the highest scale
    wanted: float | None  # None: done, or a trial failed
    error: str = ""


def bisect(context: StudyContext, results: Results, **sites: Any) -> Bisection:
    """Follow what is known. The highest scale comes first: a threshold beyond it needs no bisection."""
    highest = context.settings.highest_scale
    clean = _clean_accuracy(context, results)
    if clean is None or not stats.measurable(clean[np.isfinite(clean)], context.chance):
        return Bisection((), 0.0, None, None)
    tried: list[tuple[float, Array]] = []
    low, high, scale = 0.0, highest, highest
    while high - low > min(TOLERANCE, highest / 100):
        answer = context.answer(results, context.injection(scale=scale, **sites))
        if answer is None or answer.error:
            failed = "" if answer is None else answer.error
            return Bisection(tuple(tried), low, high if tried else None, scale if answer is None else None, failed)
        accuracy = _scores(context, answer)
        tried.append((scale, accuracy))
        lost = 1 - float(np.nanmean(accuracy)) / float(np.nanmean(clean))
        if lost >= context.settings.target_degradation:
            high = scale
        elif scale == highest:
            return Bisection(tuple(tried), highest, None, None)
        else:
            low = scale
        scale = round((low + high) / 2, 12)
    return Bisection(tuple(tried), low, high, None)


def propose(context: StudyContext, results: Results, **sites: Any) -> list[Trial]:
    """The next scale's trials; [] when the threshold is known or can't be."""
    scale = bisect(context, results, **sites).wanted
    return [] if scale is None else context.ask(context.injection(scale=scale, **sites))


def conclude(context: StudyContext, results: Results, **sites: Any) -> Threshold:
    """The threshold with its interval; "> 0.20" where it was not reached, "not measurable" at chance."""
    known = bisect(context, results, **sites)
    clean = _clean_accuracy(context, results)
    target = context.settings.target_degradation
    nothing = Threshold(None, NOT_MEASURABLE, None, None, NOT_MEASURABLE, target, 0, ())
    if clean is None or (not known.tried and not known.error):
        return nothing
    if known.error:
        between = f"between {known.low:g} and {known.high:g}" if known.high is not None else "unknown"
        return dataclasses.replace(nothing, label=f"{between}: a trial failed ({known.error})")
    highest = context.settings.highest_scale
    low, high = _interval(context, clean, known.tried)
    return Threshold(
        value=known.high,
        label=f"> {highest:.2f}" if known.high is None else f"{known.high:.3f}",
        low=low,
        high=high,
        band=band("critical_threshold", highest if known.high is None else known.high),
        target_degradation=target,
        n=int(np.isfinite(clean).sum()),
        tried=tuple(Tried(s, float(np.nanmean(a))) for s, a in sorted(known.tried, key=lambda pair: pair[0])),
    )


def _interval(
    context: StudyContext, before: Array, tried: tuple[tuple[float, Array], ...]
) -> tuple[float | None, float | None]:
    """95 % of the thresholds of resampled samples; None at an end that lies beyond the highest scale."""
    scales = np.array([0.0, *sorted(s for s, _ in tried)])
    by_scale = dict(tried)
    table = np.stack([before, *(by_scale[s] for s in scales[1:])])  # [scales, samples]
    table = table[:, np.isfinite(table).all(0)]
    draw = np.random.default_rng(0).integers(0, table.shape[1], (_RESAMPLES, table.shape[1]))
    means = table[:, draw].mean(-1).T  # [resamples, scales]
    lost = np.maximum.accumulate(1 - means / np.maximum(means[:, :1], 1e-12), axis=1)
    thresholds = [_crossing(scales, row, context.settings.target_degradation) for row in lost]
    low, high = np.quantile(thresholds, [0.025, 0.975], method="nearest")
    return (float(low) if np.isfinite(low) else None), (float(high) if np.isfinite(high) else None)


def _crossing(scales: Array, lost: Array, target: float) -> float:
    """Where a monotone curve reaches the target, linear between the scales tried; inf where it doesn't."""
    at = int(np.searchsorted(lost, target))
    if at == len(lost):
        return float("inf")
    if at == 0 or lost[at] == lost[at - 1]:
        return float(scales[at])
    share = (target - lost[at - 1]) / (lost[at] - lost[at - 1])
    return float(scales[at - 1] + share * (scales[at] - scales[at - 1]))


def _scores(context: StudyContext, answer: Answer) -> Array:
    """Of each sample, seeds averaged; one that is not finite has failed."""
    return np.asarray(np.nan_to_num(answer.values(context.metric), nan=0.0, posinf=0.0, neginf=0.0).mean(0))


def _clean_accuracy(context: StudyContext, results: Results) -> Array | None:
    answer = context.answer(results, None)
    return None if answer is None or answer.error else answer.mean(context.metric)


def checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Noise levels in order, each once; 0 is the clean model."""
    checked = tuple(sorted({checked_scale(level, "noise level") for level in levels}))
    if not any(checked):
        raise InvalidInput("give at least one noise level above 0, such as --noise-levels 0,0.05,0.10")
    return checked


@dataclass(frozen=True)
class RobustnessFound:
    """The findings, before the run's own facts are added."""

    robustness: RobustnessCurve
    could_not_see: tuple[str, ...]


@dataclass(frozen=True)
class RobustnessQuestion:
    """Accuracy and retention at several noise levels, on the same samples with the same draws."""

    levels: tuple[float, ...]
    phase: ClassVar[str] = "noise levels"

    def propose(self, context: StudyContext, results: Results) -> list[Trial]:
        noisy = [trial for level in self.levels if level for trial in context.ask(context.injection(scale=level))]
        return context.ask(None) + noisy

    def conclude(self, context: StudyContext, results: Results, notes: Sequence[str] = ()) -> RobustnessFound:
        study = StudyResults(context, results)
        clean = study.answer(None)
        assert clean is not None
        injections = [context.injection(scale=level) if level else None for level in self.levels]
        unmeasured = Effect(metric=context.metric_name, evidence="failed" if clean.error else "none", error=clean.error)
        rows = [
            unmeasured if injection is None else study.effect(injection, comparisons=len(self.levels))
            for injection in injections
        ]
        together, curve = stats.simultaneous_level(len(self.levels)), []
        for level, injection, row in zip(self.levels, injections, correct_for_comparisons(rows), strict=True):
            accuracy, kept = row.noisy_acc_interval, None
            scores = None if injection is None else study.scores(injection)
            if scores is not None:
                kept = stats.retention(*scores, chance=context.chance, level=together)
                kept = share_kept(kept) if context.metric == PERPLEXITY else kept
            elif injection is None and not clean.error:
                accuracy = clean_score(context, clean, context.metric)
            curve.append(as_row(row, LevelEffect, noise_level=level, accuracy=accuracy, retention=kept))
        return RobustnessFound(RobustnessCurve(context.settings.layer_operators, tuple(curve)), tuple(notes))
