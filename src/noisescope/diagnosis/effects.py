"""The effect of one injection as a row of numbers: what was lost, how surely, and what was predicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from noisescope import stats
from noisescope.diagnosis.frame import Answer, Array, Frame
from noisescope.diagnosis.screen import Screened
from noisescope.findings import NOT_MEASURABLE, band
from noisescope.injection import Injection
from noisescope.trials import Results

PARTED = 2.0  # injected and predicted KL that differ by more than this factor, both ends of the interval, have parted
SURE = 0.05  # a loss is a finding where its corrected p is below this
Row = dict[str, Any]


def effect(
    frame: Frame,
    results: Results,
    injection: Injection,
    screened: Screened | None = None,
    *,
    looks: int = 1,
    bands: str = "degradation",
) -> Row:
    """Everything known of an injection.

    `evidence` is "injected" where the noise was really put in, "predicted" where only the screen knows, "failed" with
    the error of a trial, or "none". Bands come from injected task metrics alone.
    """
    row: Row = {"evidence": "none"}
    if screened is not None and not screened.error:
        row["predicted_kl"] = _estimate(screened.predicted_by(injection, frame.scale_of(injection)), countable=False)
        row["evidence"] = "predicted"
    clean, noisy = frame.answer(results, None), frame.answer(results, injection)
    if clean is None or noisy is None:
        return row
    for answer in (clean, noisy):
        if answer.error:
            return {**row, "evidence": "failed", "error": answer.error}
    row["evidence"] = "injected"
    row.update(task_loss(frame, clean, noisy, frame.scale_of(injection), looks=looks, bands=bands))
    row["total_injections"] = noisy.injections
    row["seeds"] = noisy.seeds
    row["nonfinite"] = noisy.nonfinite
    row["failed_samples"] = int((~np.isfinite(noisy.values(frame.metric))).any(0).sum())
    for name in ("kl", "agreement", "nll", "snr_db"):
        if name in noisy.metrics:
            row[name] = _estimate(noisy.mean(name), countable=name == "agreement")
    if "kl" in noisy.metrics and "predicted_kl" in row and screened is not None:
        row["injected_over_predicted"] = _ratio(
            noisy.mean("kl"), screened.predicted_by(injection, frame.scale_of(injection))
        )
        row["parted"] = parted(row["injected_over_predicted"])
    return row


def task_loss(
    frame: Frame, clean: Answer, noisy: Answer, scale: float, *, looks: int = 1, bands: str = "degradation"
) -> Row:
    """Accuracy before and after, degradation with its interval and bands, and what could have been seen."""
    before, after = paired(frame, clean, noisy)
    if not len(before):
        return {
            "degradation": stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE).to_dict(),
            "band": NOT_MEASURABLE,
        }
    loss = stats.degradation(before, after, chance=frame.chance)
    tolerance = stats.noise_tolerance(loss)
    score = None if loss.value is None else loss.value / scale
    return {
        "baseline_acc": float(before.mean()),
        "noisy_acc": float(after.mean()),
        "noisy_acc_interval": _accuracy(frame, after),
        "degradation": loss.to_dict(),
        "band": band(bands, loss.value),
        "sensitivity_score": score,
        "sensitivity_band": band("sensitivity_score", score),
        "noise_tolerance_index": tolerance.to_dict(),
        "p": stats.p_no_difference(before, after),
        "smallest_detectable": stats.smallest_detectable(before, after, looks=looks, relative=True),
    }


def paired(frame: Frame, clean: Answer, noisy: Answer) -> tuple[Array, Array]:
    """Scores [samples] and [samples, seeds]. A sample whose noisy score is not finite has failed: its score is 0."""
    before, after = clean.values(frame.metric)[0], noisy.values(frame.metric).T
    known = np.isfinite(before)
    return before[known], np.nan_to_num(after[known], nan=0.0, posinf=0.0, neginf=0.0)


def _accuracy(frame: Frame, after: Array) -> Row:
    found = stats.mean(after).to_dict()
    if frame.measure != "custom":  # a share; a metric of one's own may be anything
        found |= {end: None if found[end] is None else min(max(found[end], 0.0), 1.0) for end in ("low", "high")}
    return found


def correct_looks(rows: list[Row]) -> None:
    """Holm's correction over the p values of rows that were looked at together."""
    looked = [row for row in rows if "p" in row]
    for row, corrected in zip(looked, stats.holm([row["p"] for row in looked]), strict=True):
        row["p_corrected"] = corrected


def parted(ratio: Row) -> bool:
    """Whether injection surely differs from prediction by more than a factor of two: the model is not linear there."""
    low, high = ratio["low"], ratio["high"]
    return (low is not None and low > PARTED) or (high is not None and high < 1 / PARTED)


def _estimate(values: Array, *, countable: bool = True) -> Row:
    """The mean of what is finite. `countable` False: nats and decibels, whose zeros are no wrong answers."""
    known = values[np.isfinite(values)]
    if not len(known):
        return stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE).to_dict()
    found = stats.mean(known, countable=countable).to_dict()
    if found["low"] is not None and known.min() >= 0:
        found["low"] = max(found["low"], 0.0)  # a divergence has no interval below 0
    return found


def _ratio(above: Array, below: Array) -> Row:
    known = np.isfinite(above) & np.isfinite(below)
    if not known.any():
        return stats.Estimate(None, None, None, 0, note=NOT_MEASURABLE).to_dict()
    return stats.ratio(np.maximum(above[known], 0.0), below[known]).to_dict()


estimate, ratio = _estimate, _ratio
