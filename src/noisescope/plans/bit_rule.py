"""The bit rule of the original method notes: 16, 8 or 4 bits for a layer by what noise in it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from noisescope.errors import InvalidInput
from noisescope.plans.precision import Module, Plan, plan_of

CRITICAL, MODERATE = 0.15, 0.05  # degradation above which a layer gets 16 bits, or 8
LOWERED_BELOW = 0.10  # an 8-bit layer may be lowered to 4 only where it loses less than this
NAMES = {16: ("bf16",), 8: ("int8", "fp8_e4m3"), 4: ("int4", "nvfp4", "mxfp4")}  # the first that is offered


def bits_by_rule(sensitivity: Mapping[Any, float], target_average_bits: float = 6.0) -> dict[Any, int]:
    """Bits by layer. The average counts layers, not weights.

    Above the target, 8-bit layers go to 4 bits, the least sensitive first, as long as they lose less than 10 %; 16-bit
    layers are never lowered, so the target may be missed. Below it, 4-bit layers go to 8, the most sensitive first.
    """
    if not sensitivity:
        raise InvalidInput("the bit rule needs the sensitivity of at least one layer")
    bits = {layer: 16 if loss > CRITICAL else 8 if loss > MODERATE else 4 for layer, loss in sensitivity.items()}
    order = sorted(bits, key=lambda layer: sensitivity[layer])
    if _average(bits) > target_average_bits:
        for layer in order:
            if _average(bits) > target_average_bits and bits[layer] == 8 and sensitivity[layer] < LOWERED_BELOW:
                bits[layer] = 4
    else:
        for layer in reversed(order):
            if _average(bits) < target_average_bits and bits[layer] == 4:
                bits[layer] = 8
    return bits


def _average(bits: Mapping[Any, int]) -> float:
    return sum(bits.values()) / len(bits)


def layer_sensitivity(report: Mapping[str, Any]) -> dict[int, float]:
    """What noise costs each layer: the mean degradation of the injected windows that hold it.

    The notes fill this with degradation / noise scale while their limits are degradations; here it is degradation.
    """
    windows = (report.get("layer_analysis") or {}).get("windows", [])
    known = [row for row in windows if (row.get("degradation") or {}).get("value") is not None]
    blocks = report["run"]["model"]["blocks"]
    found = {}
    for layer in range(blocks):
        losses = [row["degradation"]["value"] for row in known if row["start_layer"] <= layer <= row["end_layer"]]
        if not losses:
            return {}
        found[layer] = float(np.mean(losses))
    return found


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
    above = 16 in bits.values() and _average(bits) > target
    note = f"misses its target of {target:g} bits: layers of 16 bits are never lowered" if above else ""
    return plan_of(modules, assignment, "bit rule of the method notes", note)
