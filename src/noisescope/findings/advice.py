"""What to do about a sensitive operator, an outlier channel, an avalanche point or a critical layer."""

from __future__ import annotations

from noisescope.errors import unknown
from noisescope.options.fields import TARGETS as TARGETS
from noisescope.sites import canonical_operator

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
        "the whole model does not hold them."
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
