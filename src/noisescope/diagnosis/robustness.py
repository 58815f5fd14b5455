"""Accuracy and retention at several noise levels, on the same samples with the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from noisescope import stats
from noisescope.diagnosis.effects import clean_score, correct_looks, effect, paired
from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.report import RobustnessCurve
from noisescope.diagnosis.rows import Effect, LevelEffect, as_row
from noisescope.errors import InvalidInput
from noisescope.injection import checked_scale
from noisescope.trials import Results, Trial


def checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Noise levels in order, each once; 0 is the clean model."""
    checked = tuple(sorted({checked_scale(level, "noise level") for level in levels}))
    if not any(checked):
        raise InvalidInput("give at least one noise level above 0, such as --noise-levels 0,0.05,0.10")
    return checked


@dataclass(frozen=True)
class RobustnessFound:
    """What the question found, before the run's own facts are added."""

    robustness: RobustnessCurve
    could_not_see: tuple[str, ...]


@dataclass(frozen=True)
class RobustnessQuestion:
    """The pair of this question: the levels are all that it has."""

    levels: tuple[float, ...]

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        noisy = [trial for level in self.levels if level for trial in frame.ask(frame.injection(scale=level))]
        return frame.ask(None) + noisy

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> RobustnessFound:
        rows = correct_looks([self._row(frame, results, level) for level in self.levels])
        return RobustnessFound(RobustnessCurve(frame.settings.layer_operators, tuple(rows)), tuple(notes))

    def _row(self, frame: Frame, results: Results, level: float) -> LevelEffect:
        clean = frame.answer(results, None)
        assert clean is not None
        row, score, kept = Effect(metric=frame.metric_name), None, None
        if clean.error:
            row = replace(row, evidence="failed", error=clean.error)
        elif level == 0:
            score = clean_score(frame, clean.values(frame.metric)[0])
        else:
            row = effect(frame, results, frame.injection(scale=level), looks=len(self.levels))
            score = row.noisy_acc_interval
            noisy = frame.answer(results, frame.injection(scale=level))
            if noisy is not None and not noisy.error:
                together = stats.simultaneous_level(len(self.levels))
                kept = stats.retention(*paired(frame, clean, noisy), chance=frame.chance, level=together)
        return as_row(row, LevelEffect, noise_level=level, accuracy=score, retention=kept)
