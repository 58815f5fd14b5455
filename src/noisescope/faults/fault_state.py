"""The state of a broken unit: a stream of random numbers, a channel mask, and memory between calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.faults.fault import Channels, Fault, Lanes
from noisescope.probe.recorded_call import RecordedCall

_PIECE = 1 << 16  # masks are drawn in pieces of one length, so that a wider tensor's mask begins like a narrower one's


class Stream:
    """The random numbers of one fault in one scope: it has its own generators and never touches the caller's state.

    Noise comes from `torch.Generator(device).manual_seed(seed)` in the order of calls; masks and coins have streams of
    their own, so that a sparse fault draws the same noise as a dense one.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._generators: dict[torch.device, torch.Generator] = {}
        self._coins = torch.Generator("cpu").manual_seed(_derived(fault.seed, "coins"))
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.fault.seed)
        return self._generators[device]

    def acts(self) -> bool:
        """Whether the fault acts in this call, by its rate; decided on the host."""
        rate = self.fault.rate
        return rate >= 1 or float(torch.rand((), generator=self._coins, device="cpu")) < rate

    def mask(self, width: int, device: torch.device) -> Tensor | None:
        """Which of `width` channels are faulty, the same in every call; None means all."""
        if self.fault.channels is None:
            return None
        known = (width, device)
        if known not in self._masks:
            self._masks[known] = _mask(self.fault.channels, width, self.fault.seed).to(device)
        return self._masks[known]


class Memory:
    """What one site of a fault remembers between calls."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kept: dict[str, Tensor] = {}

    def generator(self, like: Tensor) -> torch.Generator:
        return self.stream.generator(like.device)

    def normal(self, like: Tensor, shape: tuple[int, ...] | torch.Size | None = None) -> Tensor:
        """z ~ N(0, 1) in the shape of `like` (or another), in the wide dtype of its arithmetic."""
        return self._drawn(torch.randn, like, shape)

    def uniform(self, like: Tensor, shape: tuple[int, ...] | torch.Size | None = None) -> Tensor:
        """u ~ U(0, 1), as `normal`."""
        return self._drawn(torch.rand, like, shape)

    def _drawn(self, draw: Callable[..., Tensor], like: Tensor, shape: tuple[int, ...] | torch.Size | None) -> Tensor:
        size = like.shape if shape is None else shape
        return draw(size, generator=self.generator(like), device=like.device, dtype=wide_dtype(like))

    def mask(self, width: int, device: torch.device) -> Tensor | None:
        return self.stream.mask(width, device)

    def first(self, name: str, value: Tensor) -> Tensor:
        """`value` as it was on the first request."""
        return self.kept.setdefault(name, value)


def faulty_output(fault: Fault, y: Tensor, call: RecordedCall, memory: Memory) -> Tensor:
    """The output of a fault for y: faulty values on its channels, those of y elsewhere."""
    new = fault.act(y, call, memory)
    mask = None if fault.places_itself or y.dim() == 0 else memory.mask(y.shape[-1], y.device)
    return new if mask is None else torch.where(mask, new, y)


def wide_dtype(y: Tensor) -> torch.dtype:
    """Faults compute in float32 (float64 for a float64 tensor) and round once, to the tensor's own dtype."""
    return torch.float64 if y.dtype == torch.float64 else torch.float32


def wide(y: Tensor) -> Tensor:
    return y.to(wide_dtype(y))


def exact_dtype(y: Tensor) -> torch.dtype:
    """The dtype of recomputations: float64, or float32 on a device without it."""
    return torch.float32 if y.device.type == "mps" else torch.float64


def reference_size(y: Tensor, relative_to: str) -> Tensor:
    """What a magnitude is relative to, a number of the whole tensor: max |y|, std (n - 1), mean |y|, rms, or 1."""
    x = wide(y)
    if relative_to == "max":
        return x.abs().max()
    if relative_to == "std":
        return x.std()
    if relative_to == "mean_abs":
        return x.abs().mean()
    return x.square().mean().sqrt() if relative_to == "rms" else x.new_ones(())


def _derived(seed: int, what: str) -> int:
    """A seed for another stream of the same fault."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {what}".encode(), digest_size=7).digest(), "little")


def _mask(channels: Channels, width: int, seed: int) -> Tensor:
    if isinstance(channels, float):
        own, count = torch.Generator("cpu").manual_seed(_derived(seed, "mask")), -(-width // _PIECE)
        pieces = [torch.rand(_PIECE, generator=own, dtype=torch.float64, device="cpu") for _ in range(count)]
        return torch.cat(pieces)[:width] < channels
    mask = torch.zeros(width, dtype=torch.bool, device="cpu")
    if isinstance(channels, Lanes):
        mask[channels.offset :: channels.period] = True
    elif channels is not None:
        if channels[-1] >= width:
            raise InvalidInput(f"channel {channels[-1]} is out of range: the tensor has {width} channels")
        mask[list(channels)] = True
    return mask
