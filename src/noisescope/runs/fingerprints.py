"""What a model is, by its numbers: a fingerprint that does not depend on where it lies or on which device."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_BLOCK = 1 << 22


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and exact checksums of all parameters and buffers.

    The checksum of a tensor is two sums over its bit patterns, in wrapping int64: plain, and weighted by position.
    Integer sums are the same on every device, and one pass over the weights is all they take.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), *_sums(tensor))).encode())
    return digest.hexdigest()


@torch.no_grad()
def _sums(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    flat = tensor.detach().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(width) if flat.dtype != torch.bool else flat.to(torch.uint8)
    plain = weighted = 0
    for start in range(0, bits.numel(), _BLOCK):
        part = bits[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(1, part.numel() + 1, device=part.device)
        plain += int(part.sum())
        weighted += int((part * place).sum()) * (start // _BLOCK + 1)
    return plain, weighted
