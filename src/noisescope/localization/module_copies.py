"""Copies of a model's modules for the host twin: their code and state, without weights, hooks and patched forwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.call_tree import mapped
from noisescope.localization.host_code import as_on_disk

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OWN_FORWARDS = ("forward", "_hf_hook", "_old_forward")  # the last two are accelerate's


def own_state(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What a module's code may change in it: buffers, tensors, numbers."""
    plain = (bool, int, float, Tensor)
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, plain)}
    found = {"own": own, "buffers": {name: value for name, value in module._buffers.items() if value is not None}}
    return mapped(found, Tensor.clone)  # type: ignore[no-any-return]


def set_state(module: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    state = mapped(state, Tensor.clone)
    vars(module).update(state["own"])
    module._buffers.update(state["buffers"])


class HostParameters(dict[str, Any]):
    """Parameters by name, copied to the host when code asks for one; asked for all, it shows shapes and dtypes."""

    was_read = False

    def __getitem__(self, name: str) -> Any:
        self.was_read = True
        value = super().__getitem__(name)
        return value if value is None or value.device.type == "cpu" else nn.Parameter(value.detach().to("cpu"), False)

    def values(self) -> Any:
        return [None if value is None else _hollow(value) for value in super().values()]

    def items(self) -> Any:
        return list(zip(self, self.values(), strict=True))


def _hollow(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    return torch.empty((), dtype=value.dtype).expand(value.shape)


def copied_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by name, without hooks and without forwards of its own, its buffers on the host."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(p): p for p in module._parameters.values() if p is not None}
        memo |= {id(b): b.detach().to("cpu", copy=True) for b in module._buffers.values() if b is not None}
        attributes = vars(module)
        memo |= {id(attributes[name]): type(attributes[name])() for name in _HOOKS if name in attributes}
        memo |= {id(attributes[name]): None for name in _OWN_FORWARDS if name in attributes}
    try:
        twin = copy.deepcopy(model, dict(memo))
    except Exception:  # of a lock, a file, a handle: code that uses one can't be run on the host, other code can
        memo |= {id(value): object() for module in model.modules() for value in _not_copied(module, memo)}
        twin = copy.deepcopy(model, memo)
    names = [name for name, _ in model.named_modules()]
    found = dict(twin.named_modules())
    for module in found.values():
        own: dict[str, Any] = module.__dict__
        own.pop("forward", None)
        own["_parameters"] = HostParameters(own["_parameters"])
        for name, value in own.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                own[name] = value.detach().to("cpu")
        module.__class__ = as_on_disk(type(module))
    return {name: found[name] for name in names}


def _not_copied(module: nn.Module, memo: dict[int, Any]) -> Iterator[Any]:
    """The attributes of a module that can't be copied."""
    for name, value in vars(module).items():
        if name[0] == "_" or id(value) in memo:
            continue
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            yield value
