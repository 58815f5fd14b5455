"""How many samples fit: measures take as many at once as their memory allows, estimated from the model's shapes.

What an estimate misses is caught later: where memory runs out, the runner halves its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import vocabulary_size
from noisescope.model.streaming import StreamedForward

GIB = 1 << 30
MARGIN = 0.1  # of what is free: fragments, and what kernels need for themselves
GRADIENTS = 6 * GIB  # for gradients of a batch: more at once are hardly quicker
_STREAMED_BLOCKS = 3  # whose weights are on the device at once


@dataclass(frozen=True)
class Footprint:
    """Bytes that tokens of a model take, by its shapes: generous, since implementations differ."""

    logits: int  # of a token
    hidden: int  # one block's output for a token
    widths: int  # numbers that the linears of a block give and take for a token
    heads: int
    blocks: int
    element: int
    streamed: int = 0  # bytes of streamed weights that are on the device; 0: all are

    def kept(self, tokens: int) -> int:
        """The clean logits and block outputs of a slice."""
        return tokens * (self.logits + self.blocks * self.hidden)

    def forward(self, length: int) -> int:
        """One sample in a forward, its logits apart."""
        return length * (2 * self.widths * self.element + 2 * self.hidden) + self._pairs(length, 2)

    def gradients(self, length: int) -> int:
        """One sample in a backward that computes its blocks again."""
        block = length * self.widths * (3 * self.element + 8) + self._pairs(length, 3)
        return block + length * (2 * self.logits + self.blocks * self.hidden)

    def _pairs(self, length: int, copies: int) -> int:
        """Attention's scores, opened, with float32 copies."""
        return self.heads * length * length * copies * (self.element + 4)


def footprint(model: nn.Module, anatomy: Anatomy) -> Footprint:
    blocks = [model.get_submodule(name) for name in anatomy.blocks]
    matrices = [[p for p in block.parameters() if p.dim() > 1] for block in blocks]
    config: Any = getattr(model, "config", None)
    element = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    streamed = any(isinstance(vars(block).get("forward"), StreamedForward) for block in blocks)
    return Footprint(
        logits=(vocabulary_size(model) or 0) * element,
        hidden=max((min(p.shape[-2:]) for ps in matrices for p in ps), default=0) * element,
        widths=max((sum(max(p.shape[-2:]) for p in ps) for ps in matrices), default=0),
        heads=int(getattr(config, "num_attention_heads", None) or 0),
        blocks=len(blocks),
        element=element,
        streamed=_STREAMED_BLOCKS * max(sizes, default=0) if streamed else 0,
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, what torch holds and does not use included; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration, ValueError):
        return None


@dataclass(frozen=True)
class Room:
    """Memory beside the weights, and what fits into it."""

    bytes: int | None  # None: not known, so everything fits
    needs: Footprint

    @classmethod
    def on(cls, model: nn.Module, anatomy: Anatomy, device: torch.device, gib: float | None) -> Room:
        """As given, or what is free less a margin."""
        free = free_memory(device)
        found = int(gib * GIB) if gib is not None else None if free is None else int(free * (1 - MARGIN))
        return cls(found, footprint(model, anatomy))

    def keeps_blocks(self, tokens: int) -> bool:
        """Whether the block outputs of a slice may be stored: they leave a fifth of the memory."""
        return self.bytes is None or self.needs.kept(tokens) + self.needs.streamed <= 0.8 * self.bytes

    def forwards(self, length: int, kept: int) -> int | None:
        """Samples of a length in one forward beside `kept` bytes; None: any number."""
        return self._fits(self.needs.forward(length), kept, None)

    def gradients(self, length: int, kept: int) -> int | None:
        """Samples of a length in one backward. Streamed weights are worth all the memory: each batch copies them."""
        return self._fits(self.needs.gradients(length), kept, None if self.needs.streamed else GRADIENTS)

    def _fits(self, each: int, kept: int, most: int | None) -> int | None:
        if self.bytes is None:
            return None
        left = self.bytes - kept - self.needs.streamed
        return max(1, (left if most is None else min(left, most)) // max(each, 1))
