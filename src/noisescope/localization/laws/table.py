"""The laws that healthy arithmetic obeys, as a table of values: what is done, what must follow, what each can't see.

R1 to R25 keep the numbers of the project's notes on relations; R22 is the audit, R23 a probe of the passport; R26 and
R27 are additions. No torch here.

access  H  hooked inputs and outputs       C  the module is called with chosen inputs      W  its weights are read
floor   "exact"        bit for bit: it follows from IEEE arithmetic whatever the order of summation
        "repeatable"   bit for bit on a stack that repeats itself; within round-off on one that does not
        "round-off"    within the round-off model of roundoff.py
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT, REPEATABLE, ROUND_OFF = "exact", "repeatable", "round-off"


@dataclass(frozen=True)
class Law:
    """One relation. `catches` are fault classes (verdict.CLASSES), `guard` says where it can't be applied."""

    name: str
    title: str
    access: str
    floor: str
    transform: str
    expected: str
    levels: tuple[str, ...]
    catches: tuple[str, ...]
    blind: str
    guard: str = ""

    @property
    def exact(self) -> bool:
        return self.floor == EXACT


_LINEAR = ("linear", "product")
_ALL = ("linear", "product", "norm", "activation", "attention call")

# A table: one law a few lines, in the order of the fields above.
# fmt: off
_TABLE = (
    Law("R1", "repeat", "C", REPEATABLE,
        "the same input again, after a call with another one (A, B, A)", "the same bits",
        (*_ALL, "embedding", "model"), ("noise", "spike", "stale data"),
        "every fault that repeats itself",
        "where half of the modules of one shape differ within round-off, the stack does not repeat itself"),
    Law("R2", "row order", "C", ROUND_OFF, "rows moved by one", "the same rows, moved",
        (*_ALL, "embedding", "model"), ("stale data", "spike"),
        "faults alike in all slots", "rows of MoE experts are bound to their expert"),
    Law("R3", "batch size", "C", ROUND_OFF, "one row alone", "that row", ("linear", "norm"), ("unknown",),
        "faults common to all kernels"),
    Law("R4", "causality", "C", ROUND_OFF, "later tokens changed, or cut off", "earlier outputs stay",
        ("attention", "model"), ("stale data",),
        "arithmetic inside the mask", "attention that looks both ways has no such law; MoE routing may jump"),
    Law("R5", "decode = prefill", "C", ROUND_OFF,
        "the last token through the key-value cache", "the logits of the whole prompt", ("model",), ("stale data",),
        "faults shared by both paths", "models with a cache only; MoE routing may jump"),
    Law("R6", "norm, scaled by 2^k", "C", ROUND_OFF, "4 x", "the output for x, but for eps", ("norm",),
        ("saturation", "flush to zero"),
        "constant gain; a table that repeats in every octave", "eps must be known; 4 x must fit the dtype"),
    Law("R6'", "norm, scaled by other factors", "C", ROUND_OFF,
        "1.19, 1.41, 1.7, 1.83 times x", "the output for x, but for eps", ("norm",), ("function table",),
        "constant gain", "as R6"),
    Law("R7", "oddness", "C", EXACT, "-x", "minus the output", (*_LINEAR, "norm", "attention"),
        ("bias", "stuck bit"),
        "odd faults: dead zone, symmetric clip, gain", "biases are set to 0 for the call"),
    Law("R8", "zero", "C", EXACT, "0", "0", (*_ALL, "attention"), ("bias", "stuck bit", "dead lane", "stale data"),
        "multiplicative faults, offsets relative to the output", "biases are set to 0 for the call"),
    Law("R9", "a single key", "C", ROUND_OFF, "one query and one key", "the value", ("attention call", "softmax"),
        ("gain",), "scores"),
    Law("R10", "one token repeated", "C", ROUND_OFF, "every token the same", "every output the same", ("attention",),
        ("accumulation", "stale data"), "scores",
        "learned sinks are shut for the call; tokens that a mask lets look nowhere are left out, as in R4, R7 and R8"),
    Law("R11", "probabilities sum to 1", "C", ROUND_OFF, "V = 1", "1", ("attention call", "softmax"),
        ("gain", "accumulation", "stale data", "dead zone", "saturation"),
        "the shape of exp", "learned sinks take a share"),
    Law("R12", "key shift", "C", ROUND_OFF,
        "one vector added to all keys (one constant to all scores)", "the same probabilities",
        ("attention call", "softmax"), ("saturation", "truncation", "bias"), "a table of exp (it cancels)"),
    Law("R13", "log-odds", "C", ROUND_OFF, "V = I, q and 2 q", "log(p_i / p_j) doubles",
        ("attention call", "softmax"), ("function table", "saturation", "dead zone", "truncation"),
        "gain of the scores", "driven in float32, where 16-bit numbers would hide it"),
    Law("R14", "position shift", "C", ROUND_OFF,
        "all positions + 17", "the same output; rotations between positions stay", ("attention", "rotary"),
        ("function table", "truncation"), "-", "rotary embeddings only"),
    Law("R15", "activation identity", "C", ROUND_OFF,
        "z and -z", "a(z) - a(-z) = z, a(0) = 0, a grows right of its minimum, is nowhere steeper than 1.13",
        ("activation",), ("function table", "gain", "saturation", "dead zone", "dead lane"),
        "a symmetric table within its steps"),
    Law("R16", "MLP identity", "C", ROUND_OFF,
        "x and -x", "M(x) + M(-x) = D[g u]; without a gate M(x) - M(-x) = D[g]", ("mlp",), ("function table",),
        "faults of its linears", "MLPs with plain linears and silu, gelu or relu"),
    Law("R17", "scaling by 2", "C", EXACT, "2 x", "twice the output", _LINEAR,
        ("dead zone", "saturation", "flush to zero", "bias", "spike"),
        "linear faults, and those relative to the output's own size",
        "x / 2 where 2 x would overflow, unless that loses bits; static activation scales break it"),
    Law("R18", "additivity", "C", ROUND_OFF,
        "x in two parts, 0.7 x and 0.3 x by lot for each inner index", "they add up", _LINEAR,
        ("accumulation", "truncation", "saturation", "dead zone", "rounding mode", "spike", "bias"),
        "linear faults",
        "packed weights with quantised activations; rows that are copies of others count once"),
    Law("R19", "row permutation of W", "W", ROUND_OFF, "rows of W in another order", "outputs in that order",
        ("linear",), ("dead lane", "swapped channels"), "inner lanes, gain"),
    Law("R20", "one-hot readback", "W", EXACT, "unit vectors", "columns of W", ("linear",),
        ("gain", "dead input lane", "swapped channels", "block scale"), "accumulation, saturation"),
    Law("R21", "checksums", "W", ROUND_OFF, "x, summed over 64 outputs with random signs", "x (W^T r) on the host",
        ("linear",), ("gain", "dead input lane", "swapped channels", "truncation", "block scale", "accumulation"),
        "single small elements"),
    Law("R24", "statistics of the output", "H", ROUND_OFF,
        "-", "no constant bit, no dead channel, no gap round 0, no ties at the maximum", _LINEAR,
        ("stuck bit", "truncation", "dead lane", "saturation", "dead zone"),
        "smooth errors",
        "weights that are 0 make dead channels; rows alike but for roundings, and numbers under the normal range, tie"),
    Law("R25", "bookkeeping", "H", ROUND_OFF,
        "-", "a block's output is the sum of its parts, bit for bit; a norm's output is x times one gain a channel",
        ("residual", "norm"),
        ("noise", "spike", "dead zone", "saturation", "bias", "gain", "stuck bit", "dead lane", "stale data"),
        "the parts themselves", "blocks whose sum is not that of tensors seen (scaled residuals)"),
    Law("R26", "NaN passes", "C", EXACT, "one NaN in a row, at up to 32 inner indices", "NaN in all of that row",
        ("linear", "norm", "activation"), ("nan to zero",), "finite numbers", "packed weights"),
    Law("R27", "gain of a norm, table of an embedding", "W", ROUND_OFF, "-", "the stored numbers",
        ("norm", "embedding"), ("gain", "bias", "noise", "swapped channels", "dead lane"), "-"),
)
# fmt: on

LAWS: dict[str, Law] = {law.name: law for law in _TABLE}

# Classes that a law may catch, but not however small they are: it promises nothing about them.
NO_PROMISE: dict[str, frozenset[str]] = {
    "R3": frozenset({"unknown"}),
    "R8": frozenset({"bias"}),  # none where it is relative to the output
    "R17": frozenset({"dead zone", "saturation", "bias"}),  # nor these
    "R24": frozenset({"stuck bit", "truncation", "saturation", "dead zone"}),  # shown by many elements
    "R25 norm": frozenset({"gain", "dead lane"}),  # they are taken for the norm's own gain
}

# Classes of a linear's faults that keep every law without weights, and what is to be said of them.
UNSEEN = {
    "gain": "linear faults show only with weights=True",
    "swapped channels": "linear faults show only with weights=True",
    "dead input lane": "a lane of a unit up to 32 wide shows by R26, single inputs only with weights=True",
    "block scale": "linear faults show only with weights=True",
}
