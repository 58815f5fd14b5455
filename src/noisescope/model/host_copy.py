"""Copies to the host that do not wait for what the device is given later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """A tensor on its way to the host."""

    _copy: Tensor
    _done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def begin_copy(x: Tensor) -> HostCopy:
    """Start copying a tensor to the host, if it is not there; from CUDA into pinned memory, in stream order."""
    if x.device.type != "cuda":
        return HostCopy(x.detach().to("cpu"))
    with torch.cuda.device(x.device):
        copied = x.detach().to("cpu", non_blocking=True)
        done = torch.cuda.current_stream().record_event()
    return HostCopy(copied, done)


@dataclass(frozen=True)
class NumberCopies:
    """Single numbers of several devices on their way to the host."""

    _parts: tuple[tuple[list[int], HostCopy], ...]

    def wait(self) -> list[Tensor]:
        copied = ((places, copy.wait().unbind()) for places, copy in self._parts)
        found = {at: number for places, numbers in copied for at, number in zip(places, numbers, strict=True)}
        return [found[at] for at in range(len(found))]


def begin_copies(numbers: Sequence[Tensor]) -> NumberCopies:
    """Start copying tensors of one number each, those of a device in one transfer."""
    by_device: dict[torch.device, list[int]] = {}
    for at, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(at)
    parts = ((places, begin_copy(torch.stack([numbers[at] for at in places]))) for places in by_device.values())
    return NumberCopies(tuple(parts))
