"""A model run on token ids as it is: its device, its dtype, its vocabulary, the last token's logits."""

from __future__ import annotations

import inspect
import platform
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput

Prompts = tuple[tuple[int, ...], ...]  # token ids


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Arguments of a forward that keeps no key-value cache, which calls made twice would fill twice."""
    wrapper: Any = model
    inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward takes anything
    return {"use_cache": False} if "use_cache" in inspect.signature(inner.forward).parameters else {}


def input_device(model: Any) -> torch.device:
    """Where token ids go: the device of the embedding (with a device map the rest may lie elsewhere)."""
    try:
        where: torch.device = model.get_input_embeddings().weight.device
        return where
    except (AttributeError, NotImplementedError):
        first: torch.device = next(iter(model.parameters())).device
        return first


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def device_name(model: nn.Module) -> str:
    """For people: the card's own name, or the kind of host."""
    device = device_of(model)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def dtype_of(model: nn.Module) -> str:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def vocabulary_of(model: nn.Module) -> int | None:
    """How many token ids the model knows; None where it does not tell."""
    found: int | None = getattr(getattr(model, "config", None), "vocab_size", None)
    return found


def check_vocabulary(model: nn.Module, prompts: Prompts, what: str) -> None:
    """Refuse token ids that the model has no embedding for, before a device stumbles over them."""
    size = vocabulary_of(model)
    if size is None:
        return
    beyond = [i for ids in prompts for i in ids if not 0 <= i < size]
    if beyond:
        raise InvalidInput(
            f"{what} holds token id {beyond[0]}, but {type(model).__name__} knows ids 0 to {size - 1}: tokenise with "
            "the model's own tokenizer"
        )


def last_of(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Run token ids [B, T]: the last token's logits [B, V], or None where the model gives no [B, T, V]."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        y: Any = model(input_ids=ids, decoder_input_ids=ids)
    else:
        y = model(ids)
    logits = getattr(y, "logits", y)
    return logits[:, -1].detach() if isinstance(logits, Tensor) and logits.dim() == 3 else None
