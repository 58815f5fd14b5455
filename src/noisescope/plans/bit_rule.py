"""The bit rule of the original method notes: 16, 8 or 4 bits for a layer by what noise in it costs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS
from noisescope.plans.precision import Module, Plan, plan_of

LOWERED_BELOW = LIMITS["precision_8_to_4_bits"]
L = TypeVar("L", bound=Hashable)  # a layer: its index, or whatever the caller knows it by
NAMES = {16: ("bf16",), 8: ("int8", "fp8_e4m3"), 4: ("int4", "nvfp4", "mxfp4")}  # the first that is offered


def bits_by_rule(sensitivity: Mapping[L, float], target_average_bits: float = 6.0) -> dict[L, int]:
    """Bits by layer, from what noise costs it: the degradation. The average counts layers.

    Above the target, 8-bit layers go to 4 bits, the least sensitive first, as long as they lose less than 10 %; 16-bit
    layers are never lowered, so the target may be missed. Below it, 4-bit layers go to 8, the most sensitive first.
    """
    if not sensitivity:
        raise InvalidInput("the bit rule needs the sensitivity of at least one layer")
    losses = {layer: _checked(layer, loss) for layer, loss in sensitivity.items()}
    bits = {layer: _bits(loss) for layer, loss in losses.items()}
    order = sorted(bits, key=lambda layer: losses[layer])
    if _average(bits) > target_average_bits:
        for layer in order:
            if _average(bits) > target_average_bits and bits[layer] == 8 and losses[layer] < LOWERED_BELOW:
                bits[layer] = 4
    else:
        for layer in reversed(order):
            if _average(bits) < target_average_bits and bits[layer] == 4:
                bits[layer] = 8
    return bits


def _bits(loss: float) -> int:
    if loss > LIMITS["precision_16_bits"]:
        return 16
    return 8 if loss > LIMITS["precision_8_bits"] else 4


def _checked(layer: Hashable, loss: object) -> float:
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not math.isfinite(loss):
        raise InvalidInput(
            f"the bit rule has no degradation of {layer!r} (got {loss!r}): give a number such as 0.12; a layer that "
            "could not be measured has to be left out, and kept at 16 bits"
        )
    return float(loss)


def missed_target(bits: Mapping[L, int], target: float) -> str:
    """What to say where the rule misses its target by more than one layer's share; "" where it does not."""
    average = _average(bits)
    if abs(average - target) <= 4 / len(bits):  # a layer between 4 and 8 bits
        return ""
    reason = (
        "layers of 16 bits, and those of 8 that lose 10 % or more, are never lowered"
        if average > target
        else "no layer that loses 15 % or less gets more than 8"
    )
    return f"misses its target: {average:.2f} bits on average, {target:g} were asked for; {reason}"


def _average(bits: Mapping[L, int]) -> float:
    return sum(bits.values()) / len(bits)


def layer_sensitivity(found: Diagnosis) -> dict[int, float]:
    """What noise costs each layer: the mean degradation of the injected windows that hold it.

    The notes fill this with degradation / noise scale while their limits are degradations; here it is degradation.
    """
    windows = found.layer_analysis.windows if found.layer_analysis is not None else ()
    losses = [(row.layers, row.degradation.value) for row in windows if row.degradation is not None]
    known = {
        layer: [loss for layers, loss in losses if loss is not None and layer in layers]
        for layer in range(found.run.model.blocks)
    }
    return {layer: fmean(of) for layer, of in known.items()} if all(known.values()) else {}


def rule_plan(modules: Sequence[Module], sensitivity: Mapping[int, float], target: float) -> Plan:
    """The rule's bits as formats of the modules."""
    bits = bits_by_rule(sensitivity, target)
    names = {
        width: next((name for name in offered if name in modules[0].choices), None) for width, offered in NAMES.items()
    }
    missing = sorted(width for width in set(bits.values()) if names[width] is None)
    if missing:
        raise InvalidInput(f"the bit rule wants formats of {missing} bits, which are not among those offered")
    assignment = {module.name: str(names[bits[module.place]]) for module in modules}
    missed = missed_target(bits, target)
    return plan_of(modules, assignment, "bit rule of the method notes", f"the bit rule {missed}" if missed else "")
