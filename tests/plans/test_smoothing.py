"""What the original method notes advise for outlier channels."""

from __future__ import annotations

from typing import Any

import pytest

from noisescope.errors import InvalidInput
from noisescope.plans.smoothing import gain_told, method_for, recommendations


@pytest.mark.parametrize(
    ("ratio", "target", "method"),
    [
        (5, "W8A8", ("none", None)),
        (15, "W8A8", ("watch", None)),
        (30, "W8A8", ("per-channel", None)),
        (80, "W8A8", ("SmoothQuant", 0.75)),
        (80, "W4A16", ("AWQ", None)),
        (5, "W4A16", ("none", None)),
        (10, "W8A8", ("none", None)),
        (20, "W8A8", ("watch", None)),
        (50, "W8A8", ("per-channel", None)),
        (80, "W4A4", ("OmniQuant", None)),
    ],
)
def test_the_tables(ratio: float, target: str, method: Any) -> None:
    """By the largest ratio, and by what is to be rounded."""
    assert method_for(ratio, target) == method


LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def fold(source: str, targets: tuple[str, ...], place: int, gain: float, norm: int | None = None) -> dict[str, Any]:
    block = f"layers.{place}."
    gains = {"SmoothQuant": gain, "AWQ": 1.0, "per-channel": 2.0}
    names = [block + target for target in targets]
    return {"source": block + source, "targets": names, "place": place, "norm": norm, "gains": gains}


def folds_of(place: int, *, second: int = 1) -> list[dict[str, Any]]:
    """Those of a block; each has a gain of its own, which tells it."""
    return [
        fold("norm1", ("attn.q", "attn.k", "attn.v"), place, 10.0 * place + 1, 0),
        fold("norm2", ("mlp.gate", "mlp.up"), place, 10.0 * place + 2, second),
        fold("attn.v", ("attn.o",), place, 10.0 * place + 3),
        fold("mlp.up", ("mlp.down",), place, 10.0 * place + 4),
    ]


def smoothquant_gains(folds: list[dict[str, Any]]) -> dict[str, float | None]:
    rows = {f"layers.{b}.{name}": {"layer": b, "operator": "linear"} for b in (0, 1) for name in LINEARS}
    rows |= {f"layers.{b} (residual)": {"layer": b, "operator": "residual"} for b in (0, 1)}
    rows["lm_head"] = {"layer": "lm_head", "operator": "linear"}
    report = {"channel_analysis": {"per_layer": {name: {**row, "max_ratio": 60.0} for name, row in rows.items()}}}
    found = recommendations(report, folds)
    return {row["component"]: row["gains"].get("SmoothQuant") for row in found}


def test_gains_are_of_what_reads_the_channels() -> None:
    """Of the linears that a module's outputs go to, never of those that give its inputs."""
    found = smoothquant_gains([*folds_of(0), *folds_of(1)])
    assert found == {
        **dict.fromkeys(found),
        "layers.0.attn.v": 3, "layers.0.attn.o": 2, "layers.0.mlp.up": 4, "layers.0.mlp.down": 12,
        "layers.0 (residual)": 12,  # the larger of the two norms'
        "layers.1.attn.v": 13, "layers.1.attn.o": 12, "layers.1.mlp.up": 14,
    }  # fmt: skip


def test_side_by_side_nothing_is_read_in_the_same_block() -> None:
    """Where attention and MLP run in parallel, both add to what the next block reads."""
    found = smoothquant_gains([*folds_of(0, second=0), *folds_of(1, second=0)])
    assert found["layers.0.attn.o"] == found["layers.0.mlp.down"] == 12
    assert found["layers.1.attn.o"] is None


def test_rows_and_refusals() -> None:
    """The largest ratio first, small ones have no row; a report without channels is told."""
    rows = {
        "layers.0 (residual)": {"layer": 0, "operator": "residual", "max_ratio": 30.0},
        "layers.0.mlp.up": {"layer": 0, "operator": "linear", "max_ratio": 60.0},
        "layers.1.attn.q": {"layer": 1, "operator": "linear", "max_ratio": 3.0},
    }
    found = recommendations({"channel_analysis": {"per_layer": rows}}, [*folds_of(0), *folds_of(1)])
    assert [(row["component"], row["method"], row["alpha"], row["best"]) for row in found] == [
        ("layers.0.mlp.up", "SmoothQuant", 0.75, "SmoothQuant"),
        ("layers.0 (residual)", "per-channel", None, "SmoothQuant"),
    ]
    with pytest.raises(InvalidInput, match="channel level"):
        recommendations({}, [])
    with pytest.raises(InvalidInput, match="'W2A2'"):
        method_for(60, "W2A2")


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ({"value": 2.0, "low": 1.5, "high": 3.0}, "divides it by 2 [1.5, 3], in pairs: it pays"),
        ({"value": 2.0, "low": 0.5, "high": None}, "by 2 [0.5, ...], in pairs: whether it pays is not sure"),
        ({"value": 0.5, "low": 0.25, "high": 0.75}, "by 0.5 [0.25, 0.75], in pairs: it makes it worse"),
        ({"value": None, "low": None, "high": None, "note": "not measurable"}, "is not measurable: no KL is left"),
    ],
)
def test_a_gain_is_told_with_its_interval(gain: dict[str, Any], words: str) -> None:
    """Smoothing pays where the whole interval lies above 1, and harms where it lies below."""
    assert words in gain_told(gain)
