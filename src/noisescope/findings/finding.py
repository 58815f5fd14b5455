"""Findings and recommendations as values (targets, order, sentences), and the advice that recommendations give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from noisescope.errors import unknown
from noisescope.estimate import Estimate
from noisescope.findings.thresholds import NOT_MEASURABLE
from noisescope.options.fields import TARGETS as TARGETS
from noisescope.sites import GROUPS, OuterPlace, Place, canonical_operator

BORDERLINE: Final = "BORDERLINE"  # a significant loss whose interval reaches from the lowest band into a higher one
NOT_RATED: Final = "not rated"  # ranked by nats: bands belong to losses of a task metric
# Worst first. What could not be measured comes before what was measured and found harmless.
Severity = Literal["CRITICAL", "HIGH", "MODERATE", "BORDERLINE", "not rated", "not measurable", "LOW"]
SEVERITIES: tuple[Severity, ...] = ("CRITICAL", "HIGH", "MODERATE", BORDERLINE, NOT_RATED, NOT_MEASURABLE, "LOW")
Urgency = Literal["CRITICAL", "HIGH", "MEDIUM", "LOW"]
PRIORITIES: tuple[Urgency, ...] = ("CRITICAL", "HIGH", "MEDIUM", "LOW")

Evidence = Literal["injected", "predicted", "captured", "failed", "absent", "none"]
Kind = Literal["model", "operator", "window", "layer", "place", "cell", "channels"]
Unit = Literal["share", "nats", "ratio", "count"]


@dataclass(frozen=True)
class Target:
    """What a finding is about. `layers` () means every layer, `operators` () every operator."""

    kind: Kind
    operators: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    place: OuterPlace | None = None  # outside the blocks: embed, final_norm, lm_head
    module: str | None = None

    @property
    def name(self) -> str:
        """For people: "layers 0 to 2", "layer 0, matmul", "operator softmax", "lm_head"."""
        operators = " + ".join(self.operators)
        first, last = (self.layers[0], self.layers[-1]) if self.layers else (None, None)
        names: dict[Kind, str] = {
            "model": "the whole model",
            "operator": f"operator {operators}",
            "window": f"layers {first} to {last}",
            "layer": f"layer {first}",
            "place": str(self.place),
            "cell": f"layer {first}, {operators}",
            "channels": str(self.module),
        }
        return names[self.kind]

    @property
    def places(self) -> tuple[Place, ...]:
        """The blocks by index, or the place outside them; () if it is everywhere."""
        return self.layers or (() if self.place is None else (self.place,))

    @property
    def computes(self) -> frozenset[str]:
        """Single operators, with groups expanded."""
        found: set[str] = set()
        for name in self.operators:
            found |= GROUPS[name][0] if name in GROUPS else {name}
        return frozenset(found)

    def contains(self, other: Target) -> bool:
        """Whether noise in this target is also in all of the other, which is the more specific one.

        Noise in an operator also affects the places outside the blocks that compute it.
        """
        if self == other or other.kind not in ("window", "layer", "cell", "place") or self.place is not None:
            return False
        if self.layers and not (other.layers and set(other.layers) <= set(self.layers)):
            return False
        return not self.operators or (bool(other.operators) and other.computes <= self.computes)


@dataclass(frozen=True)
class Finding:
    """A conclusion with the number behind it.

    `size` accounts for the choice of the largest of many rows where it is a loss; `nats` orders findings of one
    severity. `notes` say what else is known of the same target, and what nested ones add.
    """

    severity: Severity
    component: str  # the target's name
    statement: str
    target: Target
    size: Estimate | None
    unit: Unit
    nats: float | None
    evidence: Evidence
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise unknown("severity", self.severity, SEVERITIES)

    @property
    def rated(self) -> bool:
        """Whether the interval of a loss of the task metric clears the limit of a band."""
        return self.severity in ("CRITICAL", "HIGH", "MODERATE")

    @property
    def urgent(self) -> bool:
        return self.severity in ("CRITICAL", "HIGH")


@dataclass(frozen=True)
class Recommendation:
    """What to do about a component, and why."""

    priority: Urgency
    component: str
    issue: str
    action: str

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise unknown("priority", self.priority, PRIORITIES)


def by_priority(recommendations: Iterable[Recommendation]) -> list[Recommendation]:
    """Most urgent first; equally urgent ones keep their order."""
    return sorted(recommendations, key=lambda r: PRIORITIES.index(r.priority))


def percent(share: float, digits: int = 1) -> str:
    """A share as text: 0.123 is "12.3 %"."""
    return f"{100 * share:.{digits}f} %"


METRIC_NAMES = {
    "accuracy": "accuracy",
    "next_token_accuracy": "next-token accuracy",
    "agreement": "agreement with the clean model",
    "perplexity": "inverse perplexity",
    "custom": "score",
    "kl": "KL divergence",
    "nll": "loss",
}


def metric_name(metric: str) -> str:
    """A metric as named in a sentence: "costs 12.3 % of the next-token accuracy"."""
    return METRIC_NAMES.get(metric, metric.replace("_", " "))


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples", "12,000 samples"."""
    return f"{number:{',' if number >= 10_000 else ''}} {noun}{'' if number == 1 else 's'}"


def span(estimate: Estimate, form: str, times: float = 1) -> str:
    """An interval as text; an unbounded end is "..."."""
    low, high = ("..." if end is None else f"{times * end:{form}}" for end in (estimate.low, estimate.high))
    return f"[{low}, {high}]"


def times_better(gain: float) -> str:
    """The factor that divides an error, as text: 0.04 is "25 x worse", and 0 means that there was no error before."""
    if not gain:
        return "no gain possible"
    return f"{gain:.3g} x better" if gain >= 1 else f"{1 / gain:.3g} x worse"


_ACCUMULATE = (
    "Accumulate in 32 bits (INT32 for INT8 inputs, FP32 for FP8 and 16-bit inputs) and round once at the end. "
    "Look at the longest sums first (inner size above 4096): rounding error grows with the number of terms."
)

_CACHE = (
    "Keep this part of the cache in 16 bits: noisescope plan kv-cache, with this report, chooses the layers and writes "
    "vLLM's skip list. Calibrated scales help where keys leave the range of the format."
)

ADVICE: dict[str, str] = {
    "softmax": (
        "Check the device's exp (table or polynomial) against float64 over the actual range of the scores, and "
        "check that the row maximum is subtracted first. Keep attention scores and softmax in a higher precision "
        "than the products around them."
    ),
    "norm": (
        "Check that the variance (or mean square) is summed in FP32, and how accurate rsqrt is near zero variance. "
        "A larger epsilon avoids division by almost zero, but it changes the model: keep the trained value, or "
        "evaluate the change separately."
    ),
    **dict.fromkeys(("linear", "matmul", "bmm", "gemm"), _ACCUMULATE),
    "attention": (
        "Errors of the products and of softmax compound here: give QK^T, the probabilities and PV separate scales, "
        "and find out which of the three causes the loss."
    ),
    "mlp": (
        "Find out whether the products or the activation between them cause the loss, then follow the advice for "
        "that operator."
    ),
    "silu": (
        "Check the sigmoid approximation against float64. If tanh is better on this device, use sigmoid(x) = (1 + "
        "tanh(x / 2)) / 2."
    ),
    "gelu": (
        "Check the polynomial behind erf or tanh against float64, and that the device uses the form (erf or tanh) "
        "the model was trained with."
    ),
    "embedding": (
        "A table lookup does no arithmetic: compare the rows bit by bit. Keep the table at 8 bits or more, because "
        "its error enters every layer."
    ),
    "residual": (
        "Keep the residual stream in 16 bits or more and its addition in FP32: each block's error stays in it until "
        "the end. Look for massive channels, which determine its range."
    ),
    "outliers": (
        "Give outlier channels their own scales (per-channel quantisation). One or two massive channels are the "
        "worst case, however small their share: go by the largest ratio. If you train the model yourself, constrain "
        "channel ranges during training."
    ),
    "outliers W8A8": (
        "SmoothQuant: divide each input channel of the linear by max|X|^alpha / max|W|^(1 - alpha) and multiply "
        "the weight's column by it; start with alpha 0.5, or about 0.75 if outliers exceed 50 x the median. Needs "
        "calibration data, no "
        "training. Outlier Suppression+ also shifts each channel to the middle of its range first, which helps where a "
        "channel's values are mostly of one sign."
    ),
    "outliers W4A16": (
        "AWQ: only weights are quantised; scale up the few weight channels that multiply large activations, so that "
        "they lose the least precision. Needs calibration data, no training."
    ),
    "outliers W4A4": (
        "OmniQuant or learned rotations (such as SpinQuant): the transformation that spreads outliers is "
        "optimised on data. More expensive than the other two, but needed for 4-bit activations."
    ),
    "avalanche": (
        "Raise the precision of this layer range, or train with noise targeted at it (adaptive AQN). Validate it "
        "first on new hardware."
    ),
    "critical layers": (
        "Keep these layers in 16 bits. Use FP16, which is more precise, if the captured maximum of their "
        "activations stays well below 65504; otherwise use BF16."
    ),
    "weights": (
        "Give these linears more bits: noisescope plan precision, with this report, chooses a format for each linear "
        "within a budget. Smaller groups, a zero point (--asymmetric) and calibrated rounding (GPTQ, AWQ) lose less."
    ),
    "weights outside": (
        "Leave embeddings and lm_head in 16 bits, as quantisers do by default: no plan rounds them, and the loss of "
        "the whole model does not include theirs."
    ),
    "activations": (
        "Leave the inputs of these linears in 16 bits, or smooth their outlier channels first: noisescope plan "
        "smoothquant, with this report, says what that gains."
    ),
    **dict.fromkeys(("kv-cache", "kv_cache", "keys", "values"), _CACHE),
    "divergence": (
        "Where two devices differ by more than 5 % (MAPE), raise the precision of the layer or smooth its outlier "
        "channels, then compare again."
    ),
}


def operator_advice(operator: str) -> str:
    """The advice for an operator or group by any of its names ("layernorm" and "rms_norm" are "norm")."""
    return ADVICE[canonical_operator(operator)]


def outlier_advice(target: str | None = None) -> str:
    """The advice for outlier channels; with a target format (W8A8, W4A16, W4A4), the method for it."""
    if target is None:
        return ADVICE["outliers"]
    if target.upper() not in TARGETS:
        raise unknown("target format", target, TARGETS)
    return ADVICE[f"outliers {target.upper()}"]
