"""Runs a model on token ids: in evaluation mode, on its own device, in one forward or token by token."""

from __future__ import annotations

import inspect
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, NoisescopeError

Prompts = tuple[tuple[int, ...], ...]  # token ids
_OF_POSITIONS = re.compile(r"pos|wpe|type|segment")  # in names of tables that take no token ids


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module has the mode it had, also where entering fails half-way.

    A model may be in mixed modes (a frozen backbone in eval mode, a head in train mode), so each module's flag is
    kept: `model.train()` would put all of them into one mode. The flags are set directly, because models override
    `train` and `eval` to do more than that, which could not be undone here. Gradient mode is left to the caller.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            if module.training != training:  # a module that refused to change is not asked again
                module.training = training


@contextmanager
def made_inputs(model: nn.Module, *, made: bool = True) -> Iterator[None]:
    """A forward on inputs that were made for the model: what it raises says that it needs others."""
    try:
        yield
    except (NoisescopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not made:
            raise
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
        raise InvalidInput(
            f"{type(model).__name__} can't run on the inputs made for it ({words}): pass inputs={{...}}, the arguments "
            "of one forward"
        ) from error


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Arguments of a forward that keeps no key-value cache, which calls made twice would fill twice."""
    wrapper: Any = model
    inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward takes anything
    return {"use_cache": False} if "use_cache" in inspect.signature(inner.forward).parameters else {}


def embeddings_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The input and output embeddings that a transformers model names; a class may refuse to name either."""

    def asked(name: str) -> nn.Module | None:
        try:
            found = getattr(model, name)()
        except (AttributeError, NotImplementedError, TypeError):
            return None
        return found if isinstance(found, nn.Module) else None

    return asked("get_input_embeddings"), asked("get_output_embeddings")


def input_device(model: nn.Module) -> torch.device:
    """The device for token ids: that of the embedding (with a device map the rest may be elsewhere)."""
    weight = getattr(embeddings_of(model)[0], "weight", None)
    return weight.device if isinstance(weight, Tensor) else next(model.parameters()).device


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def device_name(model: nn.Module) -> str:
    """For people: the name of the card, or the kind of host."""
    device = device_of(model)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def dtype_of(model: nn.Module) -> str:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def vocabulary_size(model: nn.Module) -> int | None:
    """How many token ids the model accepts; None if its config, or that of its text part, does not say."""
    config: Any = getattr(model, "config", None)
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    sizes = (getattr(one, "vocab_size", None) for one in configs)
    return next((size for size in sizes if isinstance(size, int)), None)


def sliding_window(model: nn.Module) -> int | None:
    """The widest window of sliding attention, by the config; layers may each have their own."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        sizes = [getattr(config, "sliding_window", None)]
    except Exception:  # transformers refuses to name one window where layers differ, with an error of its own
        layers = config.per_layer_config
        layers = layers.values() if hasattr(layers, "values") else layers
        sizes = [getattr(layer, "sliding_window", None) for layer in layers]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def safe_vocabulary(model: nn.Module) -> int | None:
    """Token ids that every table accepts; without a config the smallest that is not of positions. None if unknown."""
    if getattr(model, "config", None) is not None:
        return vocabulary_size(model)
    tables = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
    named = [one.num_embeddings for name, one in tables if not _OF_POSITIONS.search(name)]
    return min(named, default=None)


def check_vocabulary(model: nn.Module, prompts: Prompts, what: str) -> None:
    """Reject token ids without an embedding, before a device fails on them."""
    size = vocabulary_size(model)
    if size is None:
        return
    beyond = [i for ids in prompts for i in ids if not 0 <= i < size]
    if beyond:
        raise InvalidInput(
            f"{what} contains token id {beyond[0]}, but {type(model).__name__} accepts ids 0 to {size - 1}: "
            f"tokenise with "
            "the model's own tokenizer"
        )


def last_token_logits(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Run token ids [B, T]: the last token's logits [B, V], or None where the model gives no [B, T, V]."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        y: Any = model(input_ids=ids, decoder_input_ids=ids)
    else:
        y = model(ids)
    logits = getattr(y, "logits", y)
    return logits[:, -1].detach() if isinstance(logits, Tensor) and logits.dim() == 3 else None


@torch.no_grad()
def stepwise_logits(model: nn.Module, ids: Sequence[int], first: int) -> Tensor:
    """Logits [len(ids) - first, V] that predict ids[first:], one forward per token as in generation.

    Forward 0 reads ids[:first] at once, forward i the token ids[first + i - 1] alone, with what was kept of those
    before it: an error in one of them stays in the cache.
    """
    tokens = torch.tensor([list(ids)], device=input_device(model))
    with evaluating(model):
        out = model(input_ids=tokens[:, :first], use_cache=True)
        if getattr(out, "past_key_values", None) is None:
            raise InvalidInput(f"{type(model).__name__} keeps no cache, so it can't decode token by token")
        rows = [out.logits[:, -1]]
        for at in range(first, len(ids) - 1):
            out = model(input_ids=tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[:, -1])
    return torch.cat(rows)
