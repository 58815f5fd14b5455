"""The metrics dashboard: the model in single numbers, curvature per layer, and whether metrics agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from noisescope import stats
from noisescope.diagnosis import channels, threshold
from noisescope.diagnosis.effects import Row, effect, estimate
from noisescope.diagnosis.frame import Frame, present_operators
from noisescope.diagnosis.screen import Screened
from noisescope.findings import EXPECTED_CORRELATIONS, NOT_MEASURABLE, as_expected, band, dashboard_risk
from noisescope.injection import Injection
from noisescope.sites import GROUPS
from noisescope.trials import Results, Trial

LAYERS_WITH_THRESHOLD = 5  # in a full diagnosis: the most sensitive ones


def model_injection(frame: Frame) -> Injection:
    """The noise of Level 2 in every layer at once."""
    return frame.injection()


def curvature_trial(frame: Frame) -> Trial | None:
    if frame.few is None or frame.settings.effort == "screen":
        return None
    return Trial(frame.conditions, "curvature", frame.few, None, {"probes": frame.settings.probes, "seed": 0})


def gradient_trials(frame: Frame) -> list[Trial]:
    """Clean, and with noise forward and backward, as training on such hardware would have it."""
    if frame.few is None or frame.settings.effort == "screen":
        return []
    noisy = dataclasses.replace(model_injection(frame), phases=frozenset({"forward", "backward"}))
    return [Trial(frame.conditions, "gradients", frame.few, injection) for injection in (None, noisy)]


def propose(frame: Frame, results: Results, screened: Screened | None) -> list[Trial]:
    if frame.settings.effort == "screen":
        return []
    trials = frame.ask(model_injection(frame)) + gradient_trials(frame)
    curvature = curvature_trial(frame)
    trials += [] if curvature is None else [curvature]
    for aim in threshold_aims(frame, screened).values():
        trials += threshold.propose(frame, results, **aim)
    return trials


def threshold_aims(frame: Frame, screened: Screened | None) -> dict[str, dict[str, Any]]:
    """What a critical threshold is found for: the model; in a full diagnosis also operators and the worst layers."""
    aims: dict[str, dict[str, Any]] = {"model": {}}
    if frame.settings.effort == "full":
        for operator in present_operators(frame):
            if operator not in GROUPS:
                aims[f"operator {operator}"] = {"operators": frozenset({operator})}
        if screened is not None and not screened.error:
            cost = {
                layer: float(screened.predicted(lambda site, layer=layer: site.place == layer).mean())  # type: ignore[misc]
                for layer in range(frame.blocks)
            }
            for layer in sorted(cost, key=lambda layer: -cost[layer])[:LAYERS_WITH_THRESHOLD]:
                aims[f"layer {layer}"] = {"layers": frozenset({layer})}
    return aims


def conclude(frame: Frame, results: Results, screened: Screened | None, channel_rows: Row | None) -> Row:
    whole = effect(frame, results, model_injection(frame), screened)
    loss = whole.get("degradation", {}).get("value")
    thresholds = {
        name: threshold.conclude(frame, results, **aim) for name, aim in threshold_aims(frame, screened).items()
    }
    if frame.settings.effort == "screen":
        thresholds = {}
    return {
        "primary": {
            "relative_degradation": whole.get("degradation"),
            "degradation_band": whole.get("band", NOT_MEASURABLE),
            "noise_tolerance_index": whole.get("noise_tolerance_index"),
            "noise_tolerance_band": _tolerance_band(whole),
            "critical_threshold": thresholds.get("model"),
        },
        "secondary": {
            "snr_db": whole.get("snr_db"),
            "snr_band": band("snr_db", (whole.get("snr_db") or {}).get("value")),
            "nominal_snr_db": -20 * float(np.log10(frame.settings.scale)),
            "gradient_ratio": _gradient_ratio(frame, results),
            "activation_sparsity": _sparsity(channel_rows),
        },
        "critical_thresholds": thresholds,
        "hessian_trace": _traces(frame, results),
        "fisher": _fisher(frame, screened),
        "baseline": _baseline(frame, results),
        "risk": dashboard_risk(loss).to_dict(),
    }


def _tolerance_band(whole: Row) -> str:
    index = whole.get("noise_tolerance_index")
    if index is None:
        return NOT_MEASURABLE
    if index.get("note") == stats.UNBOUNDED:
        return band("noise_tolerance_index", float("inf"))
    return band("noise_tolerance_index", index["value"])


def _baseline(frame: Frame, results: Results) -> Row:
    """The clean model, metric by metric."""
    clean = frame.answer(results, None)
    if clean is None or clean.error:
        return {}
    row: Row = {name: estimate(clean.values(name)[0]) for name in clean.metrics if name != "nonfinite"}
    for name in ("accuracy", "next_token_accuracy", "agreement"):
        if name in row and frame.measure != "custom" and row[name]["high"] is not None:
            row[name]["high"] = min(row[name]["high"], 1.0)
    row["nonfinite"] = clean.nonfinite
    known = clean.values(frame.metric)[0]
    row["measurable"] = stats.measurable(known[np.isfinite(known)], frame.chance)
    row["chance"] = frame.chance
    return row


def _gradient_ratio(frame: Frame, results: Results) -> Row | None:
    found = [results.get(trial.id) for trial in gradient_trials(frame)]
    if len(found) != 2 or any(result is None or result.failed for result in found):
        return None
    clean, noisy = (result.facts["norms"] for result in found if result is not None)
    total = float(np.hypot.reduce(list(noisy.values())) / max(np.hypot.reduce(list(clean.values())), 1e-30))
    per_layer = {layer: noisy[layer] / clean[layer] if clean[layer] > 0 else None for layer in clean}
    count = 0 if frame.few is None else frame.few.stop - frame.few.start
    return {"value": total, "band": band("gradient_ratio", total), "n": count, "seeds": 1, "per_layer": per_layer}


def _sparsity(channel_rows: Row | None) -> Row | None:
    """Mean over the captured linears, by an absolute threshold of 1e-6 and by 1 % of the tensor's rms."""
    rows = (
        []
        if channel_rows is None
        else [r for r in channel_rows.get("per_layer", {}).values() if r["operator"] == "linear"]
    )
    if not rows:
        return None
    absolute, relative = (float(np.mean([row[name] for row in rows])) for name in ("sparsity", "relative_sparsity"))
    return {"absolute": absolute, "relative": relative, "band": band("sparsity", relative)}


def _traces(frame: Frame, results: Results) -> Row | None:
    trial = curvature_trial(frame)
    found = None if trial is None else results.get(trial.id)
    if found is None:
        return None
    return {"error": found.error} if found.failed else dict(found.facts["traces"])


def _fisher(frame: Frame, screened: Screened | None) -> Row | None:
    """Predicted KL of each layer: the Fisher information of its activations, weighted by the noise."""
    if screened is None or screened.error:
        return None
    return {
        str(layer): estimate(
            screened.predicted(lambda site, layer=layer: site.place == layer),  # type: ignore[misc]
            countable=False,
        )
        for layer in range(frame.blocks)
    }


def correlations(frame: Frame, layer_rows: Row | None, metrics: Row, channel_rows: Row | None) -> Row:
    """Whether metrics relate as the original method notes expect, over layers that were measured.

    Per layer the sensitivity is the injected KL where all layers have one, else the predicted; `against` says which.
    """
    if layer_rows is None:
        return {}
    against, sensitivity = _layer_sensitivity(layer_rows)
    if sensitivity is None:
        return {}
    found: Row = {}
    traces = metrics["hessian_trace"]
    if traces and "error" not in traces:
        values = [traces[str(layer)]["trace"] for layer in range(frame.blocks)]
        found["hessian_sensitivity"] = _correlated("hessian_sensitivity", values, sensitivity, against)
    per_layer = (channel_rows or {}).get("per_layer")
    if per_layer:
        blocks = range(frame.blocks)
        counts = [sum(r["num_outliers"] for r in per_layer.values() if r["layer"] == layer) for layer in blocks]
        sparse = [
            float(np.mean([r["relative_sparsity"] for r in per_layer.values() if r["layer"] == layer]))
            for layer in blocks
        ]
        found["outliers_sensitivity"] = _correlated("outliers_sensitivity", counts, sensitivity, against)
        found["sparsity_degradation"] = _correlated("sparsity_degradation", sparse, sensitivity, against)
        found["outliers_windows"] = channels.correlate_with_layers(frame, layer_rows["windows"], per_layer)
    return found


def _layer_sensitivity(layer_rows: Row) -> tuple[str, list[float] | None]:
    for name, key in (("injected KL", "kl"), ("predicted KL", "predicted_kl")):
        values = [row.get(key, {}).get("value") for row in layer_rows["layers"]]
        if values and all(value is not None for value in values):
            return name, values
    return "", None


def _correlated(name: str, values: list[float], sensitivity: list[float], against: str) -> Row:
    sign, bound = EXPECTED_CORRELATIONS[name]
    expected = f"r {'above' if sign == '>' else 'below'} {bound}"
    if len(values) < 3:
        return {"value": None, "note": "fewer than three layers", "n": len(values), "expected": expected}
    row = stats.correlation(values, sensitivity, method="pearson").to_dict()
    return {**row, "against": against, "expected": expected, "held": as_expected(name, row["value"])}
