"""What to do about outlier channels, by the tables of the original method notes, with the expected gain.

Gains are measured on the linears that read the same channels:

=========================================  ===========================================================================
outputs of                                 are read by
=========================================  ===========================================================================
v_proj, up_proj                            o_proj, down_proj
a linear that adds to the residual stream  linears behind the norms of the next sub-layer (from the last: next block)
a block (its residual stream)              linears behind the norms of the next block
q_proj, k_proj, gate_proj, the last block  no linear of a block as they are: no gain is reported
=========================================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Divergence
from noisescope.diagnosis.section_types import ChannelRow
from noisescope.errors import InvalidInput, unknown
from noisescope.findings import band, outlier_advice
from noisescope.findings.finding import TARGETS, span
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table, Tabular

# For W8A8 by the band of the largest channel over the median (findings/thresholds.py): above 10 it is watched, as one
# scale per tensor may be enough; above 20 it gets a scale of its own; above 50 it is smoothed with this alpha. Other
# targets have one method whatever the ratio above 10; the gain of OmniQuant is not measured here.
METHODS = {"MODERATE": ("monitor", None), "HIGH": ("per-channel", None), "CRITICAL": ("SmoothQuant", 0.75)}
OTHERS = {"W4A16": "AWQ", "W4A4": "OmniQuant"}


@dataclass(frozen=True)
class FoldRow:
    """What was done where scales can be folded in. `norm` counts the norms of a block from 0; None: no norm.

    `gains` are what each method divides the rounding error of the linears that read it by; `alpha` None: left alone.
    """

    source: str
    targets: tuple[str, ...]
    place: int
    norm: int | None
    alpha: float | None
    largest_scale: float
    gains: Mapping[str, float]


@dataclass(frozen=True)
class SmoothingAdvice:
    """The notes' method for a module with outliers, and the measured gain of each; `best` is the largest of these."""

    component: str
    max_ratio: float
    method: str
    alpha: float | None
    gains: Mapping[str, float]
    best: str | None
    advice: str


@dataclass(frozen=True)
class BeforeAndAfter:
    before: Divergence
    after: Divergence


@dataclass(frozen=True)
class SmoothingPlan(Tabular):
    """SmoothQuant applied to a copy. `gain` is KL before over KL after, sample by sample."""

    scheme: str
    alpha: float | None
    kl: BeforeAndAfter
    gain: Estimate
    float_error: float
    folds: tuple[FoldRow, ...]
    recommendations: tuple[SmoothingAdvice, ...]
    notes: tuple[str, ...]

    def sheet(self) -> Sheet:
        tables = {
            "recommendations": Table.of(SmoothingAdvice, self.recommendations),
            "folds": Table.of(FoldRow, self.folds),
        }
        heads = {
            "component": "module",
            "max_ratio": "largest channel / median",
            "method": "method",
            "best": "best here",
        }
        return Sheet(self.scheme, tables, heads, (f"{gain_sentence(self.gain)}.", *self.notes))


def method_for(max_ratio: float, target: str = "W8A8") -> tuple[str, float | None]:
    """(method, alpha) for a module whose largest channel is `max_ratio` times the median."""
    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    name = band("outlier_ratio", max_ratio)
    if name not in METHODS:
        return "none", None
    return (OTHERS[target], None) if target in OTHERS else METHODS[name]


def gain_sentence(gain: Estimate) -> str:
    """By how much smoothing divides the KL of a typical sample, and whether the interval shows that it helps."""
    if gain.value is None:
        return f"the gain of smoothing is {gain.note}"
    known = (
        f"{span(gain, '.3g')} (paired)"
        if gain.bounded or gain.one_sided
        else f"({gain.n} samples are too few for an interval)"
    )
    words = f"smoothing divides the KL of a typical sample by {gain.value:.3g} {known}: "
    if gain.above(1):
        return words + "it helps"
    if gain.below(1):
        return words + "it makes the KL larger"
    return words + "undecided whether it helps; more --samples would narrow the interval"


def recommendations(found: Diagnosis, folds: Sequence[FoldRow], *, target: str = "W8A8") -> tuple[SmoothingAdvice, ...]:
    """A row for each module with outliers, the largest first; gains are the largest of the folds that read it."""
    if found.channel_analysis is None or found.channel_analysis.evidence != "captured":
        raise InvalidInput("the report has no channels: run `noisescope diagnose` with the channel level")
    rows = []
    for name, row in found.channel_analysis.per_layer.items():
        method, alpha = method_for(row.max_ratio, target)
        if method == "none":
            continue
        near = _reading(row, folds)
        gains = {key: max(fold.gains[key] for fold in near) for key in near[0].gains} if near else {}
        best = max(gains, key=lambda key: gains[key]) if gains else None
        rows.append(SmoothingAdvice(name, row.max_ratio, method, alpha, gains, best, outlier_advice(target)))
    return tuple(sorted(rows, key=lambda row: -row.max_ratio))


def _reading(row: ChannelRow, folds: Sequence[FoldRow]) -> list[FoldRow]:
    """The folds whose linears read the output of a module."""
    norms, place = [fold for fold in folds if fold.norm is not None], row.layer
    next_block = [fold for fold in norms if isinstance(place, int) and fold.place == place + 1]
    if row.operator == "residual":
        return next_block
    own = [fold for fold in folds if fold.source == row.module]
    if own or any(row.module in fold.targets for fold in norms):
        return own
    # What is left adds to the residual stream, at the end of the sub-layer whose first linears have the same parent.
    here = [fold for fold in norms if fold.place == place]
    begun = [fold.norm or 0 for fold in here if _parent(row.module) in map(_parent, fold.targets)]
    if not begun:
        return []
    return [fold for fold in here if fold.norm is not None and fold.norm > begun[0]] or next_block


def _parent(module: str) -> str:
    """The module that contains a module: names are PyTorch's dotted paths."""
    return module.rpartition(".")[0]
