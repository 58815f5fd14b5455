"""What each line of a passport means, and why a difference in it matters. Does not import torch.

A difference reads "WHERE: SUBJECT A on the first device, B on the second. WHY", with A and B from `shown`.
"""

from __future__ import annotations

from typing import Any

_SATURATES = "A device that saturates hides overflow: on it, look for values at the format's maximum, not for NaN."
_NAN = "A device that loses NaN defeats every NaN check."
_DRIFT = "Results that are not rounded to nearest drift in one direction, and more data does not average that out."
_SUBNORMAL = (
    "Flushing sets numbers below the smallest normal number to zero. It matters for tiny values (float16 gradients, "
    "tails of softmax) and rarely elsewhere. On a CPU, torch.set_flush_denormal controls it."
)
_ORDER = "The kernel treats positions differently: compare in the same order, and expect the last bits to change."
_LAW = "Healthy arithmetic satisfies this law exactly: look for a fault with noisescope locate."
_RANGE = "Without extra range, an intermediate sum can overflow although the final result would fit."
_REPEAT = "Exact checks (zero tolerance) work only where runs are repeatable; elsewhere, compare with a tolerance."

# section -> key -> (subject, why). Lines that are not here are compared by rules of their own (`passport_diff`).
RULES: dict[str, dict[str, tuple[str, str]]] = {
    "products": {
        "sum_rounding": ("the running sum is rounded", _DRIFT),
        "result_rounding": ("results are rounded", _DRIFT),
        "terms": ("terms enter the sum", "The last bits differ where large terms cancel; this is not a fault."),
        "subnormal_operands": ("subnormal operands are", _SUBNORMAL),
        "subnormal_results": ("subnormal results are", _SUBNORMAL),
        "overflow": ("overflow gives", _SATURATES),
        "nan": ("NaN x 1 gives", _NAN),
        "infinity_times_zero": ("infinity x 0 gives", _NAN),
        "sum_range": ("the range of the running sum is", _RANGE),
        "repeats": ("the same product, run again, differed", _REPEAT),
        "batch_sizes": (
            "the result of a row changes",
            "The same prompt gives different last bits alone and in a batch: compare devices at the same batch size.",
        ),
        "row_order": ("equality under reordered rows", _ORDER),
        "column_order": ("equality under reordered columns of the weight", _ORDER),
        "batch_order": ("equality under a reordered batch of products", _ORDER),
        "batch_of_one": ("equality of a product alone and in a batch", _ORDER),
        "layout": (
            "equality of operands stored by rows and by columns",
            "A transposed weight gives different last bits.",
        ),
        "zero": ("f(0) = 0", _LAW),
        "odd": ("f(-x) = -f(x)", _LAW),
        "doubling": ("f(2x) = 2 f(x)", _LAW),
        "one_hot": ("that a unit row returns a row of the weight", _LAW),
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
    "rows_sum": "the weights of a row of attention sum to 1 with an error of up to",
    "key_shift": "the same vector added to all keys changes attention by up to",
    "single_key": "attention to a single key differs from its value by up to",
}
# What a fact changes when it differs; facts that are not here (the name) only label the device.
FACTS = {
    "torch": "Kernels change between versions.",
    "threads": "The number of threads decides how sums are split.",
    "vector_unit": "A different vector unit means different kernels.",
    "blas": "A different BLAS library means a different summation order.",
    "onednn": "oneDNN has its own matrix products for bfloat16 and float16.",
    "cuda": "A different CUDA version brings different kernels.",
    "capability": "The chips are of different generations.",
    "machine": "The instruction sets differ.",
}
NAMES = {  # of lines, where one is named by itself
    "sum_bits": "bits kept in sums",
    "result_bits": "bits of results",
    "operand_bits": "bits of operands",
    "small_integers": "a product of small integers",
    "error": "the error against float64",
    "rows_sum": "the sum of attention's weights",
    "key_shift": "attention after the same shift of all keys",
    "single_key": "attention to a single key",
}


def shown(key: str, line: dict[str, Any]) -> str:
    """A line's value as used in a sentence."""
    value = line.get("value")
    if key.endswith("_rounding"):
        if value is None or value == "unclear":
            return f"in an unknown way{' (' + str(line['hidden']) + ')' if 'hidden' in line else ''}"
        return f"to {value}" if str(value).startswith("nearest") else str(value)
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
    if value == "saturates":
        return "the largest number"
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
    return "turn off its fast float32 mode (on an NPU: torch.npu.matmul.allow_hf32 = False)"


def accumulation_switch(facts: tuple[dict[str, Any], ...]) -> str:
    """Which torch flag, if any, allows a GPU to sum in reduced precision."""
    names = [
        f"torch.backends.{name}"
        for fact in facts
        for name, on in fact.get("flags", {}).items()
        if on is True and ("reduced_precision_reduction" in name or "fp16_accumulation" in name)
    ]
    return f" These settings, if on, allow low-precision sums: {', '.join(dict.fromkeys(names))}." if names else ""
