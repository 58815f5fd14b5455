"""The laws of healthy arithmetic: the transformation, the expected result, what each law detects and its blind spots.

access  H  hooked inputs and outputs       C  the module is called with chosen inputs      W  its weights are read
floor   "exact"        bit for bit: it follows from IEEE arithmetic whatever the order of summation
        "repeatable"   bit for bit on a stack that repeats itself; within round-off on one that does not
        "round-off"    within the round-off model of rounded_forwards.py
"""

from __future__ import annotations

from enum import StrEnum

EXACT, REPEATABLE, ROUND_OFF = "exact", "repeatable", "round-off"
_LINEAR = ("linear", "product")
_ALL = ("linear", "product", "norm", "activation", "attention call")


# fmt: off
class Law(StrEnum):
    """One relation, printed as its title. `catches` are fault classes (verdict.CLASSES)."""

    access: str
    floor: str
    transform: str
    expected: str
    levels: tuple[str, ...]
    catches: tuple[str, ...]
    blind: str

    def __new__(cls, title: str, access: str, floor: str, transform: str, expected: str,
                levels: tuple[str, ...], catches: tuple[str, ...], blind: str) -> Law:
        law = str.__new__(cls, title)
        law._value_ = title
        law.access, law.floor, law.transform, law.expected = access, floor, transform, expected
        law.levels, law.catches, law.blind = levels, catches, blind
        return law

    REPEAT = ("repeat", "C", REPEATABLE,
        "the same input again, after a call with another one (A, B, A)", "the same bits",
        (*_ALL, "embedding", "model"), ("noise", "spike", "stale data"), "every deterministic fault")
    ROW_ORDER = ("row order", "C", ROUND_OFF, "rows moved by one", "the same rows, moved",
        (*_ALL, "embedding", "model"), ("stale data", "spike"), "faults that are the same in every row")
    BATCH_SIZE = ("batch size", "C", ROUND_OFF, "one row alone", "that row", ("linear", "norm"), ("unknown",),
        "faults common to all kernels")
    CAUSALITY = ("causality", "C", ROUND_OFF, "later tokens changed, or cut off", "earlier outputs unchanged",
        ("attention", "model"), ("stale data",), "arithmetic inside the mask")
    DECODE_EQUALS_PREFILL = ("decode = prefill", "C", ROUND_OFF,
        "the last token through the key-value cache", "the logits of the whole prompt", ("model",), ("stale data",),
        "faults shared by both paths")
    NORM_SCALED_BY_FOUR = ("norm, scaled by 2^k", "C", ROUND_OFF, "4 x", "the output for x, but for eps", ("norm",),
        ("saturation", "flush to zero"), "constant gain; a table that repeats in every octave")
    NORM_SCALED = ("norm, scaled by other factors", "C", ROUND_OFF,
        "1.19, 1.41, 1.7, 1.83 times x", "the output for x, but for eps", ("norm",), ("function table",),
        "constant gain")
    ODDNESS = ("oddness", "C", EXACT, "-x", "minus the output", (*_LINEAR, "norm", "attention"),
        ("bias", "stuck bit"), "odd faults: dead zone, symmetric clip, gain")
    ZERO = ("zero", "C", EXACT, "0", "0", (*_ALL, "attention"), ("bias", "stuck bit", "dead lane", "stale data"),
        "multiplicative faults, offsets relative to the output")
    SINGLE_KEY = ("a single key", "C", ROUND_OFF, "one query and one key", "the value",
        ("attention call", "softmax"), ("gain",), "scores")
    REPEATED_TOKEN = ("one token repeated", "C", ROUND_OFF, "every token the same", "every output the same",
        ("attention",), ("accumulation", "stale data"), "scores")
    PROBABILITIES_SUM_TO_ONE = ("probabilities sum to 1", "C", ROUND_OFF, "V = 1", "1",
        ("attention call", "softmax"), ("gain", "accumulation", "stale data", "dead zone", "saturation"),
        "the shape of exp")
    KEY_SHIFT = ("key shift", "C", ROUND_OFF,
        "one vector added to all keys (one constant to all scores)", "the same probabilities",
        ("attention call", "softmax"), ("saturation", "truncation", "bias"), "a table of exp (it cancels)")
    LOG_ODDS = ("log-odds", "C", ROUND_OFF, "V = I, q and 2 q", "log(p_i / p_j) doubles",
        ("attention call", "softmax"), ("function table", "saturation", "dead zone", "truncation"),
        "gain of the scores")
    POSITION_SHIFT = ("position shift", "C", ROUND_OFF,
        "all positions + 17", "the same output; rotations between positions stay", ("attention", "rotary"),
        ("function table", "truncation"), "-")
    ACTIVATION_IDENTITY = ("activation identity", "C", ROUND_OFF,
        "z and -z", "a(z) - a(-z) = z, a(0) = 0, a increases to the right of its minimum, slope at most 1.13",
        ("activation",), ("function table", "gain", "saturation", "dead zone", "dead lane"),
        "a symmetric table within its steps")
    MLP_IDENTITY = ("MLP identity", "C", ROUND_OFF,
        "x and -x", "M(x) + M(-x) = D[g u]; without a gate M(x) - M(-x) = D[g]", ("mlp",), ("function table",),
        "faults of its linears")
    SCALE_BY_TWO = ("scaling by 2", "C", EXACT, "2 x", "twice the output", _LINEAR,
        ("dead zone", "saturation", "flush to zero", "bias", "spike"),
        "linear faults, and faults relative to the output's own size")
    ADDITIVITY = ("additivity", "C", ROUND_OFF,
        "x in two parts, 0.7 x and 0.3 x at random for each inner index", "the outputs of the parts add up", _LINEAR,
        ("accumulation", "truncation", "saturation", "dead zone", "rounding mode", "spike", "bias"), "linear faults")
    WEIGHT_ROW_PERMUTATION = ("row permutation of W", "W", ROUND_OFF, "rows of W in another order",
        "outputs in that order", ("linear",), ("dead lane", "swapped channels"), "inner lanes, gain")
    ONE_HOT_READBACK = ("one-hot readback", "W", EXACT, "unit vectors", "columns of W", ("linear",),
        ("gain", "dead input lane", "swapped channels", "block scale"), "accumulation, saturation")
    CHECKSUMS = ("checksums", "W", ROUND_OFF, "x, summed over 64 outputs with random signs", "x (W^T r) on the host",
        ("linear",), ("gain", "dead input lane", "swapped channels", "truncation", "block scale", "accumulation"),
        "single small elements")
    OUTPUT_STATISTICS = ("statistics of the output", "H", ROUND_OFF,
        "-", "no constant bit, no dead channel, no gap around 0, no ties at the maximum", _LINEAR,
        ("stuck bit", "truncation", "dead lane", "saturation", "dead zone"), "smooth errors")
    SUM_OF_PARTS = ("sum of parts", "H", EXACT, "-", "a block's output is the sum of its parts", ("residual",),
        ("noise", "spike", "dead zone", "saturation", "bias", "gain", "stuck bit", "dead lane", "stale data"),
        "the parts themselves; sums of tensors that are not module outputs")
    ONE_GAIN_PER_CHANNEL = ("one gain per channel", "H", ROUND_OFF,
        "-", "a norm's output is its normalised input times one gain for each channel", ("norm",),
        ("noise", "spike", "dead zone", "saturation", "bias", "stuck bit", "stale data"),
        "gain and dead lanes: they look like the norm's own gain")
    NAN_PASSES = ("NaN passes", "C", EXACT, "one NaN in a row, at up to 32 inner indices", "NaN in all of that row",
        ("linear", "norm", "activation"), ("nan to zero",), "finite numbers")
    STORED_NUMBERS = ("stored numbers", "W", ROUND_OFF, "-", "a norm's gains, the rows of an embedding's table",
        ("norm", "embedding"), ("gain", "bias", "noise", "swapped channels", "dead lane"), "-")
# fmt: on


# Classes that a law may catch, but not however small they are: it promises nothing about them.
NO_PROMISE: dict[Law, frozenset[str]] = {
    Law.BATCH_SIZE: frozenset({"unknown"}),
    Law.ZERO: frozenset({"bias"}),  # none where it is relative to the output
    Law.SCALE_BY_TWO: frozenset({"dead zone", "saturation", "bias"}),  # nor these
    Law.OUTPUT_STATISTICS: frozenset({"stuck bit", "truncation", "saturation", "dead zone"}),  # shown by many elements
}

# Classes of a linear's faults that keep every law without weights, and what is reported about them.
UNSEEN = {
    "gain": "linear faults are detected only with weights=True",
    "swapped channels": "linear faults are detected only with weights=True",
    "dead input lane": "a lane of a unit up to 32 wide is detected by a lost NaN, single inputs only with weights=True",
    "block scale": "linear faults are detected only with weights=True",
}
