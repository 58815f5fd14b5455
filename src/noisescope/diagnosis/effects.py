"""The effect of one injection: what was lost, how certain that is, how far the output moved, what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Answer, Array, StudyContext
from noisescope.diagnosis.rows import Divergence, E, Effect, PointRule
from noisescope.diagnosis.screen import Screened
from noisescope.findings import NOT_MEASURABLE, band, band_range
from noisescope.findings.bands import LossKind
from noisescope.injection import Injection
from noisescope.trials import Results

NOTHING = stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE)


def effect(
    context: StudyContext,
    results: Results,
    injection: Injection,
    screened: Screened | None = None,
    *,
    looks: int = 1,
    bands: LossKind = "degradation",
) -> Effect:
    """Everything known of an injection. `looks` counts the rows of its table, which intervals and p account for."""
    scale = context.scale_of(injection)
    known = Effect(metric=context.metric_name)
    if screened is not None and not screened.error:
        predicted = divergence(screened.predicted_by(injection, scale), looks)
        known = replace(known, evidence="predicted", predicted_kl=predicted)
    clean, noisy = context.answer(results, None), context.answer(results, injection)
    for answer in (clean, noisy):
        if answer is not None and answer.error:
            return replace(known, evidence="failed", error=answer.error)
    if clean is None or noisy is None:
        return known
    found = replace(task_loss(context, clean, noisy, scale, looks=looks, bands=bands), predicted_kl=known.predicted_kl)
    over = None
    if "kl" in noisy.metrics and screened is not None and not screened.error:
        over = ratio(noisy.mean("kl"), screened.predicted_by(injection, scale))
    return replace(
        found,
        evidence="injected",
        total_injections=noisy.injections,
        seeds=noisy.seeds,
        nonfinite=noisy.nonfinite,
        failed_samples=int((~np.isfinite(noisy.values(context.metric))).any(0).sum()),
        kl=divergence(noisy.mean("kl"), looks) if "kl" in noisy.metrics else None,
        agreement=mean_of(noisy, "agreement"),
        nll=mean_of(noisy, "nll"),
        snr_db=mean_of(noisy, "snr_db"),
        injected_over_predicted=over,
    )


def task_loss(
    context: StudyContext,
    clean: Answer,
    noisy: Answer,
    scale: float,
    *,
    looks: int = 1,
    bands: LossKind = "degradation",
) -> Effect:
    """The score before and after, degradation with its intervals and bands, and what could have been detected."""
    before, after = paired(context, clean, noisy)
    if not len(before):
        return Effect(metric=context.metric_name, degradation=NOTHING)
    loss = stats.degradation(before, after, chance=context.chance, level=stats.simultaneous_level(looks))
    if context.measure != "custom" and before.mean() > 0:
        loss = loss.within(1 - 1 / float(before.mean()), 1.0)  # a share can't rise above 1, nor fall below 0
    score = None if loss.value is None else loss.value / scale
    lower, upper = band_range(bands, loss)
    return Effect(
        metric=context.metric_name,
        baseline_acc=float(before.mean()),
        noisy_acc=float(after.mean()),
        noisy_acc_interval=_score(context, after),
        degradation=loss,
        band=lower,
        band_upper=upper,
        sensitivity_score=score,
        noise_tolerance_index=stats.noise_tolerance(loss),
        p=stats.p_no_difference(before, after),
        smallest_detectable=stats.smallest_detectable(before, after, looks=looks, relative=True),
        point_rule=PointRule(band(bands, loss.value), band("sensitivity_score", score)),
    )


def paired(context: StudyContext, clean: Answer, noisy: Answer) -> tuple[Array, Array]:
    """Scores [samples] and [samples, seeds]. A sample whose noisy score is not finite has failed: its score is 0."""
    before, after = clean.values(context.metric)[0], noisy.values(context.metric).T
    known = np.isfinite(before)
    return before[known], np.nan_to_num(after[known], nan=0.0, posinf=0.0, neginf=0.0)


def correct_looks(rows: Sequence[E]) -> list[E]:
    """The rows with Holm's correction over the p values of those that were looked at together."""
    looked = [row.p for row in rows if row.p is not None]
    corrected = iter(stats.holm(looked))
    return [row if row.p is None else replace(row, p_corrected=next(corrected)) for row in rows]


def pick_largest(
    context: StudyContext, results: Results, rows: Sequence[E], injections: Sequence[Injection]
) -> list[E]:
    """The rows of a table, the one with the largest loss with a size that allows for its having been picked."""
    clean = context.answer(results, None)
    measured = [i for i, row in enumerate(rows) if row.degradation is not None and row.degradation.value is not None]
    if clean is None or clean.error or len(measured) < 2:
        return list(rows)
    scores = []
    for i in measured:
        noisy = context.answer(results, injections[i])
        assert noisy is not None
        before, after = paired(context, clean, noisy)
        scores.append(after)
    found = stats.picked(before, scores, chance=context.chance)
    largest = measured[found.index]
    return [replace(row, selected=found.estimate) if i == largest else row for i, row in enumerate(rows)]


def on_one_scale(rows: Sequence[E], prediction_scale: float) -> list[E]:
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


# -- estimates


def divergence(values: Array, looks: int = 1) -> Divergence:
    """The typical KL and the mean over the samples whose KL is finite."""
    known = np.maximum(values[np.isfinite(values)], 0.0)  # rounding may leave -1e-12
    if not len(known):
        return Divergence(NOTHING, NOTHING)
    level = stats.simultaneous_level(looks)
    return Divergence(stats.typical(known, level), stats.nonnegative_mean(known, level))


def mean_of(answer: Answer, name: str) -> stats.Estimate | None:
    """The mean of a column over samples; None where the measure has no such column."""
    if name not in answer.metrics:
        return None
    values = answer.mean(name)
    known = values[np.isfinite(values)]
    if not len(known):
        return NOTHING
    return stats.share(known) if name in SHARES else stats.mean(known, countable=False)


SHARES = ("accuracy", "next_token_accuracy", "agreement")


def ratio(above: Array, below: Array) -> stats.Estimate:
    """The median over samples of above / below, over the samples that have both."""
    known = np.isfinite(above) & np.isfinite(below)
    return stats.typical_ratio(np.maximum(above[known], 0.0), np.maximum(below[known], 0.0)) if known.any() else NOTHING


def clean_score(context: StudyContext, values: Array, name: str | None = None) -> stats.Estimate:
    """The mean of a column of the clean model; `name` None is the metric."""
    known = values[np.isfinite(values)]
    if not len(known):
        return NOTHING
    if name == "nll":
        return stats.nonnegative_mean(np.maximum(known, 0.0))
    found = stats.mean(known)
    is_share = (context.metric if name is None else name) in SHARES and context.measure != "custom"
    return found.within(0.0, 1.0) if is_share else found


def _score(context: StudyContext, after: Array) -> stats.Estimate:
    found = stats.mean(after)
    return found if context.measure == "custom" else found.within(0.0, 1.0)  # a metric of one's own may be anything
