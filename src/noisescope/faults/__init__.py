"""Simulated faults: a device that computes wrongly, as a value that can be saved and replayed.

The values and their texts import no torch; the simulator is loaded when first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noisescope.faults.fault import Fault, Lanes
from noisescope.faults.parsing import (
    FAMILIES,
    Family,
    Where,
    fault_from_dict,
    fault_text,
    make_fault,
    parse_fault,
    parse_where,
)
from noisescope.faults.unit_faults import (
    Accumulation,
    ActivationCutOff,
    ActivationTable,
    BlockScale,
    DeadKLane,
    DeadLane,
    ExpTable,
    InputTruncation,
    NormaliserGain,
    NormGain,
    RoundingMode,
    RsqrtTable,
    StaleTile,
    StuckLane,
    SwappedChannels,
)
from noisescope.faults.value_faults import (
    Bias,
    BitFlip,
    DeadZone,
    FlushToZero,
    Gain,
    NanToZero,
    Noise,
    NonDeterminism,
    Saturation,
    Spike,
    StuckBit,
    Truncation,
)

if TYPE_CHECKING:
    from noisescope.faults.simulator import FaultScope as FaultScope
    from noisescope.faults.simulator import faulty as faulty

__all__ = [
    "FAMILIES",
    "Accumulation",
    "ActivationCutOff",
    "ActivationTable",
    "Bias",
    "BitFlip",
    "BlockScale",
    "DeadKLane",
    "DeadLane",
    "DeadZone",
    "ExpTable",
    "Family",
    "Fault",
    "FaultScope",
    "FlushToZero",
    "Gain",
    "InputTruncation",
    "Lanes",
    "NanToZero",
    "Noise",
    "NonDeterminism",
    "NormGain",
    "NormaliserGain",
    "RoundingMode",
    "RsqrtTable",
    "Saturation",
    "Spike",
    "StaleTile",
    "StuckBit",
    "StuckLane",
    "SwappedChannels",
    "Truncation",
    "Where",
    "fault_from_dict",
    "fault_text",
    "faulty",
    "make_fault",
    "parse_fault",
    "parse_where",
]


def __getattr__(name: str) -> Any:
    if name not in ("FaultScope", "faulty"):
        raise AttributeError(f"module 'noisescope.faults' has no attribute {name!r}")
    from noisescope.faults import simulator

    return vars(simulator)[name]
