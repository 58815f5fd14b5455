"""The other sections of a diagnosis: channels, metrics, correlations, format scores, the gate, the summary.

Field names are the keys of report.json (jsonform.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from noisescope.diagnosis.rows import AvalanchePoint, Divergence, Effect, LayerAnalysis
from noisescope.errors import whole_number
from noisescope.findings import Finding, Recommendation, Risk
from noisescope.findings.finding import Evidence
from noisescope.findings.thresholds import (
    GradientBand,
    LossBand,
    OutlierBand,
    QualityBand,
    RiskLevel,
    SparsityBand,
    ThresholdBand,
)
from noisescope.sites import NamedPlace
from noisescope.stats import Correlation, Estimate

# -- channels


@dataclass(frozen=True)
class OutlierRules:
    """How many channels each of the four rules calls outliers; None where the rule could not be applied."""

    max: int
    mean: int
    quantile: int
    fisher: int | None


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """Outlier channels by the four rules. Indices and ratios are of the largest outliers by the first rule."""

    outlier_indices: tuple[int, ...]
    outlier_ratios: tuple[float, ...]
    num_outliers: int
    total_channels: int
    outlier_percentage: float
    nonfinite_channels: int
    max_ratio: float
    band: OutlierBand
    median_max: float
    global_max: float
    rules: OutlierRules


@dataclass(frozen=True, kw_only=True)
class ChannelRow(Outliers):
    """The output channels of one module."""

    layer: NamedPlace
    operator: str
    module: str
    occurrence: int
    sparsity: float
    relative_sparsity: float
    count: int


@dataclass(frozen=True)
class OutlierSummary:
    """Outliers of all modules together."""

    layers_with_outliers: int
    total_outlier_channels: int
    total_channels: int
    outlier_percentage: float
    nonfinite_channels: int
    max_ratio: float | None
    largest: float | None


@dataclass(frozen=True)
class CostlyChannel:
    """A channel of a linear with the cost of noise in it, predicted and, for the most expensive, injected."""

    module: str
    layer: int
    channel: int
    predicted_nats: float
    evidence: Evidence
    kl: Divergence | None
    injected_over_predicted: float | None


@dataclass(frozen=True)
class ChannelAnalysis:
    """Level 3. `per_layer` has a row per module, by its name."""

    evidence: Evidence
    error: str
    n: int
    threshold: float
    summary: OutlierSummary | None
    per_layer: Mapping[str, ChannelRow]
    costliest: tuple[CostlyChannel, ...]


# -- metrics


@dataclass(frozen=True)
class Tried:
    """One scale of a bisection."""

    scale: float
    accuracy: float


@dataclass(frozen=True)
class Threshold:
    """The noise scale that costs a tenth of the score; `label` is "> 0.20" where that was not reached."""

    value: float | None
    label: str
    low: float | None
    high: float | None
    band: ThresholdBand
    target_degradation: float
    n: int
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class PrimaryMetrics:
    """What noise in all products of all layers costs."""

    relative_degradation: Estimate | None
    degradation_band: LossBand
    noise_tolerance_index: Estimate | None
    noise_tolerance_band: QualityBand
    critical_threshold: Threshold | None


@dataclass(frozen=True)
class GradientRatio:
    """Norm of the gradients with noise over the norm without: one number for all samples, which has no interval.

    So `point_band` is the band of the value itself.
    """

    value: float
    point_band: GradientBand
    n: int
    seeds: int
    per_layer: Mapping[str, float | None]


@dataclass(frozen=True)
class Sparsity:
    """Share of activations near 0: below 1e-6, and below 1 % of the tensor's root mean square.

    Counted over all samples together, so there is no interval: `point_band` is the band of `relative` itself.
    """

    absolute: float
    relative: float
    point_band: SparsityBand


@dataclass(frozen=True)
class SecondaryMetrics:
    """Of the same noise. `snr_band` and `snr_band_upper` are the bands of the two ends of `snr_db`.

    `nominal_snr_db` is that of the noise where it is put in; None for a number format, which has no scale.
    """

    snr_db: Estimate | None
    snr_band: QualityBand
    snr_band_upper: QualityBand
    nominal_snr_db: float | None
    gradient_ratio: GradientRatio | None
    activation_sparsity: Sparsity | None


@dataclass(frozen=True)
class Trace:
    """Hessian trace of one layer with its interval, and per parameter (HAWQ-V2)."""

    trace: float
    low: float | None
    high: float | None
    per_parameter: float
    probes: int


@dataclass(frozen=True)
class HessianTraces:
    error: str
    layers: Mapping[str, Trace]


@dataclass(frozen=True)
class Baseline:
    """The clean model, metric by metric; `measurable` says whether its score is significantly above chance."""

    metrics: Mapping[str, Estimate]
    nonfinite: int
    measurable: bool
    chance: float


@dataclass(frozen=True)
class Metrics:
    primary: PrimaryMetrics
    secondary: SecondaryMetrics
    critical_thresholds: Mapping[str, Threshold]
    hessian_trace: HessianTraces | None
    fisher: Mapping[str, Divergence] | None
    baseline: Baseline | None
    risk: Risk


@dataclass(frozen=True)
class ExpectedCorrelation:
    """A correlation that the original method notes expect. `held` is decided by the interval against the limit.

    `without_one` is the correlation when the most influential layer is left out: `carried_by_one` where that alone
    would change the answer.
    """

    correlation: Correlation
    against: str
    expected: str
    held: Literal["yes", "no", "undecided"]
    without_one: float | None
    carried_by_one: bool


# -- what plans and gates are made from


@dataclass(frozen=True)
class UniformScore:
    """One format for all linears: predictions add up."""

    bits: int
    effective_bits: float
    predicted_kl: float


@dataclass(frozen=True)
class FormatScore(UniformScore):
    """What one number format costs one linear: predicted KL per token, mean of the samples."""

    standard_error: float | None


@dataclass(frozen=True)
class ModuleScores:
    module: str
    place: int
    parameters: int
    inputs: int
    kind: str
    formats: Mapping[str, FormatScore]

    def __post_init__(self) -> None:
        whole_number(self.parameters, "parameters")  # plans divide by their sum


@dataclass(frozen=True)
class FormatScores:
    n: int
    error: str
    modules: tuple[ModuleScores, ...]
    uniform: Mapping[str, UniformScore]
    block_parameters: int


PerSample = Mapping[str, tuple[float | None, ...]]  # by operator


@dataclass(frozen=True)
class GateNumbers:
    """What a gate compares: one number per sample, by operator. None is a value that was not finite."""

    samples: tuple[str, ...]
    noise: str
    seeds: tuple[int, ...]
    metric: str
    chance: float
    predicted_kl: PerSample
    kl: PerSample
    accuracy: PerSample
    nonfinite: int


# -- the summary


@dataclass(frozen=True)
class PlainWords:
    """The report for decision makers: what it means, what to do, how to check that it worked."""

    risk: str
    work: str
    success: str


@dataclass(frozen=True)
class ExecutiveSummary:
    """The first screen. `overall_risk_level` is the higher of the report's score and the worst significant finding.

    `whole_model` is what noise in all layers at once costs, where that is significant; findings are about parts.
    """

    critical_operators: tuple[str, ...]
    borderline_operators: tuple[str, ...]
    num_critical_operators: int
    avalanche_points: tuple[AvalanchePoint, ...]
    num_avalanche_points: int
    total_outlier_channels: int | None
    overall_risk_level: RiskLevel
    risk_meaning: str
    report_risk: Risk
    dashboard_risk: Risk
    top_findings: tuple[Finding, ...]
    next_step: str
    in_plain_words: PlainWords
    whole_model: Finding | None = None


@dataclass(frozen=True)
class Sections:
    """All results of a diagnosis, before conclusions are drawn from them."""

    operator_analysis: Mapping[str, Effect] | None
    layer_analysis: LayerAnalysis | None
    channel_analysis: ChannelAnalysis | None
    metrics: Metrics
    correlations: Mapping[str, ExpectedCorrelation]
    format_scores: FormatScores | None
    gate: GateNumbers | None

    @property
    def first_error(self) -> str:
        """The error of the first row that failed; "" if none did."""
        windows = self.layer_analysis.windows if self.layer_analysis is not None else ()
        rows = [*(self.operator_analysis or {}).values(), *windows]
        return next((row.error for row in rows if row.error), "")


@dataclass(frozen=True)
class _Summarised:
    executive_summary: ExecutiveSummary  # a base of its own, so that it comes before the sections in report.json


@dataclass(frozen=True)
class Conclusions(Sections, _Summarised):
    """The sections with their conclusions: findings in one ranked list, and everything derived from that list."""

    findings: tuple[Finding, ...]
    recommendations: tuple[Recommendation, ...]
    could_not_see: tuple[str, ...]
