"""What the original method notes advise for outlier channels."""

from __future__ import annotations

from typing import Any

import pytest

from noisescope.errors import InvalidInput
from noisescope.plans.smoothing import FoldRow, gain_sentence, method_for, recommendations
from noisescope.stats import Estimate


@pytest.mark.parametrize(
    ("ratio", "target", "method"),
    [
        (5, "W8A8", ("none", None)),
        (15, "W8A8", ("monitor", None)),
        (30, "W8A8", ("per-channel", None)),
        (80, "W8A8", ("SmoothQuant", 0.75)),
        (80, "W4A16", ("AWQ", None)),
        (5, "W4A16", ("none", None)),
        (10, "W8A8", ("none", None)),
        (20, "W8A8", ("monitor", None)),
        (50, "W8A8", ("per-channel", None)),
        (80, "W4A4", ("OmniQuant", None)),
    ],
)
def test_the_tables(ratio: float, target: str, method: Any) -> None:
    """By the largest ratio, and by what is to be rounded."""
    assert method_for(ratio, target) == method


LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def fold(source: str, targets: tuple[str, ...], place: int, gain: float, norm: int | None = None) -> FoldRow:
    block = f"layers.{place}."
    gains = {"SmoothQuant": gain, "AWQ": 1.0, "per-channel": 2.0}
    return FoldRow(block + source, tuple(block + target for target in targets), place, norm, 0.5, 2.0, gains)


def folds_of(place: int, *, second: int = 1) -> list[FoldRow]:
    """Those of a block; each has a gain of its own, by which it is known."""
    return [
        fold("norm1", ("attn.q", "attn.k", "attn.v"), place, 10.0 * place + 1, 0),
        fold("norm2", ("mlp.gate", "mlp.up"), place, 10.0 * place + 2, second),
        fold("attn.v", ("attn.o",), place, 10.0 * place + 3),
        fold("mlp.up", ("mlp.down",), place, 10.0 * place + 4),
    ]


def smoothquant_gains(made: Any, folds: list[FoldRow]) -> dict[str, float | None]:
    rows = [made.channels(b, 60.0, module=f"layers.{b}.{name}") for b in (0, 1) for name in LINEARS]
    rows += [made.channels(b, 60.0, "residual", module=f"layers.{b}") for b in (0, 1)]
    rows.append(made.channels("lm_head", 60.0, module="lm_head"))
    found = recommendations(made.diagnosis(channel_analysis=made.captured(*rows)), folds)
    return {row.component: row.gains.get("SmoothQuant") for row in found}


def test_gains_are_of_what_reads_the_channels(made: Any) -> None:
    """Of the linears that a module's outputs go to, never of those that give its inputs."""
    found = smoothquant_gains(made, [*folds_of(0), *folds_of(1)])
    assert found == {
        **dict.fromkeys(found),
        "layers.0.attn.v": 3, "layers.0.attn.o": 2, "layers.0.mlp.up": 4, "layers.0.mlp.down": 12,
        "layers.0 (residual)": 12,  # the larger of the two norms'
        "layers.1.attn.v": 13, "layers.1.attn.o": 12, "layers.1.mlp.up": 14,
    }  # fmt: skip


def test_side_by_side_nothing_is_read_in_the_same_block(made: Any) -> None:
    """Where attention and MLP run in parallel, both add to what the next block reads."""
    found = smoothquant_gains(made, [*folds_of(0, second=0), *folds_of(1, second=0)])
    assert found["layers.0.attn.o"] == found["layers.0.mlp.down"] == 12
    assert found["layers.1.attn.o"] is None


def test_rows_and_refusals(made: Any) -> None:
    """The largest ratio first, small ones have no row; a report without channels is refused."""
    rows = (
        made.channels(0, 30.0, "residual", module="layers.0"),
        made.channels(0, 60.0, module="layers.0.mlp.up"),
        made.channels(1, 3.0, module="layers.1.attn.q"),
    )
    found = recommendations(made.diagnosis(channel_analysis=made.captured(*rows)), [*folds_of(0), *folds_of(1)])
    assert [(row.component, row.method, row.alpha, row.best) for row in found] == [
        ("layers.0.mlp.up", "SmoothQuant", 0.75, "SmoothQuant"),
        ("layers.0 (residual)", "per-channel", None, "SmoothQuant"),
    ]
    with pytest.raises(InvalidInput, match="channel level"):
        recommendations(made.diagnosis(), [])
    with pytest.raises(InvalidInput, match="'W2A2'"):
        method_for(60, "W2A2")


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Estimate(2.0, 1.5, 3.0, 8), "of a typical sample by 2 [1.5, 3] (paired): it helps"),
        (Estimate(2.0, 0.5, None, 8), "by 2 [0.5, ...] (paired): undecided whether it helps"),
        (Estimate(2.7, None, None, 2), "by 2.7 (2 samples are too few for an interval): undecided whether it helps"),
        (Estimate(0.5, 0.25, 0.75, 8), "by 0.5 [0.25, 0.75] (paired): it makes the KL larger"),
        (Estimate(None, None, None, 0, note="not measurable"), "the gain of smoothing is not measurable"),
    ],
)
def test_a_gain_comes_with_its_interval(gain: Estimate, words: str) -> None:
    """Smoothing helps where the whole interval lies above 1, and harms where it lies below."""
    assert words in gain_sentence(gain)
