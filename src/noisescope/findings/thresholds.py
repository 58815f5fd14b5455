"""Every threshold of noisescope in one file: bands, single limits, points of the risk scores, expected correlations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, overload

from noisescope.errors import unknown
from noisescope.estimate import Estimate

NOT_MEASURABLE: Final = "not measurable"

# Names of bands as types, for rows that are read back and for the JSON Schema; a test keeps them in sync with BANDS.
LossBand = Literal["LOW", "ROBUST", "MODERATE", "HIGH", "AVALANCHE", "CRITICAL", "not measurable"]  # of all rows
ScoreBand = Literal["ROBUST", "MODERATE", "CRITICAL", "not measurable"]
OutlierBand = Literal["NORMAL", "MODERATE", "HIGH", "CRITICAL", "not measurable"]
QualityBand = Literal["POOR", "FAIR", "GOOD", "EXCELLENT", "not measurable"]
ThresholdBand = Literal["CRITICAL", "HIGH", "MODERATE", "LOW", "not measurable"]
GradientBand = Literal["CRITICAL", "CONCERNING", "MODERATE", "STABLE", "not measurable"]
SparsityBand = Literal["DENSE", "MIXED", "SPARSE", "not measurable"]
RiskLevel = Literal["LOW", "MODERATE", "HIGH", "not measurable"]
LossKind = Literal["degradation", "window"]
RiskName = Literal["report_risk", "dashboard_risk"]


@dataclass(frozen=True)
class Bands:
    """Names for ranges of a number, each with its upper limit and its meaning; the last has no limit.

    The sign says whether the number on the limit belongs below ("<=") or above ("<"). The original method notes write
    the outer bands strictly ("< 5 %", "> 20 %") and share the inner limits; a number on a shared limit takes the
    milder name.
    """

    rows: tuple[tuple[str, str, float, str], ...]  # (name, sign, limit, meaning)

    @classmethod
    def of(cls, *rows: tuple[str, str, float, str]) -> Bands:
        limits = [limit for _, _, limit, _ in rows]
        assert limits == sorted(limits) and limits[-1] == math.inf and {sign for _, sign, _, _ in rows} <= {"<", "<="}
        return cls(rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self.rows)

    @property
    def limits(self) -> tuple[float, ...]:
        return tuple(limit for _, _, limit, _ in self.rows[:-1])

    @property
    def meanings(self) -> dict[str, str]:
        return {name: meaning for name, _, _, meaning in self.rows}

    def at(self, value: float) -> tuple[str, str]:
        """The name and the meaning of the band that a number lies in."""
        for name, sign, limit, meaning in self.rows:
            if value < limit or (sign == "<=" and value == limit):
                return name, meaning
        raise AssertionError(f"{value} is not a number")


# Shares are fractions (0.05 = 5 %), ratios are plain, SNR is in dB.
BANDS: dict[str, Bands] = {
    "degradation": Bands.of(
        ("LOW", "<", 0.05, "fit for ordinary deployment"),
        ("MODERATE", "<=", 0.1, "monitor it; consider fixes for this part only"),
        ("HIGH", "<=", 0.2, "act: use more precision here, or train with noise"),
        ("CRITICAL", "<=", math.inf, "don't deploy before this is solved"),
    ),
    "window": Bands.of(  # the name "AVALANCHE" is the level; an avalanche point must stand out from its neighbours too
        ("ROBUST", "<", 0.05, "errors in these layers are absorbed"),
        ("MODERATE", "<=", 0.1, "some of the error passes through"),
        ("HIGH", "<=", 0.15, "sensitive layers"),
        ("AVALANCHE", "<=", 0.2, "errors grow here: a bottleneck of the model"),
        ("CRITICAL", "<=", math.inf, "errors grow here to more than a fifth of the score"),
    ),
    "sensitivity_score": Bands.of(  # degradation / noise scale
        ("ROBUST", "<", 1.5, "ordinary quantisation is enough"),
        ("MODERATE", "<=", 3.0, "monitor it in deployment"),
        ("CRITICAL", "<=", math.inf, "validate this operator on the hardware"),
    ),
    "outlier_ratio": Bands.of(  # largest channel / median channel; an outlier is strictly above 10
        ("NORMAL", "<=", 10.0, "no outlier channel"),
        ("MODERATE", "<=", 20.0, "one scale per tensor may still be enough; monitor it"),
        ("HIGH", "<=", 50.0, "give each channel its own scale"),
        ("CRITICAL", "<=", math.inf, "move the range into the weights (SmoothQuant, alpha about 0.75)"),
    ),
    "noise_tolerance_index": Bands.of(  # 1 / degradation; infinity (no loss) is allowed here
        ("POOR", "<", 5.0, "critically sensitive"),
        ("FAIR", "<", 10.0, "needs attention"),
        ("GOOD", "<=", 20.0, "acceptable"),
        ("EXCELLENT", "<=", math.inf, "tolerates noise well"),
    ),
    "critical_threshold": Bands.of(  # the noise scale that costs 10 % of the score
        ("CRITICAL", "<", 0.02, "don't quantise this part"),
        ("HIGH", "<", 0.05, "mixed precision"),
        ("MODERATE", "<=", 0.1, "conservative quantisation (INT8)"),
        ("LOW", "<=", math.inf, "aggressive quantisation"),
    ),
    "snr_db": Bands.of(  # measured downstream, clean against noisy
        ("POOR", "<", 20.0, "noise dominates"),
        ("FAIR", "<", 30.0, "noise is visible; monitor it"),
        ("GOOD", "<=", 40.0, "the usual range"),
        ("EXCELLENT", "<=", math.inf, "noise hardly matters"),
    ),
    "gradient_ratio": Bands.of(  # norm with noise / norm without; 1 is best, so the bands mirror each other
        ("CRITICAL", "<", 0.5, "noise dominates the gradient"),
        ("CONCERNING", "<", 0.7, "training may take a different path"),
        ("MODERATE", "<", 0.9, "visible but manageable"),
        ("STABLE", "<=", 1.1, "gradients hardly change"),
        ("MODERATE", "<=", 1.3, "visible but manageable"),
        ("CONCERNING", "<=", 1.5, "training may take a different path"),
        ("CRITICAL", "<=", math.inf, "noise dominates the gradient"),
    ),
    "sparsity": Bands.of(
        ("DENSE", "<", 0.3, "most values matter: expect more sensitivity"),
        ("MIXED", "<=", 0.7, "neither dense nor sparse"),
        ("SPARSE", "<=", math.inf, "few values matter: expect less sensitivity"),
    ),
    "mae": Bands.of(
        ("NEGLIGIBLE", "<", 0.0001, "no practical difference"),
        ("ACCEPTABLE", "<=", 0.001, "good for most uses"),
        ("NOTICEABLE", "<=", 0.01, "investigate"),
        ("CRITICAL", "<=", math.inf, "the devices disagree"),
    ),
    "mape": Bands.of(
        ("EXCELLENT", "<", 0.01, "the devices agree"),
        ("GOOD", "<=", 0.05, "similar to FP16 against BF16"),
        ("MODERATE", "<=", 0.1, "they drift apart"),
        ("SIGNIFICANT", "<=", math.inf, "expect a loss of accuracy"),
    ),
    "pearson": Bands.of(
        ("POOR", "<", 0.9, "no match: investigate"),
        ("MODERATE", "<", 0.95, "they drift apart"),
        ("GOOD", "<=", 0.99, "good agreement"),
        ("EXCELLENT", "<=", math.inf, "excellent match"),
    ),
    "report_risk": Bands.of(
        ("LOW", "<=", 50.0, "ordinary deployment practice is enough"),
        ("MODERATE", "<=", 100.0, "targeted fixes recommended"),
        ("HIGH", "<=", math.inf, "validate it part by part on the hardware"),
    ),
    "dashboard_risk": Bands.of(
        ("LOW", "<=", 30.0, "safe to deploy"),
        ("MODERATE", "<=", 60.0, "needs fixes first"),
        ("HIGH", "<=", math.inf, "not recommended for deployment"),
    ),
}

# Single limits that belong to no band.
LIMITS: dict[str, float] = {
    "avalanche_degradation": 0.15,  # an avalanche point loses more than this ...
    "avalanche_neighbour_factor": 1.5,  # ... and more than so many times what its neighbours lose
    "avalanche_critical": 0.20,
    "critical_operator_score": 3.0,
    "critical_threshold_degradation": 0.10,  # the loss that defines the critical threshold
    "outlier_channel_ratio": 10.0,  # max / median of max, and mean / median of mean
    "outlier_quantile_ratio": 5.0,  # q99 / q50
    "outlier_fisher_quantile": 0.95,
    "migration_mape": 0.05,  # first priority on new hardware; 0.10 suffices for the second
    "migration_mape_second": 0.10,
    "gate_degradation": 0.15,
    "gate_worse_than_baseline": 1.2,
    "precision_16_bits": 0.15,  # a layer that loses more keeps 16 bits, ...
    "precision_8_bits": 0.05,  # ... one that loses more than this 8, the others 4
    "precision_8_to_4_bits": 0.10,  # below this an 8-bit layer may go to 4 to meet an average
    "fault_operator_degradation": 0.05,  # acceptance criteria of fault tests
    "fault_layer_degradation": 0.10,
    "fault_channel_degradation": 0.15,
    "fault_nan_rate": 0.001,
    "fault_recovery_steps": 5.0,
    "fp16_maximum": 65504.0,
    "divergence_factor": 3.0,  # two devices diverge where outputs differ by so many times more than inputs
    "affordable_nats": 0.01,  # what a layer's difference between two devices may cost
}

# Relative L2 by which two healthy devices may differ in one operator on the same inputs: two unit round-offs in 16 bits
# (an output is rounded once), 32 in float32 and float64 (sums of some thousand products).
ROUND_OFF: dict[str, float] = {
    "float64": 32 * 2.0**-53,
    "float32": 32 * 2.0**-24,
    "float16": 2 * 2.0**-11,
    "bfloat16": 2 * 2.0**-8,
}

# The gain by which they may: rounding to nearest makes none, but a constant rounded once does (half a unit round-off,
# in the root mean square). Sketches are summed up in float32, which limits what can be distinguished.
GAIN_ROUND_OFF: dict[str, float] = {name: max(size / 4, ROUND_OFF["float32"]) for name, size in ROUND_OFF.items()}

# Points of the two risk scores.
REPORT_POINTS = {"critical operator": 30.0, "avalanche point": 25.0, "percent of outlier channels": 5.0}
DASHBOARD_POINTS = {
    "degradation": ((0.20, 50.0), (0.10, 30.0), (0.05, 10.0)),  # above so much: so many points
    "mape": ((0.10, 30.0), (0.05, 15.0)),
}
# Of the dashboard, where one device alone has NaN or infinite numbers: HIGH, whatever the rest.
NONFINITE_POINTS = 100.0

# Correlations the original method notes expect, as (sign, bound): r > 0.7, r > 0.6, r < -0.5.
# Sparsity is set against degradation: against robustness the same claim would have the other sign.
EXPECTED_CORRELATIONS: dict[str, tuple[str, float]] = {
    "hessian_sensitivity": (">", 0.7),
    "outliers_sensitivity": (">", 0.6),
    "sparsity_degradation": ("<", -0.5),
}


@overload
def band(metric: LossKind, value: float | None) -> LossBand: ...
@overload
def band(metric: Literal["sensitivity_score"], value: float | None) -> ScoreBand: ...
@overload
def band(metric: Literal["outlier_ratio"], value: float | None) -> OutlierBand: ...
@overload
def band(metric: Literal["noise_tolerance_index", "snr_db"], value: float | None) -> QualityBand: ...
@overload
def band(metric: Literal["critical_threshold"], value: float | None) -> ThresholdBand: ...
@overload
def band(metric: Literal["gradient_ratio"], value: float | None) -> GradientBand: ...
@overload
def band(metric: Literal["sparsity"], value: float | None) -> SparsityBand: ...
@overload
def band(metric: RiskName, value: float | None) -> RiskLevel: ...
@overload
def band(metric: str, value: float | None) -> str: ...
def band(metric: str, value: float | None) -> str:
    """The band's name: `band("degradation", 0.12) == "HIGH"`; None and NaN are "not measurable"."""
    return _band(metric, value)[0]


@overload
def band_range(metric: LossKind, estimate: Estimate) -> tuple[LossBand, LossBand]: ...
@overload
def band_range(metric: Literal["snr_db"], estimate: Estimate) -> tuple[QualityBand, QualityBand]: ...
def band_range(metric: str, estimate: Estimate) -> tuple[str, str]:
    """The bands of both ends of an interval, that of the lower end first: equal where the interval decides.

    An end without bound lies in the last band on its side; without any interval there is no band.
    """
    if estimate.value is None or (estimate.low is None and estimate.high is None):
        return NOT_MEASURABLE, NOT_MEASURABLE
    low, high = (-math.inf if estimate.low is None else estimate.low), estimate.high
    return band(metric, low), band(metric, math.inf if high is None else high)


def meaning(metric: str, value: float | None) -> str:
    """What the band of this value means, for the reader."""
    return _band(metric, value)[1]


def as_expected(name: str, correlation: float | None) -> bool | None:
    """Whether a correlation is what the notes expect; None if it could not be computed."""
    if name not in EXPECTED_CORRELATIONS:
        raise unknown("correlation", name, EXPECTED_CORRELATIONS)
    if correlation is None or math.isnan(correlation):
        return None
    sign, bound = EXPECTED_CORRELATIONS[name]
    return correlation > bound if sign == ">" else correlation < bound


def _band(metric: str, value: float | None) -> tuple[str, str]:
    if metric not in BANDS:
        raise unknown("metric", metric, BANDS)
    return (NOT_MEASURABLE, NOT_MEASURABLE) if value is None or math.isnan(value) else BANDS[metric].at(value)
