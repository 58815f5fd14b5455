"""Accuracy and retention at several noise levels, on the same samples with the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noisescope import stats
from noisescope.diagnosis.effects import Row, correct_looks, effect, estimate, paired
from noisescope.diagnosis.frame import Frame
from noisescope.errors import InvalidInput
from noisescope.injection import checked_scale
from noisescope.trials import Results, Trial

SCHEMA_VERSION = 1


def checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Noise levels in order, each once; 0 is the clean model."""
    checked = tuple(sorted({checked_scale(level, "noise level") for level in levels}))
    if not any(checked):
        raise InvalidInput("give at least one noise level above 0, such as --noise-levels 0,0.05,0.10")
    return checked


@dataclass(frozen=True)
class Robustness:
    """The pair of this question: the levels are all that it has."""

    levels: tuple[float, ...]

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        noisy = [trial for level in self.levels if level for trial in frame.ask(frame.injection(scale=level))]
        return frame.ask(None) + noisy

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
        clean = frame.answer(results, None)
        assert clean is not None
        rows: list[Row] = []
        for level in self.levels:
            if clean.error:
                rows.append({"noise_level": level, "evidence": "failed", "error": clean.error, "accuracy": None})
                continue
            if level == 0:
                rows.append(
                    {"noise_level": 0.0, "accuracy": estimate(clean.values(frame.metric)[0]), "retention": None}
                )
                continue
            row = effect(frame, results, frame.injection(scale=level), looks=len(self.levels))
            noisy = frame.answer(results, frame.injection(scale=level))
            row |= {"noise_level": level, "accuracy": row.get("noisy_acc_interval")}
            if noisy is not None and not noisy.error and not clean.error:
                before, after = paired(frame, clean, noisy)
                row["retention"] = stats.retention(before, after, chance=frame.chance).to_dict()
            rows.append(row)
        correct_looks(rows)
        return {
            "schema_version": SCHEMA_VERSION,
            "robustness": {"operators": list(frame.settings.layer_operators), "levels": rows},
            "could_not_see": list(notes),
        }
