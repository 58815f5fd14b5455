"""The formats a weight may be stored in, as precision plans offer them.

Rounding is to nearest. Integers are symmetric, with one scale for each group of 64 weights along the input dimension;
FP8 has one scale for each output channel; MXFP4 and NVFP4 have their own blocks (32 and 16). "bf16" stands for 16 bits.

Two counts of bits: nominal (the number in the name, which budgets of average bits are of) and effective (with the share
of the scales: 16 bits each, 8 in MXFP4 and NVFP4; a last group that is not full has its scale, too).
"""

from __future__ import annotations

import math

from noisescope.errors import unknown
from noisescope.probe.formats import Format

# The same names and group are in diagnosis/formats.py, which may not import torch; a test holds them together.
UNTOUCHED = "bf16"  # 16 bits: the module is left as it is
GROUP = 64
WEIGHT_FORMATS: dict[str, Format] = {
    UNTOUCHED: Format(UNTOUCHED),
    "int8": Format("int8", "group", GROUP),
    "fp8_e4m3": Format("fp8_e4m3", "channel"),
    "int4": Format("int4", "group", GROUP),
    "nvfp4": Format("nvfp4"),
    "mxfp4": Format("mxfp4"),
    "int3": Format("int3", "group", GROUP),
}


def weight_format(name: str) -> Format:
    if name not in WEIGHT_FORMATS:
        raise unknown("weight format", name, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[name]


def effective_bits(name: str, inputs: int) -> float:
    """Stored bits a weight with its share of the scales, where each output channel has `inputs` weights."""
    fmt = weight_format(name)
    if fmt.granularity == "channel":
        return fmt.element_bits + 16 / inputs
    group = fmt.group_size or 1
    full = math.ceil(inputs / group) * group  # weights there would be, if the last group were not short
    return fmt.element_bits + (fmt.bits() - fmt.element_bits) * full / inputs
