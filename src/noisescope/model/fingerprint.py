"""A fingerprint of a model's config and numbers that does not depend on where it is stored or on which device."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput

_BLOCK = 1 << 22
_IGNORED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "_attn_implementation")


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the config, and names, shapes, dtypes and exact checksums of all parameters and buffers.

    The checksum of a tensor is two sums over its bit patterns, in wrapping int64: plain, and weighted by position.
    Integer sums are the same on every device, and one pass over the weights is all they take.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), *_sums(tensor))).encode())
    return digest.hexdigest()


def _settings(model: nn.Module) -> dict[str, Any]:
    """The config without paths and versions: a sliding window, an epsilon, experts per token."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name: value for name, value in found.items() if name not in _IGNORED}


@torch.no_grad()
def _sums(tensor: Tensor) -> tuple[int, int]:
    if tensor.device.type == "meta":
        raise InvalidInput(
            "some weights are offloaded (on the meta device), so the model can't be told from another: choose a device "
            "map that keeps all weights on devices, or load the model on the CPU"
        )
    if tensor.numel() == 0:
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
