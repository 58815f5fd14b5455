"""`act`: what a fault makes of an operator's output. One function per family, chosen by the fault's class.

The values themselves (faults/notes.py, digits.py ...) import no torch, so that a text that names a wrong fault is
refused before torch is loaded.
"""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor

from noisescope.faults.calls import Call
from noisescope.faults.memory import Memory
from noisescope.faults.values import Fault


@singledispatch
def act(fault: Fault, y: Tensor, call: Call, memory: Memory) -> Tensor:
    """The faulty output, in a new tensor of y's shape and dtype; y itself stays as it is."""
    raise NotImplementedError(f"no effect is registered for {type(fault).__name__}")
