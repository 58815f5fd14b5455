"""Level 3: channels far larger than the rest, by four rules, and channels whose noise costs most."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from noisescope import stats
from noisescope.diagnosis.effects import Row, effect
from noisescope.diagnosis.frame import Array, Frame
from noisescope.diagnosis.screen import Screened
from noisescope.findings import LIMITS, band
from noisescope.injection import Injection
from noisescope.sites import Site
from noisescope.trials import Result, Results, Trial

CONFIRMED = 3  # channels that `standard` confirms by injection; `full` takes more
CONFIRMED_FULL = 12
LISTED = 20  # channels and outliers listed by number; counts are of all
CAPTURED = ("linear", "residual")  # where quantisation meets activations


def capture_trial(frame: Frame) -> Trial | None:
    if frame.calibration is None:
        return None
    where = Injection(frame.settings.perturbation, operators=frozenset(CAPTURED), phases=frozenset({"forward"}))
    return Trial(frame.conditions, "capture", frame.calibration, where)


def propose(frame: Frame, results: Results, screened: Screened | None) -> list[Trial]:
    capture = capture_trial(frame)
    trials = [] if capture is None else [capture]
    if frame.settings.effort != "screen":
        for site, channel in channels_to_confirm(frame, screened):
            trials += frame.ask(channel_injection(frame, site, channel))
    return trials


def channel_injection(frame: Frame, site: Site, channel: int) -> Injection:
    return frame.injection(
        operators=frozenset({site.operator}),
        places=frozenset({site.place}),
        modules=(site.module,),
        channels=(channel,),
    )


def channels_to_confirm(frame: Frame, screened: Screened | None) -> list[tuple[Site, int]]:
    count = CONFIRMED_FULL if frame.settings.effort == "full" else CONFIRMED
    return [(site, channel) for site, channel, _ in costliest(screened)[:count]]


def costliest(screened: Screened | None, listed: int = LISTED) -> list[tuple[Site, int, float]]:
    """(site, channel, predicted KL) of linears inside the blocks, the costliest first."""
    if screened is None or screened.error:
        return []
    found: list[tuple[Site, int, float]] = []
    for site in screened.sites:
        if site.operator != "linear" or not isinstance(site.place, int):
            continue
        cost = screened.channel_shares(site)
        for channel in np.argsort(-cost)[:listed]:
            found.append((site, int(channel), float(cost[channel])))
    return sorted(found, key=lambda entry: -entry[2])[:listed]


def conclude(frame: Frame, results: Results, screened: Screened | None) -> Row:
    trial = capture_trial(frame)
    captured = None if trial is None else results.get(trial.id)
    row: Row = {"costliest": [_cost_row(frame, results, screened, *entry) for entry in costliest(screened)]}
    if captured is None:
        return {**row, "evidence": "none"}
    if captured.failed:
        return {**row, "evidence": "failed", "error": captured.error}
    per_layer = outliers_of(frame, captured, screened)
    assert trial is not None
    return {
        **row,
        "evidence": "captured",
        "n": trial.slice.stop - trial.slice.start,
        "threshold": frame.settings.outlier_threshold,
        "summary": summary_of(per_layer),
        "per_layer": per_layer,
    }


def captured_sites(captured: Result) -> Iterator[tuple[Site, Row, dict[str, Array]]]:
    """Each site of a capture with its facts and its statistics [C] by name."""
    at = 0
    for facts in captured.facts["sites"]:
        end = at + facts["channels"]
        site = Site(
            facts["operator"], facts["place"], facts["module"], facts["component"], occurrence=facts["occurrence"]
        )
        yield site, facts, {name: array[at:end].astype(np.float64) for name, array in captured.arrays.items()}
        at = end


def outliers_of(frame: Frame, captured: Result, screened: Screened | None) -> dict[str, Row]:
    """Each module's channels under the four rules; `outlier_indices` are those of the first, the default."""
    rows: dict[str, Row] = {}
    for site, facts, columns in captured_sites(captured):
        name = site.module if site.operator == "linear" else f"{site.module} ({site.operator})"
        name = f"{name} #{site.occurrence}" if site.occurrence else name  # experts compute several products
        rows[name] = {
            "layer": site.place,
            "operator": site.operator,
            **outlier_row(columns, _fisher(screened, site), frame.settings.outlier_threshold),
            "sparsity": facts["sparsity"],
            "relative_sparsity": facts["relative_sparsity"],
            "count": facts["count"],
        }
    return rows


def summary_of(per_layer: dict[str, Row]) -> Row:
    """Outliers of all modules together."""
    found = [row for row in per_layer.values() if row["num_outliers"]]
    total = sum(row["total_channels"] for row in per_layer.values())
    outliers = sum(row["num_outliers"] for row in found)
    return {
        "layers_with_outliers": len(found),
        "total_outlier_channels": outliers,
        "total_channels": total,
        "outlier_percentage": 100 * outliers / total if total else 0.0,
        "nonfinite_channels": sum(row["nonfinite_channels"] for row in per_layer.values()),
        "max_ratio": max((row["max_ratio"] for row in per_layer.values()), default=None),
        "largest": max((row["global_max"] for row in per_layer.values()), default=None),
    }


def outlier_row(columns: dict[str, Array], fisher: Array | None, threshold: float, *, listed: int = LISTED) -> Row:
    """The four rules, on statistics [C] of one module's channels. Channels that are not finite are counted apart."""
    finite = np.isfinite(columns["max"])
    columns = {name: np.where(finite, column, 0.0) for name, column in columns.items()}
    ratio = over_median(columns["max"])
    mean_ratio = over_median(columns["mean_abs"])
    middle = columns["q50"]
    spread = np.where(middle > 0, columns["q99"] / np.where(middle > 0, middle, 1.0), 0.0)
    found = np.flatnonzero(ratio > threshold)
    order = found[np.argsort(-ratio[found], kind="stable")]
    by_fisher = (
        None
        if fisher is None or len(fisher) != len(ratio)
        else int((fisher > np.quantile(fisher, LIMITS["outlier_fisher_quantile"])).sum())
    )
    return {
        "outlier_indices": [int(i) for i in order[:listed]],
        "outlier_ratios": [float(ratio[i]) for i in order[:listed]],
        "num_outliers": len(found),
        "total_channels": len(ratio),
        "outlier_percentage": 100 * len(found) / len(ratio),
        "nonfinite_channels": int((~finite).sum()),
        "max_ratio": float(ratio.max()),
        "band": band("outlier_ratio", float(ratio.max())),
        "median_max": float(np.median(columns["max"])),
        "global_max": float(columns["max"].max()),
        "rules": {
            "max": len(found),
            "mean": int((mean_ratio > threshold).sum()),
            "quantile": int((spread > LIMITS["outlier_quantile_ratio"]).sum()),
            "fisher": by_fisher,
        },
    }


def over_median(values: Array) -> Array:
    """values / their median; where the median is 0 (most channels never fire), over the smallest that is not."""
    middle = float(np.median(values))
    if middle <= 0:
        alive = values[values > 0]
        middle = float(alive.min()) if len(alive) else 1.0
    ratio: Array = values / middle
    return ratio


def _fisher(screened: Screened | None, site: Site) -> Array | None:
    if screened is None or site not in screened.sites:
        return None
    return screened.channel_shares(site)


def _cost_row(frame: Frame, results: Results, screened: Screened | None, site: Site, channel: int, cost: float) -> Row:
    row: Row = {"module": site.module, "layer": site.place, "channel": channel, "predicted_nats": cost}
    known = effect(frame, results, channel_injection(frame, site, channel))
    if known["evidence"] == "injected" and "kl" in known:
        injected = known["kl"]["value"]
        row |= {
            "kl": known["kl"],
            "injected_over_predicted": None if injected is None or cost <= 0 else injected / cost,
        }
    return {**row, "evidence": "injected" if known["evidence"] == "injected" else "predicted"}


def correlate_with_layers(frame: Frame, windows: list[Row], per_layer: dict[str, Row]) -> Row:
    """Outlier counts against the degradation of windows that share no layer (the cross-level correlation)."""
    rows = [row for row in windows if row["evidence"] == "injected" and row["degradation"]["value"] is not None]
    counts = [
        sum(
            info["num_outliers"]
            for info in per_layer.values()
            if row["start_layer"] <= _block(info) <= row["end_layer"]
        )
        for row in rows
    ]
    losses = [row["degradation"]["value"] for row in rows]
    every = max(1, -(-min(frame.settings.window, frame.blocks) // frame.settings.step))
    if len(rows) < 2:
        return {"value": None, "note": "fewer than two windows were measured", "n": len(rows)}
    return stats.correlation(counts, losses, method="pearson", every=every).to_dict()


def _block(info: Row) -> int:
    return info["layer"] if isinstance(info["layer"], int) else -1
