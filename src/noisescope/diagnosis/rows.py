"""The rows of a diagnosis, each the effect of noise in one place, and the tables they belong to.

Field names are the keys of report.json (jsonform.py). The questions that people ask of a row are its properties, so
that "is this significant?" has one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from noisescope.findings import NOT_MEASURABLE, PointAvalanche, Target
from noisescope.findings.finding import Evidence
from noisescope.findings.thresholds import LossBand, ScoreBand
from noisescope.sites import OuterPlace
from noisescope.stats import Estimate

SIGNIFICANT = 0.05  # a loss is a finding where its p, corrected for all rows of its table, is below this


@dataclass(frozen=True)
class Divergence:
    """KL of the noisy output from the clean one, nats per token, over samples.

    `typical` is the geometric mean of the middle three fifths of the samples: what a typical sample shows. It ranks
    rows and carries every label. A few samples can decide `mean`: where its interval has no upper end, only "at least"
    is known.
    """

    typical: Estimate
    mean: Estimate


@dataclass(frozen=True)
class PointRule:
    """Bands of the point values, by the rules of the original method notes: no interval decides them."""

    degradation_band: LossBand
    sensitivity_band: ScoreBand


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one injection did. Intervals hold for all rows of a table together, so that any row may be picked.

    `evidence` is "injected" where noise was really put in, "predicted" where only the screen knows, "failed" with the
    error of a trial, "absent" where the model has no such operator. `band` and `band_upper` are the bands of the two
    ends of `degradation`. `selected` is the size of the table's largest loss when it is measured on other samples than
    it was picked on, with an interval whose lower end alone is corrected for the choice; None in all other rows. `nats`
    ranks rows of all tables: the typical injected KL, or the prediction on the same scale.
    """

    evidence: Evidence = "none"
    metric: str = "accuracy"
    error: str = ""
    predicted_kl: Divergence | None = None
    kl: Divergence | None = None
    nats: float = 0.0
    baseline_acc: float | None = None
    noisy_acc: float | None = None
    noisy_acc_interval: Estimate | None = None
    degradation: Estimate | None = None
    selected: Estimate | None = None
    band: LossBand = NOT_MEASURABLE
    band_upper: LossBand = NOT_MEASURABLE
    sensitivity_score: float | None = None
    noise_tolerance_index: Estimate | None = None
    agreement: Estimate | None = None
    nll: Estimate | None = None
    snr_db: Estimate | None = None
    injected_over_predicted: Estimate | None = None
    p: float | None = None
    p_corrected: float | None = None
    smallest_detectable: float | None = None
    total_injections: int = 0
    seeds: int = 0
    nonfinite: int = 0
    failed_samples: int = 0
    point_rule: PointRule | None = None

    @property
    def injected(self) -> bool:
        return self.evidence == "injected"

    @property
    def significant(self) -> bool:
        """Whether noise here changed the score, by p (0 is as certain as possible) and by the interval of the loss."""
        if not self.injected or self.p_corrected is None or self.degradation is None:
            return False
        return self.p_corrected < SIGNIFICANT and (self.degradation.above(0.0) or self.degradation.below(0.0))

    @property
    def borderline(self) -> bool:
        """Whether the interval reaches from one band into another."""
        return self.band != self.band_upper

    @property
    def loss(self) -> float | None:
        """The share of the score that noise costs; None if it was not measured or is not significant."""
        return self.degradation.value if self.significant and self.degradation is not None else None

    @property
    def divergence(self) -> Divergence | None:
        """The injected one if known, else the predicted one."""
        return self.kl if self.kl is not None and self.kl.typical.value is not None else self.predicted_kl

    @property
    def nonlinear(self) -> bool:
        """Whether injection differs from the prediction by more than a factor of two, both ends of the interval."""
        ratio = self.injected_over_predicted
        return ratio is not None and (ratio.above(NONLINEAR) or ratio.below(1 / NONLINEAR))


NONLINEAR = 2.0


@dataclass(frozen=True)
class Interaction:
    """KL of a window over the sum of the KL of its layers: 1 is additive, above 1 errors compound.

    `of` says whether the layers' own KL was injected or predicted by the screen.
    """

    index: Estimate
    of: Literal["injected", "predicted"]

    @property
    def compounds(self) -> bool:
        """Whether errors compound; a prediction is too rough to decide this."""
        return self.of == "injected" and self.index.above(1.0)


@dataclass(frozen=True, kw_only=True)
class WindowEffect(Effect):
    """Noise in neighbouring layers, both ends included."""

    layer_range: str
    start_layer: int
    end_layer: int
    interaction_index: Interaction | None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.start_layer, self.end_layer + 1))

    def shares_layers_with(self, other: WindowEffect) -> bool:
        return self.start_layer <= other.end_layer and other.start_layer <= self.end_layer


@dataclass(frozen=True, kw_only=True)
class LayerEffect(Effect):
    """Noise in one block."""

    layer: int


@dataclass(frozen=True, kw_only=True)
class CellEffect(Effect):
    """Noise in one operator of one block."""

    layer: int
    operator: str


@dataclass(frozen=True, kw_only=True)
class LevelEffect(Effect):
    """Noise of one scale in the whole model."""

    noise_level: float
    accuracy: Estimate | None
    retention: Estimate | None


@dataclass(frozen=True)
class AvalanchePoint:
    """A window that costs more than 15 % of the score and more than 1.5 times what the windows beside it cost.

    `state` is "avalanche" where the intervals of both decide so, "borderline" where an interval holds its limit.
    `ratio` is its loss over that of the costlier neighbour, None where that is not measurable; `common` the first and
    the last layer that all windows of the hot region share.
    """

    start: int
    end: int
    layer_range: str
    state: Literal["avalanche", "borderline"]
    severity: Literal["CRITICAL", "HIGH"]
    degradation: Estimate
    neighbours: tuple[float, ...]
    ratio: Estimate | None
    common: tuple[int, int]
    interaction_index: Interaction | None

    @property
    def decided(self) -> bool:
        return self.state == "avalanche"


@dataclass(frozen=True)
class LayerAnalysis:
    """Level 2. `operators` are what is noised in a window or a layer; places and cells are noised by themselves.

    `prediction_scale` is the median of injected over predicted nats, over the rows that have both; 1 in a screen.
    """

    operators: tuple[str, ...]
    window: int
    step: int
    windows: tuple[WindowEffect, ...]
    layers: tuple[LayerEffect, ...]
    places: Mapping[OuterPlace, Effect]
    map: tuple[CellEffect, ...]
    avalanche_points: tuple[AvalanchePoint, ...]
    compounding: tuple[str, ...]
    prediction_scale: float
    point_rule_avalanches: tuple[PointAvalanche, ...]

    def window_target(self, row: WindowEffect) -> Target:
        return Target("window", self.operators, row.layers)

    def layer_target(self, row: LayerEffect) -> Target:
        return Target("layer", self.operators, (row.layer,))


def cell_target(row: CellEffect) -> Target:
    return Target("cell", (row.operator,), (row.layer,))


Row = TypeVar("Row", bound=Effect)


def as_row(effect: Effect, kind: type[Row], **where: Any) -> Row:
    """An effect as a row of a table, which says where it is."""
    return kind(**vars(effect), **where)
