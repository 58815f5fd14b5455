"""The effect of one injection: the loss, its certainty, how far the output moved, and what was predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noisescope import stats
from noisescope.diagnosis import perplexity
from noisescope.diagnosis.context import Answer, Array, StudyContext
from noisescope.diagnosis.perplexity import PERPLEXITY
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.diagnosis.rows import Divergence, Effect, PointRule
from noisescope.findings import NOT_MEASURABLE, band, band_range
from noisescope.findings.thresholds import LossKind
from noisescope.injection import Injection
from noisescope.trials import Results

NOTHING = stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE)
PROPORTIONS = ("accuracy", "next_token_accuracy", "agreement")


@dataclass(frozen=True)
class StudyResults:
    """A study with the results known so far, and its screen's predictions: None without one, or if it failed."""

    context: StudyContext
    results: Results
    screened: Screened | None = None

    def answer(self, injection: Injection | None) -> Answer | None:
        return self.context.answer(self.results, injection)

    def scores(self, *injections: Injection) -> tuple[Array, ...] | None:
        """The clean score of each sample, and its scores [samples, seeds] under each injection; None where unknown."""
        clean, noisy = self.answer(None), [self.answer(injection) for injection in injections]
        known = [answer for answer in noisy if answer is not None and not answer.error]
        if clean is None or clean.error or len(known) < len(noisy):
            return None
        both = [paired(self.context, clean, answer) for answer in known]
        return both[0][0], *(after for _, after in both)

    def effect(self, injection: Injection, *, comparisons: int = 1, bands: LossKind = "degradation") -> Effect:
        """Everything known about an injection. Intervals and p account for `comparisons`, the rows of its table."""
        noise: Any = injection.perturbation
        scale = None if self.context.settings.scale is None else float(noise.scale)
        known = Effect(metric=self.context.metric_name)
        prediction = None if self.screened is None else self.screened.predicted_by(injection, scale)
        if prediction is not None:
            known = replace(known, evidence="predicted", predicted_kl=divergence(prediction, comparisons))
        clean, noisy = self.answer(None), self.answer(injection)
        for answer in (clean, noisy):
            if answer is not None and answer.error:
                return replace(known, evidence="failed", error=answer.error)
        if clean is None or noisy is None:
            return known
        kl = noisy.mean("kl") if "kl" in noisy.metrics else None
        return replace(
            task_loss(self.context, clean, noisy, scale, comparisons=comparisons, bands=bands),
            evidence="injected",
            predicted_kl=known.predicted_kl,
            total_injections=noisy.injections,
            seeds=noisy.seeds,
            nonfinite=noisy.nonfinite,
            failed_samples=int((~np.isfinite(noisy.values(self.context.metric))).any(0).sum()),
            kl=None if kl is None else divergence(kl, comparisons),
            agreement=mean_of(noisy, "agreement"),
            nll=mean_of(noisy, "nll"),
            snr_db=mean_of(noisy, "snr_db"),
            injected_over_predicted=None if kl is None or prediction is None else ratio(kl, prediction),
        )


def task_loss(
    context: StudyContext,
    clean: Answer,
    noisy: Answer,
    scale: float | None,
    *,
    comparisons: int = 1,
    bands: LossKind = "degradation",
) -> Effect:
    """The score before and after, degradation with its intervals and bands, and what could have been detected.

    Without a scale (a number format) there is no sensitivity score, which is the loss over the scale.
    """
    before, after = paired(context, clean, noisy)
    if not len(before):
        return Effect(metric=context.metric_name, degradation=NOTHING)
    loss = stats.degradation(before, after, chance=context.chance, level=stats.simultaneous_level(comparisons))
    smallest = stats.smallest_detectable(before, after, comparisons=comparisons, relative=True)
    was, now, interval = float(before.mean()), float(after.mean()), stats.mean(after)
    if context.metric == PERPLEXITY:
        loss, interval = perplexity.share_lost(loss), perplexity.of_losses(noisy.values("nll").T)
        was, now = (perplexity.of_losses(side.values("nll").T).value or math.inf for side in (clean, noisy))
        smallest = None if smallest is None else -math.expm1(-smallest)
    elif context.measure != "custom":  # a metric of one's own may be anything; a share lies between 0 and 1
        interval = interval.within(0.0, 1.0)
        loss = loss.within(1 - 1 / was, 1.0) if was > 0 else loss
    score = None if loss.value is None or scale is None else loss.value / scale
    lower, upper = band_range(bands, loss)
    return Effect(
        metric=context.metric_name,
        baseline_acc=was,
        noisy_acc=now,
        noisy_acc_interval=interval,
        degradation=loss,
        band=lower,
        band_upper=upper,
        sensitivity_score=score,
        noise_tolerance_index=stats.noise_tolerance(loss),
        p=stats.p_no_difference(before, after),
        smallest_detectable=smallest,
        point_rule=PointRule(band(bands, loss.value), band("sensitivity_score", score)),
    )


def paired(context: StudyContext, clean: Answer, noisy: Answer) -> tuple[Array, Array]:
    """Scores [samples] and [samples, seeds]. A sample whose noisy score is not finite has failed: its score is 0."""
    if context.metric == PERPLEXITY:
        return perplexity.linear_scores(clean, noisy)
    before, after = clean.values(context.metric)[0], noisy.values(context.metric).T
    known = np.isfinite(before)
    return before[known], np.nan_to_num(after[known], nan=0.0, posinf=0.0, neginf=0.0)


def correct_for_comparisons(rows: Sequence[Effect]) -> list[Effect]:
    """The rows of a table with Holm's correction over their p values."""
    corrected = iter(stats.holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else replace(row, p_corrected=next(corrected)) for row in rows]


def effects_table(
    study: StudyResults, injections: Sequence[Injection], *, comparisons: int, bands: LossKind = "degradation"
) -> list[Effect]:
    """The effects of injections that are compared: p corrected, and the size of the largest loss for its selection."""
    rows = [study.effect(injection, comparisons=comparisons, bands=bands) for injection in injections]
    rows = correct_for_comparisons(rows)
    measured = [i for i, row in enumerate(rows) if row.degradation is not None and row.degradation.value is not None]
    scores = study.scores(*(injections[i] for i in measured)) if len(measured) > 1 else None
    if scores is not None:
        selected = stats.select_largest(scores[0], scores[1:], chance=study.context.chance)
        largest = measured[selected.index]
        loss = selected.estimate
        loss = perplexity.share_lost(loss) if study.context.metric == PERPLEXITY else loss
        rows[largest] = replace(rows[largest], selected=loss)
    return rows


def on_one_scale(rows: Sequence[Effect], prediction_scale: float) -> list[Effect]:
    """The rows with `nats`: the injected size, or the predicted one times the scale."""
    return [replace(row, nats=_nats(row, prediction_scale)) for row in rows]


def prediction_scale(rows: Sequence[Effect]) -> float:
    """The median of injected over predicted nats over the rows that have both; 1 where none has."""
    both = [(row.kl.typical.value, row.predicted_kl.typical.value) for row in rows if row.kl and row.predicted_kl]
    known = [injected / predicted for injected, predicted in both if injected and predicted]
    return float(np.median(known)) if known else 1.0


def _nats(row: Effect, scale: float) -> float:
    if row.kl is not None and row.kl.typical.value is not None:
        return row.kl.typical.value
    return (row.predicted_kl.typical.value or 0.0) * scale if row.predicted_kl is not None else 0.0


def divergence(values: Array, comparisons: int = 1) -> Divergence:
    """The typical KL and the mean over the samples whose KL is finite."""
    known = np.maximum(values[np.isfinite(values)], 0.0)  # rounding may leave -1e-12
    if not len(known):
        return Divergence(NOTHING, NOTHING)
    level = stats.simultaneous_level(comparisons)
    return Divergence(stats.typical(known, level), stats.nonnegative_mean(known, level))


def mean_of(answer: Answer, name: str) -> stats.Estimate | None:
    """The mean of a column over samples; None where the measure has no such column."""
    if name not in answer.metrics:
        return None
    values = answer.mean(name)
    known = values[np.isfinite(values)]
    if not len(known):
        return NOTHING
    return stats.proportion(known) if name in PROPORTIONS else stats.mean(known, countable=False)


def ratio(above: Array, below: Array) -> stats.Estimate:
    """The median over samples of above / below, over the samples that have both."""
    known = np.isfinite(above) & np.isfinite(below)
    return stats.typical_ratio(np.maximum(above[known], 0.0), np.maximum(below[known], 0.0)) if known.any() else NOTHING


def clean_score(context: StudyContext, clean: Answer, name: str) -> stats.Estimate:
    """The mean of a column of the clean model, or its perplexity."""
    if name == PERPLEXITY:
        return perplexity.of_losses(clean.values("nll")[0])
    values = clean.values(name)[0]
    known = values[np.isfinite(values)]
    if not len(known):
        return NOTHING
    if name == "nll":
        return stats.nonnegative_mean(np.maximum(known, 0.0))
    found = stats.mean(known)
    return found.within(0.0, 1.0) if name in PROPORTIONS and context.measure != "custom" else found
