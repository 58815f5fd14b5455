"""Whether metrics agree with each other, by the names of the original method notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noisescope import stats
from noisescope.diagnostic.asking import Row
from noisescope.diagnostic.levels import loss_of
from noisescope.errors import InvalidInput
from noisescope.findings import EXPECTED_CORRELATIONS, as_expected

Windows = Sequence[tuple[str, Mapping[str, Any]]]


def correlate_layer_and_channel_sensitivity(
    sliding_window_results: Mapping[str, Mapping[str, Any]], outlier_report: Mapping[str, Any]
) -> tuple[list[Row], float | None]:
    """Each window's outlier channels beside its degradation, and Pearson's correlation of the two.

    The correlation is over windows that share no layer, since overlapping ones are no independent points; None where
    fewer than three are left or all are alike. A module belongs to the layer that the anatomy says.
    """
    windows = _ordered(sliding_window_results)
    rows = [
        {
            "layer_range": label,
            "sensitivity_score": row["sensitivity_score"],
            "total_outliers": _outliers(row, outlier_report),
            "degradation": loss_of(row),
        }
        for label, row in windows
    ]
    found = _correlated(windows, {row["layer_range"]: row["total_outliers"] for row in rows})
    return rows, found["r"]


def validate_metric_correlations(diagnostic_results: Mapping[str, Any]) -> dict[str, Row]:
    """Whether metrics relate as the notes expect: {name: {r, p, n, held, interpretation}}.

    Takes the report of `IntegratedDiagnostic` (its correlations over single layers), or a dict with `layer_results` and
    `channel_results` and perhaps `hessian_traces` and `sparsity` by window ("L0-2"). Sparsity is set against
    degradation, where a negative correlation is expected; against robustness, as in the notes, it would be positive.
    """
    if "full" in diagnostic_results:
        known = diagnostic_results["full"]["correlations"]
        return {
            name: _judged(name, {"r": known[name]["value"], **known[name]})
            for name in EXPECTED_CORRELATIONS
            if name in known
        }
    windows = _ordered(diagnostic_results["layer_results"])
    profiles = {
        "hessian_sensitivity": diagnostic_results.get("hessian_traces"),
        "outliers_sensitivity": {
            label: _outliers(row, diagnostic_results["channel_results"]) for label, row in windows
        },
        "sparsity_degradation": diagnostic_results.get("sparsity"),
    }
    return {
        name: _judged(name, _correlated(windows, profile)) for name, profile in profiles.items() if profile is not None
    }


def _judged(name: str, row: Row) -> Row:
    sign, bound = EXPECTED_CORRELATIONS[name]
    held = as_expected(name, row["r"])
    words = {True: "as expected", False: "not as expected", None: "can't be said"}[held]
    return {
        "r": row["r"],
        "p": row.get("p"),
        "n": row["n"],
        "held": held,
        "interpretation": f"r {sign} {bound} is expected: {words}",
    }


def _ordered(results: Mapping[str, Mapping[str, Any]]) -> Windows:
    return sorted(results.items(), key=lambda pair: (pair[1]["start_layer"], pair[1]["end_layer"]))


def _outliers(window: Mapping[str, Any], report: Mapping[str, Any]) -> int:
    total = 0
    for name, info in report["per_layer"].items():
        if "layer" not in info:
            raise InvalidInput(
                f"{name} has no `layer`: use the report of ChannelOutlierDetector or IntegratedDiagnostic"
            )
        if isinstance(info["layer"], int) and window["start_layer"] <= info["layer"] <= window["end_layer"]:
            total += info["num_outliers"]
    return total


def _correlated(windows: Windows, profile: Mapping[str, float]) -> Row:
    """Pearson's r of a profile by window with the degradation, over measured windows that share no layer."""
    apart: list[tuple[str, Mapping[str, Any]]] = []
    for label, row in windows:
        free = not apart or row["start_layer"] > apart[-1][1]["end_layer"]
        if free and loss_of(row) is not None:
            apart.append((label, row))
    if len(apart) < 3:
        return {"r": None, "p": None, "n": len(apart)}
    found = stats.correlation(
        [profile[label] for label, _ in apart], [loss_of(row) or 0.0 for _, row in apart], method="pearson"
    )
    return {"r": found.value, "p": found.p, "n": found.n}
