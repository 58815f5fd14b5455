"""The effect of one injection: what was lost, how certain that is, how far the output moved, what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from noisescope import stats
from noisescope.diagnosis.frame import Answer, Array, Frame
from noisescope.diagnosis.rows import Divergence, E, Effect, PointRule
from noisescope.diagnosis.screen import Screened
from noisescope.findings import NOT_MEASURABLE, band, band_range
from noisescope.injection import Injection
from noisescope.trials import Results

NOTHING = stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE)


def effect(
    frame: Frame,
    results: Results,
    injection: Injection,
    screened: Screened | None = None,
    *,
    looks: int = 1,
    bands: str = "degradation",
) -> Effect:
    """Everything known of an injection. `looks` counts the rows of its table, which intervals and p account for."""
    scale = frame.scale_of(injection)
    known = Effect(metric=frame.metric_name)
    if screened is not None and not screened.error:
        known = replace(known, evidence="predicted", predicted_kl=predicted_kl(screened.predicted_by(injection, scale)))
    clean, noisy = frame.answer(results, None), frame.answer(results, injection)
    if clean is None or noisy is None:
        return known
    for answer in (clean, noisy):
        if answer.error:
            return replace(known, evidence="failed", error=answer.error)
    found = replace(task_loss(frame, clean, noisy, scale, looks=looks, bands=bands), predicted_kl=known.predicted_kl)
    over = None
    if "kl" in noisy.metrics and screened is not None and not screened.error:
        over = ratio(noisy.mean("kl"), screened.predicted_by(injection, scale))
    return replace(
        found,
        evidence="injected",
        total_injections=noisy.injections,
        seeds=noisy.seeds,
        nonfinite=noisy.nonfinite,
        failed_samples=int((~np.isfinite(noisy.values(frame.metric))).any(0).sum()),
        kl=injected_kl(noisy.mean("kl")) if "kl" in noisy.metrics else None,
        agreement=mean_of(noisy, "agreement"),
        nll=mean_of(noisy, "nll"),
        snr_db=mean_of(noisy, "snr_db"),
        injected_over_predicted=over,
    )


def task_loss(
    frame: Frame, clean: Answer, noisy: Answer, scale: float, *, looks: int = 1, bands: str = "degradation"
) -> Effect:
    """The score before and after, degradation with its intervals and bands, and what could have been detected."""
    before, after = paired(frame, clean, noisy)
    if not len(before):
        return Effect(metric=frame.metric_name, degradation=NOTHING)
    loss = stats.degradation(before, after, chance=frame.chance)
    together = stats.degradation(before, after, chance=frame.chance, level=stats.simultaneous_level(looks))
    score = None if loss.value is None else loss.value / scale
    lower, upper = band_range(bands, together)
    return Effect(
        metric=frame.metric_name,
        baseline_acc=float(before.mean()),
        noisy_acc=float(after.mean()),
        noisy_acc_interval=_score(frame, after),
        degradation=loss,
        simultaneous=together,
        band=lower,
        band_upper=upper,
        sensitivity_score=score,
        noise_tolerance_index=stats.noise_tolerance(loss),
        p=stats.p_no_difference(before, after),
        smallest_detectable=stats.smallest_detectable(before, after, looks=looks, relative=True),
        point_rule=PointRule(band(bands, loss.value), band("sensitivity_score", score)),
    )


def paired(frame: Frame, clean: Answer, noisy: Answer) -> tuple[Array, Array]:
    """Scores [samples] and [samples, seeds]. A sample whose noisy score is not finite has failed: its score is 0."""
    before, after = clean.values(frame.metric)[0], noisy.values(frame.metric).T
    known = np.isfinite(before)
    return before[known], np.nan_to_num(after[known], nan=0.0, posinf=0.0, neginf=0.0)


def correct_looks(rows: Sequence[E]) -> list[E]:
    """The rows with Holm's correction over the p values of those that were looked at together."""
    looked = [row.p for row in rows if row.p is not None]
    corrected = iter(stats.holm(looked))
    return [row if row.p is None else replace(row, p_corrected=next(corrected)) for row in rows]


# -- estimates


def injected_kl(values: Array) -> Divergence:
    """Median and mean over the samples whose KL is finite."""
    known = np.maximum(values[np.isfinite(values)], 0.0)  # rounding may leave -1e-12
    if not len(known):
        return Divergence(NOTHING, NOTHING)
    return Divergence(stats.median(known), stats.nonnegative_mean(known))


def predicted_kl(values: Array) -> Divergence:
    """As for injected KL, but the mean ranks.

    A sample's prediction is an unbiased estimate from a few drawn labels: mostly too small and sometimes far too
    large, so that its median is not the median of what it estimates.
    """
    return replace(injected_kl(values), ranked_by="mean")


def mean_of(answer: Answer, name: str) -> stats.Estimate | None:
    """The mean of a column over samples; None where the measure has no such column."""
    if name not in answer.metrics:
        return None
    values = answer.mean(name)
    known = values[np.isfinite(values)]
    return stats.mean(known, countable=name in SHARES) if len(known) else NOTHING


SHARES = ("accuracy", "next_token_accuracy", "agreement")


def ratio(above: Array, below: Array) -> stats.Estimate:
    """mean(above) / mean(below) over the samples that have both."""
    known = np.isfinite(above) & np.isfinite(below)
    return stats.ratio(np.maximum(above[known], 0.0), np.maximum(below[known], 0.0)) if known.any() else NOTHING


def clean_score(frame: Frame, values: Array, name: str | None = None) -> stats.Estimate:
    """The mean of a column of the clean model; `name` None is the metric."""
    known = values[np.isfinite(values)]
    if not len(known):
        return NOTHING
    found = stats.mean(known)
    is_share = (frame.metric if name is None else name) in SHARES and frame.measure != "custom"
    return found.within(0.0, 1.0) if is_share else found


def _score(frame: Frame, after: Array) -> stats.Estimate:
    found = stats.mean(after)
    return found if frame.measure == "custom" else found.within(0.0, 1.0)  # a metric of one's own may be anything
