"""SmoothQuant tried out on a model: scales folded into a copy, and what that does for 8-bit weights and activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisescope.api.materials import material_of
from noisescope.api.reported import check_sizes, data_of, other_numbers
from noisescope.diagnosis.effects import divergence, ratio
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.options.planning import SmoothquantOptions
from noisescope.options.signatures import asks
from noisescope.plans.smoothing import BeforeAndAfter, FoldRow, recommendations
from noisescope.plans.smoothing import SmoothingPlan as SmoothingPlan
from noisescope.quantisation.smoothing import W8A8, Folded, Smoothed, rounded_kl, smooth
from noisescope.reports.report import Report, diagnosis_of
from noisescope.runs.fingerprints import model_fingerprint
from noisescope.runs.forwards import input_device


def token_batches(subject: Subject, data: Any, samples: int, max_tokens: int, *, which: str) -> list[Tensor]:
    """Token ids [1, T] of each sequence, whatever form data comes in."""
    material = material_of(subject, data, samples, max_tokens, which=which)[0]
    device = input_device(subject.model)
    return [
        torch.tensor([s.ids], device=device) for group in material.encoded.sequences for s in group if len(s.ids) > 1
    ]


def smooth_outliers(
    subject: Subject,
    calibration: Any = None,
    *,
    alpha: float | None = None,
    places: frozenset[int] | None = None,
    samples: int = 16,
    max_tokens: int = 256,
) -> Smoothed:
    """A smoothed copy; the model itself is left alone. `alpha` None searches one per fold, `places` None is all."""
    batches = token_batches(subject, calibration, samples, max_tokens, which="calibration")
    return smooth(subject.model, batches, alpha=alpha, places=places, anatomy=subject.anatomy)


@asks(SmoothquantOptions, "data")
def plan_smoothquant(subject: Subject, report: Report | Diagnosis, asked: SmoothquantOptions) -> SmoothingPlan:
    """SmoothQuant carried out on a copy: W8A8 KL before and after, and advice for each module with outliers.

    The first half of the samples calibrates, on the other half the KL is measured.
    """
    alpha, target, found = asked.alpha, asked.target, diagnosis_of(report)
    recommendations(found, (), target=target)  # refuses a report without channels before the work begins
    check_sizes(found, subject)
    given = data_of(found) if asked.data is None else asked.data
    batches = token_batches(subject, given, asked.samples, asked.max_tokens, which="test")
    if len(batches) < 2:
        raise InvalidInput("SmoothQuant needs at least two samples: one to calibrate on, one to measure on")
    half = len(batches) // 2
    smoothed = smooth(subject.model, batches[:half], alpha=alpha, anatomy=subject.anatomy)
    before = np.array(rounded_kl(subject.model, subject.model, batches[half:], W8A8, subject.anatomy))
    after = np.array(rounded_kl(smoothed.model, subject.model, batches[half:], W8A8))
    folds = tuple(map(_fold_row, smoothed.folds))
    return SmoothingPlan(
        scheme="W8A8: int8 weights with a scale per output channel, int8 activations with a scale per token",
        alpha=alpha,
        kl=BeforeAndAfter(divergence(before), divergence(after)),
        gain=ratio(before, after),
        float_error=smoothed.float_error,
        folds=folds,
        recommendations=recommendations(found, folds, target=target),
        notes=tuple(other_numbers(found, model_fingerprint(subject.model))),
    )


def _fold_row(done: Folded) -> FoldRow:
    fold = done.fold
    return FoldRow(fold.source, fold.targets, fold.place, fold.norm, done.alpha, done.largest_scale, done.gains)
