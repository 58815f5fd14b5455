"""Every fault family by name, and faults from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.faults.digits import BitFlip, FlushToZero, Gain, NanToZero, StuckBit, Truncation
from noisescope.faults.lanes import BlockScale, DeadLane, StaleTile, StuckLane, SwappedChannels
from noisescope.faults.notes import Bias, DeadZone, Noise, NonDeterminism, Saturation, Spike
from noisescope.faults.products import Accumulation, DeadKLane, InputTruncation, RoundingMode
from noisescope.faults.tables import ActivationCutOff, ActivationTable, ExpTable, NormaliserGain, NormGain, RsqrtTable
from noisescope.faults.values import Fault


@dataclass(frozen=True)
class Family:
    """A kind of fault: how to make one, what class a locator should name, and at which operators it makes sense."""

    name: str
    make: type[Fault]  # make() is the fault of default size
    fault_class: str
    sized_by: str | None  # the field that is the size
    default: float | None  # its default
    operators: tuple[str, ...]
    summary: str

    @property
    def at_block_output(self) -> bool:
        return "residual" in self.operators


_MAKERS: tuple[type[Fault], ...] = (
    DeadZone,
    Saturation,
    Spike,
    Noise,
    Bias,
    NonDeterminism,
    StuckBit,
    BitFlip,
    DeadLane,
    StuckLane,
    DeadKLane,
    SwappedChannels,
    Gain,
    Truncation,
    RoundingMode,
    FlushToZero,
    Accumulation,
    InputTruncation,
    ExpTable,
    ActivationTable,
    ActivationCutOff,
    RsqrtTable,
    NormGain,
    NormaliserGain,
    StaleTile,
    NanToZero,
    BlockScale,
)


def _family(make: type[Fault]) -> Family:
    summary = (make.__doc__ or "").partition("\n")[0]
    return Family(make.family, make, make.fault_class, make.sized_by, make().size, make.operators, summary)


FAMILIES: Mapping[str, Family] = {make.family: _family(make) for make in _MAKERS}


def make_fault(family: str, **fields: Any) -> Fault:
    """A fault by its family's name: `make_fault("dead_zone", magnitude=0.3, channels=0.1)`."""
    if family not in FAMILIES:
        raise unknown("fault family", family, FAMILIES)
    make = FAMILIES[family].make
    known = [field.name for field in dataclasses.fields(make)]
    for name in fields:
        if name not in known:
            raise unknown(f"setting of {family}", name, known)
    return make(**fields)


def fault_from_dict(saved: Mapping[str, Any]) -> Fault:
    """The fault that `to_dict` wrote."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("family"), str):
        raise InvalidInput(f'a saved fault is a JSON object with "family" and its settings, got {saved!r}')
    return make_fault(saved["family"], **{name: value for name, value in saved.items() if name != "family"})
