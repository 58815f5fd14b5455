"""Whether metrics agree with each other, by the names of the original method notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noisescope import stats
from noisescope.diagnostic.asking import Row, ends_of, layer_of
from noisescope.diagnostic.levels import loss_of
from noisescope.errors import InvalidInput
from noisescope.findings import EXPECTED_CORRELATIONS, as_expected

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Profile:
    """A window of layers and what noise costs there: its degradation, or where that is not given its score."""

    label: str
    start: int
    end: int
    cost: float | None


def correlate_layer_and_channel_sensitivity(
    sliding_window_results: Rows, outlier_report: Mapping[str, Any]
) -> tuple[list[Row], float | None]:
    """Each window's outlier channels beside its degradation, and Pearson's correlation of the two.

    The correlation is over windows that share no layer, since overlapping ones are no independent points; None where
    fewer than three are left or all are alike. A module belongs to the layer that its row says (`layer`), else to the
    number in its name.
    """
    windows = _windows(sliding_window_results)
    counts = _outliers(windows, outlier_report)
    rows = [
        {
            "layer_range": window.label,
            "sensitivity_score": sliding_window_results[window.label].get("sensitivity_score"),
            "total_outliers": counts[window.label],
            "degradation": _degradation(sliding_window_results[window.label]),
        }
        for window in windows
    ]
    return rows, _correlated(windows, counts, "the outlier report")["r"]


def validate_metric_correlations(diagnostic_results: Mapping[str, Any]) -> dict[str, Row]:
    """Whether metrics relate as the notes expect: {name: {r, p, n, held, interpretation}}.

    Takes the report of `IntegratedDiagnostic` (its correlations over single layers), or a dict with `layer_results` and
    `channel_results` and perhaps `hessian_traces` and `sparsity` by window ("L0-2"), all in the notes' shape. Sparsity
    is set against degradation, where a negative correlation is expected; against robustness, as in the notes, it would
    be positive.
    """
    if "full" in diagnostic_results:
        known = diagnostic_results["full"]["correlations"]
        return {
            name: _judged(name, {"r": known[name]["correlation"]["value"], **known[name]["correlation"]})
            for name in EXPECTED_CORRELATIONS
            if name in known
        }
    for part in ("layer_results", "channel_results"):
        if part not in diagnostic_results:
            raise InvalidInput(
                f"there is no {part!r}: pass the report of IntegratedDiagnostic, or a dictionary with layer_results "
                f"and channel_results; got {', '.join(map(str, diagnostic_results)) or 'an empty one'}"
            )
    windows = _windows(diagnostic_results["layer_results"])
    profiles = {
        "hessian_sensitivity": ("hessian_traces", diagnostic_results.get("hessian_traces")),
        "outliers_sensitivity": ("channel_results", _outliers(windows, diagnostic_results["channel_results"])),
        "sparsity_degradation": ("sparsity", diagnostic_results.get("sparsity")),
    }
    return {
        name: _judged(name, _correlated(windows, profile, source))
        for name, (source, profile) in profiles.items()
        if profile is not None
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


def _windows(results: Rows) -> list[Profile]:
    found = []
    for label, row in results.items():
        start, end = (row["start_layer"], row["end_layer"]) if "start_layer" in row else ends_of(label)
        cost = _degradation(row) if "degradation" in row else row.get("sensitivity_score")
        found.append(Profile(label, start, end, cost))
    return sorted(found, key=lambda window: (window.start, window.end))


def _degradation(row: Mapping[str, Any]) -> float | None:
    return loss_of(row) if "degradation" in row else None


def _outliers(windows: Sequence[Profile], report: Mapping[str, Any]) -> dict[str, int]:
    """Outlier channels of each window's layers."""
    by_layer: Counter[Any] = Counter()
    for name, info in report["per_layer"].items():
        layer = info["layer"] if "layer" in info else layer_of(name)
        if layer is None:
            raise InvalidInput(
                f"{name} has no `layer` and no number in its name, such as model.layers.9.mlp.down_proj: use the "
                "report of ChannelOutlierDetector or IntegratedDiagnostic"
            )
        by_layer[layer] += info["num_outliers"]
    return {window.label: sum(by_layer[n] for n in range(window.start, window.end + 1)) for window in windows}


def _correlated(windows: Sequence[Profile], profile: Mapping[str, float], source: str) -> Row:
    """Pearson's r of a profile by window with the cost, over measured windows that share no layer."""
    apart: list[Profile] = []
    for window in windows:
        free = not apart or window.start > apart[-1].end
        if free and window.cost is not None:
            apart.append(window)
    missing = [window.label for window in apart if window.label not in profile]
    if missing:
        raise InvalidInput(f"{source} has no value for {', '.join(missing)}: it needs one for each window")
    if len(apart) < 3:
        return {"r": None, "p": None, "n": len(apart)}
    found = stats.correlation(
        [profile[window.label] for window in apart],
        [window.cost for window in apart if window.cost is not None],
        method="pearson",
    )
    return {"r": found.value, "p": found.p, "n": found.n}
