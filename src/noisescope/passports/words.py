"""What each line of a passport says, and why it matters when two devices differ in it. No torch here.

A difference reads "WHERE: SUBJECT A on the first device, B on the second. WHY", with A and B from `shown`.
"""

from __future__ import annotations

from typing import Any

_SATURATES = (
    "A device that saturates hides overflow: watch for values at the format's largest number there, not for NaN."
)
_NAN = "Where NaN is lost, no NaN watcher ever fires."
_DRIFT = "What is not rounded to nearest drifts one way, and more data does not average that out."
_SUBNORMAL = (
    "Numbers below the smallest normal one vanish where they are flushed: it matters for tiny values (float16 "
    "gradients, far tails of softmax), hardly elsewhere. On a CPU torch.set_flush_denormal decides."
)
_ORDER = "Its kernel treats places differently: compare in the same order, and expect the last bits to change."
_LAW = "Healthy arithmetic obeys this law exactly: look for a fault with noisescope locate."
_RANGE = "With the range of the format alone, a sum can overflow on the way although its result would fit."
_REPEAT = "Exact checks (tolerance zero) hold only where runs repeat; elsewhere compare within a floor."

# section -> key -> (subject, why). Lines that are not here are compared by rules of their own (`passport_diff`).
RULES: dict[str, dict[str, tuple[str, str]]] = {
    "products": {
        "sum_rounding": ("the running sum is rounded", _DRIFT),
        "result_rounding": ("results are rounded", _DRIFT),
        "terms": ("terms enter the sum", "Last bits differ where large terms cancel; no fault."),
        "subnormal_operands": ("subnormal operands are", _SUBNORMAL),
        "subnormal_results": ("subnormal results are", _SUBNORMAL),
        "overflow": ("overflow gives", _SATURATES),
        "nan": ("NaN x 1 gives", _NAN),
        "infinity_times_zero": ("infinity x 0 gives", _NAN),
        "sum_range": ("the range of the running sum is", _RANGE),
        "repeats": ("the same product, run again, differed", _REPEAT),
        "batch_sizes": (
            "the result of a row changes",
            "The same prompt gives other last bits alone than in a batch: compare devices at the same batch size.",
        ),
        "row_order": ("equality under reordered rows", _ORDER),
        "column_order": ("equality under reordered columns of the weight", _ORDER),
        "batch_order": ("equality under a reordered batch of products", _ORDER),
        "batch_of_one": ("equality of a product alone and in a batch", _ORDER),
        "layout": ("equality of operands stored by rows and by columns", "A transposed weight gives other last bits."),
        "zero": ("f(0) = 0", _LAW),
        "odd": ("f(-x) = -f(x)", _LAW),
        "doubling": ("f(2x) = 2 f(x)", _LAW),
        "one_hot": ("that a unit row reads a row of the weight back", _LAW),
    },
    "elementwise": {
        "add_rounding": ("a sum is rounded", _DRIFT),
        "cast_rounding": ("a cast is rounded", _DRIFT),
        "subnormal_operands": ("subnormal operands are", _SUBNORMAL),
        "subnormal_results": ("subnormal results are", _SUBNORMAL),
        "subnormal_sums": ("a subnormal difference of normal numbers is", _SUBNORMAL),
        "overflow": ("overflow gives", _SATURATES),
        "exp_overflow": ("exp beyond the range gives", _SATURATES),
        "cast_overflow": ("a cast beyond the range gives", _SATURATES),
        "maximum_of_nan": ("maximum(NaN, 1) is", _NAN),
        "minimum_of_nan": ("minimum(NaN, 1) is", _NAN),
        "relu_of_nan": ("relu(NaN) is", _NAN),
    },
    "attention": {
        "zero": ("that V = 0 gives 0", _LAW),
        "odd": ("that -V gives the negative", _LAW),
        "doubling": ("that 2 V gives the double", _LAW),
        "repeat": ("equality of two runs", _REPEAT),
    },
}
ATTENTION_ERRORS = {
    "error": "fused attention is off from float64 by up to",
    "rows_sum": "the weights of a row of attention miss a sum of 1 by up to",
    "key_shift": "the same vector added to all keys changes attention by up to",
    "single_key": "attention to a single key misses its value by up to",
}
# What a fact changes when it differs; facts that are not here (the name) only label the device.
FACTS = {
    "torch": "Kernels change between versions.",
    "threads": "The number of threads decides how sums are cut into parts.",
    "vector_unit": "Another vector unit means other kernels.",
    "blas": "Another library of products means another order of sums.",
    "onednn": "oneDNN has its own products for bfloat16 and float16.",
    "cuda": "Another CUDA brings other kernels.",
    "capability": "Another generation of chips.",
    "machine": "Another instruction set.",
}
NAMES = {  # of lines, where one is named by itself
    "sum_bits": "bits kept in sums",
    "result_bits": "bits of results",
    "operand_bits": "bits of operands",
    "small_integers": "a product of small whole numbers",
    "error": "the error against float64",
    "rows_sum": "the sum of attention's weights",
    "key_shift": "keys that are all shifted alike",
    "single_key": "attention to a single key",
}


def shown(key: str, line: dict[str, Any]) -> str:
    """A line's value as it stands in a sentence."""
    value = line.get("value")
    if value is None:
        return f"not visible ({line['hidden']})" if "hidden" in line else "not known"
    if key == "batch_sizes":
        sizes = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        return f"at batch size{'s' if ',' in sizes else ''} {sizes}" if value else "at no batch size tried"
    if key == "repeats":
        return f"{value} of {line.get('repeats', '?')} times" if value else "never"
    if isinstance(value, bool):
        return (
            "holds"
            if value
            else "fails" + (f" (by {line['worst']:g} of the largest)" if _number(line, "worst") else "")
        )
    if key == "sum_bits" and line.get("at_least"):
        return f"at least {value}"
    if key == "terms":
        return {"exact": "unrounded", "fused multiply-add": "by fused multiply-add"}.get(str(value), str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(line: dict[str, Any], key: str) -> bool:
    return isinstance(line.get(key), int | float) and not isinstance(line.get(key), bool)


def operand_switch(fact: dict[str, Any]) -> str:
    if fact.get("device") == "cuda":
        return "set torch.backends.cuda.matmul.allow_tf32 = False (or torch.set_float32_matmul_precision('highest'))"
    if fact.get("device") == "cpu":
        return "set torch.set_float32_matmul_precision('highest')"
    return "switch its fast float32 off (on an NPU: torch.npu.matmul.allow_hf32 = False)"


def accumulation_switch(facts: tuple[dict[str, Any], ...]) -> str:
    """Which of torch's flags, if any, lets a GPU sum short."""
    names = [
        f"torch.backends.{name}"
        for fact in facts
        for name, on in fact.get("flags", {}).items()
        if on is True and ("reduced_precision_reduction" in name or "fp16_accumulation" in name)
    ]
    return f" These allow short sums where they are on: {', '.join(dict.fromkeys(names))}." if names else ""
