"""The laws that healthy arithmetic obeys, as a table of values: what is done, what must follow, what each can't see.

R1 to R25 keep the numbers of the project's notes on relations; R26 and R27 are additions. No torch here.

access  H  hooked inputs and outputs       C  the module is called with chosen inputs      W  its weights are read
floor   "exact"        bit for bit: it follows from IEEE arithmetic whatever the order of summation
        "repeatable"   bit for bit on a stack that repeats itself; within round-off on one that does not
        "round-off"    within the round-off model of law_floors.py
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
    transform: str
    expected: str
    floor: str
    levels: tuple[str, ...]
    catches: tuple[str, ...]
    blind: str
    guard: str = ""

    @property
    def exact(self) -> bool:
        return self.floor == EXACT


_LINEAR = ("linear", "product")
_ALL = ("linear", "product", "norm", "activation", "attention call")

_TABLE = (
    Law(
        "R1",
        "repeat",
        "C",
        "the same input again, after a call with another one (A, B, A)",
        "the same bits",
        REPEATABLE,
        (*_ALL, "embedding", "model"),
        ("noise", "spike", "stale data"),
        "every fault that repeats itself",
        "where at least half of the modules of one shape differ within round-off, the stack does not repeat itself",
    ),
    Law(
        "R2",
        "row order",
        "C",
        "rows moved by one",
        "the same rows, moved",
        ROUND_OFF,
        (*_ALL, "embedding", "model"),
        ("stale data", "spike"),
        "faults alike in all slots",
        "rows of MoE experts are bound to their expert",
    ),
    Law(
        "R3",
        "batch size",
        "C",
        "one row alone",
        "that row",
        ROUND_OFF,
        ("linear", "norm"),
        ("unknown",),
        "faults common to all kernels",
    ),
    Law(
        "R4",
        "causality",
        "C",
        "later tokens changed, or cut off",
        "earlier outputs stay",
        ROUND_OFF,
        ("attention", "model"),
        ("stale data",),
        "arithmetic inside the mask",
        "attention that looks both ways has no such law; MoE routing may jump",
    ),
    Law(
        "R5",
        "decode = prefill",
        "C",
        "the last token through the key-value cache",
        "the logits of the whole prompt",
        ROUND_OFF,
        ("model",),
        ("stale data",),
        "faults shared by both paths",
        "models with a cache only; MoE routing may jump",
    ),
    Law(
        "R6",
        "norm, scaled by 2^k",
        "C",
        "4 x",
        "the output for x, but for eps",
        ROUND_OFF,
        ("norm",),
        ("saturation", "flush to zero"),
        "constant gain; a table that repeats in every octave",
        "eps must be known; 4 x must fit the dtype",
    ),
    Law(
        "R6'",
        "norm, scaled by other factors",
        "C",
        "1.19, 1.41, 1.7, 1.83 times x",
        "the output for x, but for eps",
        ROUND_OFF,
        ("norm",),
        ("function table",),
        "constant gain",
        "as R6",
    ),
    Law(
        "R7",
        "oddness",
        "C",
        "-x",
        "minus the output",
        EXACT,
        (*_LINEAR, "norm", "attention"),
        ("bias", "rounding mode", "stuck bit"),
        "odd faults: dead zone, symmetric clip, gain",
        "biases are set to 0 for the call",
    ),
    Law(
        "R8",
        "zero",
        "C",
        "0",
        "0",
        EXACT,
        (*_ALL, "attention"),
        ("bias", "stuck bit", "dead lane", "stale data"),
        "multiplicative faults, offsets relative to the output",
        "biases are set to 0 for the call",
    ),
    Law(
        "R9",
        "a single key",
        "C",
        "one query and one key",
        "the value",
        ROUND_OFF,
        ("attention call", "softmax"),
        ("gain",),
        "scores",
    ),
    Law(
        "R10",
        "one token repeated",
        "C",
        "every token the same",
        "every output the same",
        ROUND_OFF,
        ("attention",),
        ("accumulation", "stale data"),
        "scores",
    ),
    Law(
        "R11",
        "probabilities sum to 1",
        "C",
        "V = 1",
        "1",
        ROUND_OFF,
        ("attention call", "softmax"),
        ("gain", "accumulation", "stale data", "dead zone", "saturation"),
        "the shape of exp",
        "learned sinks take a share",
    ),
    Law(
        "R12",
        "key shift",
        "C",
        "one vector added to all keys (one constant to all scores)",
        "the same probabilities",
        ROUND_OFF,
        ("attention call", "softmax"),
        ("saturation", "truncation", "bias"),
        "a table of exp (it cancels)",
    ),
    Law(
        "R13",
        "log-odds",
        "C",
        "V = I, q and 2 q",
        "log(p_i / p_j) doubles",
        ROUND_OFF,
        ("attention call", "softmax"),
        ("function table", "saturation", "dead zone", "truncation"),
        "gain of the scores",
        "driven in float32, where 16-bit numbers would hide it",
    ),
    Law(
        "R14",
        "position shift",
        "C",
        "all positions + 17",
        "the same output; rotations between positions stay",
        ROUND_OFF,
        ("attention", "rotary"),
        ("function table", "truncation"),
        "-",
        "rotary embeddings only",
    ),
    Law(
        "R15",
        "activation identity",
        "C",
        "z and -z",
        "a(z) - a(-z) = z, a(0) = 0, a grows above -1.28 and stays above -0.28 (silu) or -0.17 (gelu)",
        ROUND_OFF,
        ("activation",),
        ("function table", "gain", "saturation", "dead zone", "dead lane"),
        "a symmetric table within its steps",
    ),
    Law(
        "R16",
        "MLP identity",
        "C",
        "x and -x",
        "M(x) + M(-x) = D[g u]; without a gate M(x) - M(-x) = D[g]",
        ROUND_OFF,
        ("mlp",),
        ("function table",),
        "faults of its linears",
        "MLPs with plain linears and silu, gelu or relu",
    ),
    Law(
        "R17",
        "scaling by 2",
        "C",
        "2 x",
        "twice the output",
        EXACT,
        _LINEAR,
        ("dead zone", "saturation", "flush to zero", "bias", "spike"),
        "linear faults, and those relative to the output's own size",
        "x / 2 where 2 x would overflow; static activation scales break it",
    ),
    Law(
        "R18",
        "additivity",
        "C",
        "a random half of the inner dimension, and the other half",
        "they add up",
        ROUND_OFF,
        _LINEAR,
        ("accumulation", "saturation", "dead zone", "rounding mode", "spike", "bias"),
        "linear faults",
        "packed weights with quantised activations",
    ),
    Law(
        "R19",
        "row permutation of W",
        "W",
        "rows of W in another order",
        "outputs in that order",
        ROUND_OFF,
        ("linear",),
        ("dead lane", "swapped channels"),
        "inner lanes, gain",
    ),
    Law(
        "R20",
        "one-hot readback",
        "W",
        "unit vectors",
        "columns of W",
        EXACT,
        ("linear",),
        ("gain", "dead input lane", "swapped channels", "block scale"),
        "accumulation, saturation",
    ),
    Law(
        "R21",
        "checksums",
        "W",
        "x, summed over 64 outputs with random signs",
        "x (W^T r) on the host",
        ROUND_OFF,
        ("linear",),
        ("gain", "dead input lane", "swapped channels", "truncation", "block scale", "accumulation"),
        "single small elements",
    ),
    Law(
        "R24",
        "statistics of the output",
        "H",
        "-",
        "no constant bit, no dead channel, no gap round 0, no ties at the maximum",
        ROUND_OFF,
        _LINEAR,
        ("stuck bit", "truncation", "dead lane", "saturation", "dead zone"),
        "smooth errors",
        "weights that are 0 make dead channels",
    ),
    Law(
        "R25",
        "bookkeeping",
        "H",
        "-",
        "a block's output is the sum of its parts, bit for bit; a norm's output is x times one gain a channel",
        ROUND_OFF,
        ("residual", "norm"),
        ("noise", "spike", "dead zone", "saturation", "bias", "gain", "stuck bit", "dead lane", "stale data"),
        "the parts themselves",
        "blocks whose sum is not that of tensors seen (scaled residuals)",
    ),
    Law(
        "R26",
        "NaN passes",
        "C",
        "one NaN in a row",
        "NaN in all of that row",
        EXACT,
        ("linear", "norm", "activation"),
        ("nan to zero",),
        "finite numbers",
        "packed weights",
    ),
    Law(
        "R27",
        "gain of a norm, table of an embedding",
        "W",
        "-",
        "the stored numbers",
        ROUND_OFF,
        ("norm", "embedding"),
        ("gain", "bias", "noise", "swapped channels", "dead lane"),
        "-",
    ),
)

LAWS: dict[str, Law] = {law.name: law for law in _TABLE}

# Classes that a law does not catch at some operators.
INVISIBLE: dict[tuple[str, str], frozenset[str]] = {
    ("R25", "norm"): frozenset({"gain", "dead lane"}),
    ("R27", "embedding"): frozenset(),
}
