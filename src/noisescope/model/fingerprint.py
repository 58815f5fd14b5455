"""Identifies a model (a fingerprint of config and values), and says where another process can load it from."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.model.forwards import device_of
from noisescope.model.loading import Subject, load
from noisescope.model.streaming import StreamedForward

_BLOCK = 1 << 22
_IGNORED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "_attn_implementation")


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the config, and names, shapes, dtypes and exact checksums of all parameters and buffers.

    The checksum of a tensor is two sums over its bit patterns, in wrapping int64: plain, and weighted by position.
    Integer sums are the same on every device, and one pass over the weights is all they take.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    device = device_of(model)  # summed there: of a streamed model, most weights are on the host
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), *_sums(tensor, device))).encode())
    return digest.hexdigest()


def _settings(model: nn.Module) -> dict[str, Any]:
    """The config without paths and versions: a sliding window, an epsilon, experts per token."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name: value for name, value in found.items() if name not in _IGNORED}


@torch.no_grad()
def _sums(tensor: Tensor, device: torch.device) -> tuple[int, int]:
    if tensor.device.type == "meta":
        raise InvalidInput(
            "some weights are offloaded (on the meta device), so the model can't be identified: leave the device map "
            "out and stream the blocks from the host's memory or the checkpoint (--stream host, --stream disk)"
        )
    if tensor.numel() == 0:
        return 0, 0
    flat = tensor.detach().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(width) if flat.dtype != torch.bool else flat.to(torch.uint8)
    plain = weighted = 0
    for start in range(0, bits.numel(), _BLOCK):
        part = bits[start : start + _BLOCK]
        part = (part.to(device) if part.device.type == "cpu" else part).to(torch.int64)
        place = torch.arange(1, part.numel() + 1, device=part.device)
        plain += int(part.sum())
        weighted += int((part * place).sum()) * (start // _BLOCK + 1)
    return plain, weighted


# Where another process gets the model from: a path and the arguments of `load`, never a model object.
#
# A wrapped model is written once as safetensors and read back for a check, or refused with the reason.


ACCELERATORS = ("cuda", "xpu", "mps", "npu", "hpu")


@dataclass(frozen=True)
class Source:
    """Enough to load a subject again, wherever the path is readable."""

    path: str
    loading: Mapping[str, Any]  # keyword arguments of `load`

    def load(self) -> Subject:
        return load(self.path, **self.loading)


def source_of(subject: Subject, fingerprint: str, folder: Callable[[], Path]) -> Source:
    """The subject's source; a wrapped model is saved to `folder()/model`, or found there from an earlier run."""
    altered = _alteration(subject.model)
    if altered:
        raise _refused(altered)
    if subject.loading is not None:
        path = subject.source
        if path != "demo" and not path.startswith("tiny:") and Path(path).expanduser().exists():
            path = str(Path(path).expanduser().absolute())  # a worker has a working directory of its own
        return Source(path, _renumbered(subject.loading, accelerators(subject.model)))
    attention = getattr(getattr(subject.model, "config", None), "_attn_implementation", None)
    source = Source(str((folder() / "model").absolute()), {"device": "cpu", "attn_implementation": attention})
    if not Path(source.path).exists():
        _write(subject, Path(source.path))
    try:
        found = source.load().model
    except NoisescopeError as error:
        raise _refused(f"it can't be loaded from {source.path}: {error}") from error
    if model_fingerprint(found) != fingerprint:
        raise _refused(
            f"loading {source.path} gives a different model ({_difference(found, subject.model)}). Either the "
            f"folder already held another model, or saving does not preserve this one: load it in its dtype instead "
            f"of casting it"
        )
    return Source(source.path, {**source.loading, **_placement(subject.model)})


def accelerators(model: nn.Module) -> list[torch.device]:
    """The accelerators that hold weights, in order."""
    return sorted({p.device for p in model.parameters() if p.device.type in ACCELERATORS}, key=lambda d: d.index or 0)


def _alteration(model: nn.Module) -> str:
    """Changes to a model that can't be saved, or "". Hooks of transformers and accelerate come with loading."""
    for name, module in model.named_modules():
        where = name or "the model itself"
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        makers = [str(getattr(hook, "__module__", "")) for kind in kinds for hook in kind.values()]
        if any(not maker.startswith(("transformers.", "accelerate.")) for maker in makers):
            return f"hooks are registered on {where} and can't be saved: remove them first"
        forward = vars(module).get("forward")
        if forward == MethodType(type(module).forward, module):  # a copy that was made inside a scope
            continue
        ours = isinstance(forward, StreamedForward) or (
            hasattr(module, "_hf_hook") and isinstance(forward, functools.partial)
        )
        if forward is not None and not ours:
            return f"the forward of {where} is replaced (by an open noisescope scope?) and can't be saved: restore it"
    return ""


def _difference(there: nn.Module, here: nn.Module) -> str:
    """The first difference between two models."""
    if type(there).__name__ != type(here).__name__:
        return f"a {type(there).__name__}, not a {type(here).__name__}"
    theirs, ours = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (there, here))
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs or name not in ours:
            return f"only one of them has {name}"
        mine, other = ours[name].detach().cpu(), theirs[name].detach().cpu()
        if mine.dtype != other.dtype:
            return f"{name} is {other.dtype}, not {mine.dtype}"
        if not torch.equal(mine, other):
            return f"{name} has different values"
    return "in the bits of its values"


def _write(subject: Subject, target: Path) -> None:
    """Save model and tokenizer completely or not at all: they are written elsewhere and moved."""
    model: Any = subject.model
    if not hasattr(model, "save_pretrained"):
        raise _refused(f"{type(model).__name__} has no save_pretrained, so it can't be written as safetensors")
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise _refused("it is quantised, and packed weights can't be saved again: use noisescope.load on its folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".being-written-") as partial:
        try:
            model.save_pretrained(Path(partial) / "model")
            if subject.tokenizer is not None:
                subject.tokenizer.save_pretrained(Path(partial) / "model")
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise _refused(f"writing it failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
        (Path(partial) / "model").rename(target)


def _refused(reason: str) -> InvalidInput:
    return InvalidInput(f"this model can't be sent to Ray workers: {reason}. Or use --executor local")


def _renumbered(loading: Mapping[str, Any], devices: list[torch.device]) -> dict[str, Any]:
    """A worker sees only its own accelerators, numbered from 0: cuda:3 here is cuda:0 there."""
    numbers = {device.index or 0: number for number, device in enumerate(devices)}

    def there(place: Any) -> Any:
        if isinstance(place, int):
            return numbers.get(place, place)
        kind, _, index = str(place).partition(":")
        return f"{kind}:{numbers.get(int(index), index)}" if kind in ACCELERATORS and index.isdigit() else str(place)

    placed = loading.get("device_map")
    if isinstance(placed, Mapping):
        placed = {name: there(place) for name, place in placed.items()}
    elif placed is not None:  # "auto", or one device for all
        placed = there(placed)
    return {**loading, "device": there(loading["device"]), "device_map": placed}


def _placement(model: nn.Module) -> dict[str, Any]:
    """`load`'s device and device_map for a model that is already placed."""
    devices = accelerators(model)
    placed = getattr(model, "hf_device_map", None) if len(devices) > 1 else None
    return _renumbered({"device": devices[0].type if devices else "cpu", "device_map": placed}, devices)
