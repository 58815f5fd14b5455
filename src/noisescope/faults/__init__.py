"""Simulated faults: a device that computes wrongly, as a value that can be saved and replayed.

The values and their texts import no torch; the simulator is loaded when first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noisescope.faults.families import Accumulation as Accumulation
from noisescope.faults.families import ActivationCutOff as ActivationCutOff
from noisescope.faults.families import ActivationTable as ActivationTable
from noisescope.faults.families import Bias as Bias
from noisescope.faults.families import BitFlip as BitFlip
from noisescope.faults.families import BlockScale as BlockScale
from noisescope.faults.families import DeadKLane as DeadKLane
from noisescope.faults.families import DeadLane as DeadLane
from noisescope.faults.families import DeadZone as DeadZone
from noisescope.faults.families import ExpTable as ExpTable
from noisescope.faults.families import FlushToZero as FlushToZero
from noisescope.faults.families import Gain as Gain
from noisescope.faults.families import InputTruncation as InputTruncation
from noisescope.faults.families import NanToZero as NanToZero
from noisescope.faults.families import Noise as Noise
from noisescope.faults.families import NonDeterminism as NonDeterminism
from noisescope.faults.families import NormaliserGain as NormaliserGain
from noisescope.faults.families import NormGain as NormGain
from noisescope.faults.families import RoundingMode as RoundingMode
from noisescope.faults.families import RsqrtTable as RsqrtTable
from noisescope.faults.families import Saturation as Saturation
from noisescope.faults.families import Spike as Spike
from noisescope.faults.families import StaleTile as StaleTile
from noisescope.faults.families import StuckBit as StuckBit
from noisescope.faults.families import StuckLane as StuckLane
from noisescope.faults.families import SwappedChannels as SwappedChannels
from noisescope.faults.families import Truncation as Truncation
from noisescope.faults.fault import Fault as Fault
from noisescope.faults.fault import Lanes as Lanes
from noisescope.faults.parsing import FAMILIES as FAMILIES
from noisescope.faults.parsing import Family as Family
from noisescope.faults.parsing import Where as Where
from noisescope.faults.parsing import fault_from_dict as fault_from_dict
from noisescope.faults.parsing import fault_text as fault_text
from noisescope.faults.parsing import make_fault as make_fault
from noisescope.faults.parsing import parse_fault as parse_fault
from noisescope.faults.parsing import parse_where as parse_where

if TYPE_CHECKING:
    from noisescope.faults.simulator import FaultScope as FaultScope
    from noisescope.faults.simulator import faulty as faulty


def __getattr__(name: str) -> Any:
    if name not in ("FaultScope", "faulty"):
        raise AttributeError(f"module 'noisescope.faults' has no attribute {name!r}")
    from noisescope.faults import simulator

    return vars(simulator)[name]
