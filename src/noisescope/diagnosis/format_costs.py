"""What number formats would cost each linear, measured by the diagnosis for precision plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.predicted_kl import NOT_FINITE
from noisescope.diagnosis.section_types import FormatScore, FormatScores, ModuleScores, UniformScore
from noisescope.trials import Results, Trial

# As in measures/format_costs.py, which needs torch; a test keeps them in sync.
UNTOUCHED = "bf16"
GROUP = 64  # weights that share a scale, in integer formats
FORMATS = (UNTOUCHED, "int8", "fp8_e4m3", "int4", "int4_asymmetric", "int4_clipped", "nvfp4", "mxfp4", "int3")
SAMPLES = 16  # a second sample adds more than a second draw on the same one, at the same cost


def propose(context: StudyContext) -> list[Trial]:
    """No trial without the layer level, or with the caller's own metric."""
    part, settings = context.curvature_slice, context.settings
    if part is None or "layer" not in settings.levels:
        return []
    part = dataclasses.replace(part, stop=min(SAMPLES, context.test[-1].stop))
    return [Trial(context.conditions, "formats", part, None, {"formats": FORMATS, "draws": 1, "seed": 0})]


def conclude(context: StudyContext, results: Results) -> FormatScores | None:
    """Predicted KL per token of each format at each linear alone: the mean of finite samples and its standard error."""
    trials = propose(context)
    found = results.get(trials[0].id) if trials else None
    if found is None:
        return None
    if found.failed:
        return FormatScores(0, found.error, (), {}, 0)
    predicted = found.arrays["predicted"]  # [modules, formats, samples]
    predicted = predicted[:, :, np.isfinite(predicted).all((0, 1))]
    count = predicted.shape[2]
    if not count:
        return FormatScores(0, NOT_FINITE, (), {}, 0)
    mean = predicted.mean(2)
    error = predicted.std(2, ddof=1) / np.sqrt(count) if count > 1 else np.full_like(mean, np.nan)
    rows = []
    for i, about in enumerate(found.facts["modules"]):
        facts = {name: about[name] for name in ("module", "place", "parameters", "inputs", "kind")}
        formats = {
            name: FormatScore(
                bits, about["effective_bits"][name], float(mean[i, j]), float(error[i, j]) if count > 1 else None
            )
            for j, (name, bits) in enumerate(found.facts["formats"])
        }
        rows.append(ModuleScores(**facts, formats=formats))
    return FormatScores(count, "", tuple(rows), _uniform(rows), found.facts["block_parameters"])


def _uniform(rows: Sequence[ModuleScores]) -> dict[str, UniformScore]:
    """One format for all linears: its bits, and the predicted KL of all of them together (predictions add up)."""
    weights = sum(row.parameters for row in rows)
    return {
        name: UniformScore(
            score.bits,
            sum(row.parameters * row.formats[name].effective_bits for row in rows) / weights,
            sum(row.formats[name].predicted_kl for row in rows),
        )
        for name, score in (rows[0].formats if rows else {}).items()
    }
