"""Every threshold of noisescope in one file: bands, single limits, points of the risk scores, expected correlations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, overload

from noisescope.errors import unknown
from noisescope.estimate import Estimate

NOT_MEASURABLE: Final = "not measurable"

# Names of bands as types, for rows that are read back and for the JSON Schema; a test holds them to BANDS.
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
    """Names for ranges of a number: names[i] up to limits[i], names[-1] beyond the last limit.

    `upto` says for each limit whether the number on it belongs below ("<=") or above ("<"). The original method
    notes write the outer bands strictly ("< 5 %", "> 20 %") and share the inner limits; a number on a shared limit
    takes the milder name.
    """

    limits: tuple[float, ...]
    names: tuple[str, ...]
    upto: tuple[str, ...]
    meanings: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.meanings) == len(self.limits) + 1 == len(self.upto) + 1
        assert list(self.limits) == sorted(self.limits) and set(self.upto) <= {"<", "<="}

    def index(self, value: float) -> int:
        for i, (limit, sign) in enumerate(zip(self.limits, self.upto, strict=True)):
            if value < limit or (sign == "<=" and value == limit):
                return i
        return len(self.limits)


_RISES = ("<", "<=", "<=")  # a larger number is worse
_FALLS = ("<", "<", "<=")  # a larger number is better

# Shares are fractions (0.05 = 5 %), ratios are plain, SNR is in dB.
BANDS: dict[str, Bands] = {
    "degradation": Bands(
        (0.05, 0.10, 0.20),
        ("LOW", "MODERATE", "HIGH", "CRITICAL"),
        _RISES,
        (
            "fit for ordinary deployment",
            "watch it; consider measures for this part alone",
            "act: more precision here, or training with noise",
            "don't deploy before this is solved",
        ),
    ),
    "window": Bands(  # the name "AVALANCHE" is the level; an avalanche point must stand out from its neighbours too
        (0.05, 0.10, 0.15, 0.20),
        ("ROBUST", "MODERATE", "HIGH", "AVALANCHE", "CRITICAL"),
        ("<", "<=", "<=", "<="),
        (
            "errors in these layers are absorbed",
            "some of the error gets through",
            "sensitive layers",
            "errors grow here: a bottleneck of the model",
            "errors grow here beyond a fifth of the score",
        ),
    ),
    "sensitivity_score": Bands(  # degradation / noise scale
        (1.5, 3.0),
        ("ROBUST", "MODERATE", "CRITICAL"),
        ("<", "<="),
        ("ordinary quantisation will do", "monitor it in deployment", "validate this operator on the hardware"),
    ),
    "outlier_ratio": Bands(  # largest channel / median channel; an outlier is strictly above 10
        (10.0, 20.0, 50.0),
        ("NORMAL", "MODERATE", "HIGH", "CRITICAL"),
        ("<=", "<=", "<="),
        (
            "no outlier channel",
            "one scale per tensor may still do; monitor it",
            "give each channel its own scale",
            "move the range into the weights (SmoothQuant, alpha about 0.75)",
        ),
    ),
    "noise_tolerance_index": Bands(  # 1 / degradation; infinity (no loss) is allowed here
        (5.0, 10.0, 20.0),
        ("POOR", "FAIR", "GOOD", "EXCELLENT"),
        _FALLS,
        ("critically sensitive", "needs attention", "acceptable", "stands noise well"),
    ),
    "critical_threshold": Bands(  # the noise scale that costs 10 % of the score
        (0.02, 0.05, 0.10),
        ("CRITICAL", "HIGH", "MODERATE", "LOW"),
        _FALLS,
        ("don't quantise this part", "mixed precision", "conservative quantisation (INT8)", "aggressive quantisation"),
    ),
    "snr_db": Bands(  # measured downstream, clean against noisy
        (20.0, 30.0, 40.0),
        ("POOR", "FAIR", "GOOD", "EXCELLENT"),
        _FALLS,
        ("noise rules", "noise shows; monitor it", "the usual range", "noise hardly matters"),
    ),
    "gradient_ratio": Bands(  # norm with noise / norm without; 1 is best, so the bands mirror each other
        (0.5, 0.7, 0.9, 1.1, 1.3, 1.5),
        ("CRITICAL", "CONCERNING", "MODERATE", "STABLE", "MODERATE", "CONCERNING", "CRITICAL"),
        ("<", "<", "<", "<=", "<=", "<="),
        (
            "noise rules the gradient",
            "training takes another path",
            "visible and manageable",
            "gradients hardly change",
            "visible and manageable",
            "training takes another path",
            "noise rules the gradient",
        ),
    ),
    "sparsity": Bands(
        (0.30, 0.70),
        ("DENSE", "MIXED", "SPARSE"),
        ("<", "<="),
        ("most values count: expect more sensitivity", "neither dense nor sparse", "few values count: expect less"),
    ),
    "mae": Bands(
        (1e-4, 1e-3, 1e-2),
        ("NEGLIGIBLE", "ACCEPTABLE", "NOTICEABLE", "CRITICAL"),
        _RISES,
        ("no practical difference", "good for most uses", "look into it", "the devices disagree"),
    ),
    "mape": Bands(
        (0.01, 0.05, 0.10),
        ("EXCELLENT", "GOOD", "MODERATE", "SIGNIFICANT"),
        _RISES,
        ("the devices agree", "as FP16 against BF16", "they drift apart", "expect a loss of accuracy"),
    ),
    "pearson": Bands(
        (0.90, 0.95, 0.99),
        ("POOR", "MODERATE", "GOOD", "EXCELLENT"),
        _FALLS,
        ("no match: look into it", "they drift apart", "good agreement", "excellent match"),
    ),
    "report_risk": Bands(
        (50.0, 100.0),
        ("LOW", "MODERATE", "HIGH"),
        ("<=", "<="),
        (
            "ordinary deployment practice is enough",
            "targeted fixes recommended",
            "validate it part by part on the hardware",
        ),
    ),
    "dashboard_risk": Bands(
        (30.0, 60.0),
        ("LOW", "MODERATE", "HIGH"),
        ("<=", "<="),
        ("safe to deploy", "needs measures first", "not advised for deployment"),
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
    "migration_mape": 0.05,  # first priority on new hardware; 0.10 will do for the second
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
    "divergence_factor": 3.0,  # two devices diverge where they differ by more than so many times what came in
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
# in the root mean square). Sketches are summed up in float32, which limits what can be told.
GAIN_ROUND_OFF: dict[str, float] = {name: max(size / 4, ROUND_OFF["float32"]) for name, size in ROUND_OFF.items()}

# Points of the two risk scores.
REPORT_POINTS = {"critical operator": 30.0, "avalanche point": 25.0, "percent of outlier channels": 5.0}
DASHBOARD_POINTS = {
    "degradation": ((0.20, 50.0), (0.10, 30.0), (0.05, 10.0)),  # above so much: so many points
    "mape": ((0.10, 30.0), (0.05, 15.0)),
}
NONFINITE_POINTS = (
    100.0  # of the dashboard, where one device alone has NaN or infinite numbers: HIGH, whatever the rest
)

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
    bands = _bands(metric)
    return NOT_MEASURABLE if value is None or math.isnan(value) else bands.names[bands.index(value)]


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
    bands = _bands(metric)
    first = bands.names[0] if estimate.low is None else band(metric, estimate.low)
    last = bands.names[-1] if estimate.high is None else band(metric, estimate.high)
    return first, last


def meaning(metric: str, value: float | None) -> str:
    """What the band of this value tells the reader."""
    bands = _bands(metric)
    return NOT_MEASURABLE if value is None or math.isnan(value) else bands.meanings[bands.index(value)]


def as_expected(name: str, correlation: float | None) -> bool | None:
    """Whether a correlation is what the notes expect; None where it could not be computed."""
    if name not in EXPECTED_CORRELATIONS:
        raise unknown("correlation", name, EXPECTED_CORRELATIONS)
    if correlation is None or math.isnan(correlation):
        return None
    sign, bound = EXPECTED_CORRELATIONS[name]
    return correlation > bound if sign == ">" else correlation < bound


def _bands(metric: str) -> Bands:
    if metric not in BANDS:
        raise unknown("metric", metric, BANDS)
    return BANDS[metric]
