"""The bar chart of sliding windows, in the colours of their bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noisescope.diagnostic.levels import loss_of
from noisescope.errors import InvalidInput
from noisescope.findings import BANDS, LIMITS, NOT_MEASURABLE, band

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From harmless to critical, light to dark, so that they differ in grey and for the colour-blind too.
COLOURS = dict(zip(BANDS["window"].names, ("#a6dba0", "#fee391", "#fe9929", "#d7301f", "#7f0000"), strict=True))
COLOURS[NOT_MEASURABLE] = "#bdbdbd"


def plot_sensitivity_heatmap(
    sensitivity_map: Mapping[str, Mapping[str, Any]], window_size: int | None = None
) -> Figure:
    """Accuracy lost in each window, in percent, as a matplotlib Figure: `figure.savefig("windows.png")`.

    It is made without pyplot, so no window opens and nothing is left behind. A window that could not be measured has a
    grey label and no bar.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not sensitivity_map:
        raise InvalidInput("there are no windows to draw: pass what sliding_window_diagnosis returned")
    ordered = sorted(sensitivity_map.items(), key=lambda pair: pair[1]["start_layer"])
    labels = [label for label, _ in ordered]
    losses = [loss_of(row) for _, row in ordered]
    bands = [band("window", loss) for loss in losses]
    size = window_size or max(row["end_layer"] - row["start_layer"] + 1 for _, row in ordered)

    figure = Figure(figsize=(max(6.0, 0.45 * len(labels)), 4.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(labels)), [100 * (loss or 0.0) for loss in losses], color=[COLOURS[name] for name in bands])
    for position, name in enumerate(bands):
        if name == NOT_MEASURABLE:
            axes.text(position, 0, NOT_MEASURABLE, rotation=90, ha="center", va="bottom", color="#636363", fontsize=8)
    limit = 100 * LIMITS["avalanche_degradation"]
    line = axes.axhline(limit, color="#525252", linestyle="--", linewidth=1, label=f"avalanche level ({limit:g} %)")
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_xlabel("layers with noise")
    axes.set_ylabel("accuracy lost (%)")
    axes.set_title(f"Sensitivity of layers, windows of {size}")
    patches = [Patch(color=colour, label=name.lower()) for name, colour in COLOURS.items() if name in bands]
    axes.legend(handles=[*patches, line], fontsize=8)
    return figure
