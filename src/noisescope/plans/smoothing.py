"""What to do about outlier channels, by the tables of the original method notes, with what it would gain.

======================  ==============================================================================================
largest over median     W8A8
======================  ==============================================================================================
above 50                SmoothQuant, alpha 0.75
20 to 50                scales of their own (per-channel quantisation)
10 to 20                watch: one scale a tensor may do
======================  ==============================================================================================

For W4A16 it is AWQ, whatever the ratio above 10, and for W4A4 OmniQuant, whose gain is not measured here. Gains are
measured on the linears that read the same channels:

=========================================  ===========================================================================
outputs of                                 are read by
=========================================  ===========================================================================
v_proj, up_proj                            o_proj, down_proj
a linear that adds to the residual stream  linears behind the norms of the next sub-layer (from the last: next block)
a block (its residual stream)              linears behind the norms of the next block
q_proj, k_proj, gate_proj, the last block  no linear of a block as they are: no gain is told
=========================================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.findings import band, outlier_advice
from noisescope.findings.advice import TARGETS
from noisescope.plans.words import span

# By the band of the largest ratio (findings/bands.py), for W8A8; other targets have one method.
METHODS = {"MODERATE": ("watch", None), "HIGH": ("per-channel", None), "CRITICAL": ("SmoothQuant", 0.75)}
OTHERS = {"W4A16": "AWQ", "W4A4": "OmniQuant"}


def method_for(max_ratio: float, target: str = "W8A8") -> tuple[str, float | None]:
    """(method, alpha) for a module whose largest channel is `max_ratio` times the median."""
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    name = band("outlier_ratio", max_ratio)
    if name not in METHODS:
        return "none", None
    return (OTHERS[target], None) if target in OTHERS else METHODS[name]


def gain_told(gain: Mapping[str, Any]) -> str:
    """What smoothing divides the KL by, and whether that is sure."""
    if gain["value"] is None:
        return f"what smoothing gains is {gain['note']}: no KL is left"
    words = f"smoothing divides it by {gain['value']:.3g} {span(gain, '.3g')}, in pairs: "
    if gain["low"] is not None and gain["low"] > 1:
        return words + "it pays"
    if gain["high"] is not None and gain["high"] < 1:
        return words + "it makes it worse"
    return words + "whether it pays is not sure, raise --samples"


def recommendations(
    report: Mapping[str, Any], folds: Sequence[Mapping[str, Any]], *, target: str = "W8A8"
) -> list[dict[str, Any]]:
    """A row for each module with outliers, the largest first: the notes' method, and the measured gain of each.

    `folds` are rows of `Folded.to_dict`; gains are the largest of those whose linears read the module's outputs.
    """
    channels = (report.get("channel_analysis") or {}).get("per_layer")
    if channels is None:
        raise InvalidInput("the report has no channels: run `noisescope diagnose` with the channel level")
    rows = []
    for name, found in channels.items():
        method, alpha = method_for(found["max_ratio"], target)
        if method == "none":
            continue
        near = _reading(name, found, folds)
        gains = {key: max(fold["gains"][key] for fold in near) for key in near[0]["gains"]} if near else {}
        rows.append(
            {
                "component": name,
                "max_ratio": found["max_ratio"],
                "method": method,
                "alpha": alpha,
                "gains": gains,
                "best": max(gains, key=lambda key: gains[key]) if gains else None,
                "advice": outlier_advice(target),
            }
        )
    return sorted(rows, key=lambda row: -row["max_ratio"])


def _reading(name: str, found: Mapping[str, Any], folds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The folds whose linears read what a module gives."""
    own = [fold for fold in folds if fold["source"] == name]
    norms = [fold for fold in folds if fold["norm"] is not None]
    if own or any(name in fold["targets"] for fold in norms):
        return own
    place = found["layer"]
    next_block = [fold for fold in norms if isinstance(place, int) and fold["place"] == place + 1]
    if found["operator"] == "residual":
        return next_block
    # What is left adds to the residual stream, at the end of the sub-layer whose first linears have the same parent.
    here = [fold for fold in norms if fold["place"] == place]
    begun = [fold["norm"] for fold in here if _parent(name) in map(_parent, fold["targets"])]
    if not begun:
        return []
    return [fold for fold in here if fold["norm"] > begun[0]] or next_block


def _parent(module: str) -> str:
    return module.rpartition(".")[0]
