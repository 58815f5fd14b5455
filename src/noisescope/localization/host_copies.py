"""Copies on the host of a model's modules, and of the tensors and objects it passes along."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.classes_from_disk import as_on_disk, restore_code
from noisescope.localization.tensors import INTEGERS, bits_of

_MOST_WAITING = 1 << 28  # bytes of locked memory


class HostStates:
    """The host's copies of tensors, and one counterpart for each object that the model changes.

    The counterpart of a cache, for example, is created when the object first occurs, and from then on only the host's
    code changes it. What a cache later returns on the device is thus compared with what was written into it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # the device's object is kept, so that its id stays its own
        self._copies = HostCopies()

    def on_host(self, value: Any) -> Any:
        """A tree of arguments with its tensors copied to the host and its objects replaced by their counterparts.

        The copies may be used only after `settle`.
        """
        with torch._C.DisableTorchFunction():  # a function mode of the caller's is for the model
            return mapped(value, each_once(self._copies.copy), self._counterpart)

    def settle(self) -> None:
        self._copies.settle()

    def _counterpart(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not is_state(value):
            return value
        if id(value) not in self._known:
            try:
                counterpart = host_copy(value)
                restore_code(counterpart)
            except Exception:  # what can't be copied the host's code can't use: then that code is not judged
                counterpart = object()
            self._known[id(value)] = (value, counterpart)
        return self._known[id(value)][1]

    def adopt(self, *, keys: bool) -> None:
        """Take over the device's recurrent states if the host's differ by round-off, which would grow each step.

        Keys and values are copied and never computed with, so they must equal what was written; unless `keys` says that
        the host did not write the same bits.
        """
        for value, counterpart in self._known.values():
            _adopt(value, counterpart, 4, keys)


def _adopt(value: Any, counterpart: Any, depth: int, keys: bool) -> None:
    theirs, mine = _slots(value), _slots(counterpart)
    if depth < 0 or theirs is None or mine is None:
        return
    for name, its in theirs:
        own = dict(mine).get(name)
        if not keys and ("key" in str(name) or "value" in str(name)):
            continue
        if not isinstance(its, Tensor) or not isinstance(own, Tensor):
            _adopt(its, own, depth - 1, keys)
        elif its.is_floating_point() and its.shape == own.shape and not isinstance(counterpart, tuple):
            here = copied(its)
            error, size = (here.double() - own.double()).abs(), own.double().square().mean().sqrt()
            if bool((error <= math.sqrt(torch.finfo(own.dtype).eps) * size).all()):
                (counterpart if isinstance(counterpart, (list, dict)) else vars(counterpart))[name] = here


def _slots(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a list, mapping or object, by index, key or attribute."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    return list(vars(value).items()) if hasattr(value, "__dict__") else None


class HostCopies:
    """Copies of the tensors of one forward.

    A tensor that one call returns and others receive is stored once, if its bits are the same. CUDA tensors are copied
    to pinned memory in stream order, so nothing waits until that memory is reused.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}  # the last copy from a place in memory
        self._waiting: list[tuple[tuple[Any, ...], Tensor]] = []
        self._bytes = 0

    def copy(self, x: Tensor) -> Tensor:
        x = x.detach()
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and x.dtype.itemsize in INTEGERS
        if not plain or x.is_meta:
            return copied(x)
        key = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride())
        if x.device.type != "cuda":
            return self._shared(key, x if x.device.type == "cpu" else x.to("cpu"))
        here = x.to("cpu", non_blocking=True)
        self._waiting.append((key, here))
        self._bytes += here.nbytes
        if self._bytes > _MOST_WAITING:
            self._fetch()
        return here

    def settle(self) -> None:
        """Wait until all copies are complete, and forget their sources, whose memory may be reused."""
        self._fetch()
        self._held.clear()

    def _fetch(self) -> None:
        for device in {key[0] for key, _ in self._waiting}:
            torch.cuda.synchronize(device)
        for key, here in self._waiting:
            here.data = self._shared(key, here)  # ordinary memory in place of the locked one
        self._waiting.clear()
        self._bytes = 0

    def _shared(self, key: tuple[Any, ...], x: Tensor) -> Tensor:
        held = self._held.get(key)
        if held is None or not x.is_contiguous() or not torch.equal(bits_of(held), bits_of(x)):
            held = self._held[key] = x.clone()
        return held


def copied(x: Tensor) -> Tensor:
    """A tensor's copy on the host, available immediately."""
    x = x.detach()
    return x.clone() if x.device.type == "cpu" else x.to("cpu")


def each_once(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One copy per tensor, reused where the tensor occurs again: code may test `query is key`, or write in place."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def copy_of(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = (x, make(x))  # the first is kept, so that its id stays its own
        return made[id(x)][1]

    return copy_of


def is_state(value: Any) -> bool:
    """Whether a value is an object with attributes that a model may change."""
    if isinstance(value, (type, nn.Module, torch.dtype, torch.device)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__name__.lower().find("config") < 0


def mapped(value: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """A tree of tuples, lists and mappings with its tensors and its other leaves replaced."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, tensor, other) for each in value))
    if type(value) is list or isinstance(value, tuple):  # tuples of torch's own, as of a sort, too
        return type(value)([mapped(each, tensor, other) for each in value])
    if isinstance(value, Mapping) and isinstance(value, dict):
        new = copy.copy(value)
        for key, each in value.items():
            new[key] = mapped(each, tensor, other)
        return new
    return other(value)


def leaves_in(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree (no tuples, lists or mappings), each with its path ("0", "position_embeddings.1")."""
    if isinstance(value, (tuple, list)):
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    else:
        return [(path, value)]
    found: list[tuple[str, Any]] = []
    for key, each in parts:
        here = f"{path}.{key}" if path else str(key)
        if isinstance(each, (tuple, list, dict)):
            found += leaves_in(each, here)
        else:
            found.append((here, each))
    return found


def plain_values(value: Any, *, words: bool = False) -> dict[str, Any]:
    """The leaves of a tree by path: numbers and flags (`words`: strings too), and the type of anything else."""
    found: dict[str, Any] = {}
    for path, leaf in leaves_in(value):
        if isinstance(leaf, (bool, int, float)) or (words and isinstance(leaf, str)):
            found[path] = leaf
        elif leaf is not None and not isinstance(leaf, (str, torch.device)):  # names of devices are not the same
            found[path] = "a tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
    return found


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree, each with its path in it."""
    return ((path, leaf) for path, leaf in leaves_in(value) if isinstance(leaf, Tensor))


def real_tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree; complex ones as pairs of real numbers."""
    return ((path, torch.view_as_real(x.resolve_conj()) if x.is_complex() else x) for path, x in tensors_in(value))


def host_copy(value: Any) -> Any:
    """A deep copy whose tensors are all on the host."""
    memo: dict[int, Any] = {}
    for x in _tensors_of(value, 8, set()):
        memo[id(x)] = copied(x)
    return copy.deepcopy(value, memo)


def _tensors_of(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that an object holds, in its attributes and in theirs."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        for each in value:
            yield from _tensors_of(each, depth - 1, seen)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_of(each, depth - 1, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors_of(vars(value), depth - 1, seen)


# -- modules


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OWN_FORWARDS = ("forward", "_hf_hook", "_old_forward")  # the last two are accelerate's


def own_state(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The state that a module's code may change: buffers, tensors, numbers, and the buffers of its children.

    Fake quantisation, for one, writes to an observer that it does not call.
    """
    plain = (bool, int, float, Tensor)
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, plain)}
    found = {"own": own, "": _buffers_of(module)}
    found |= {name: _buffers_of(child) for name, child in module.named_children() if child._buffers}
    return mapped(found, Tensor.clone)  # type: ignore[no-any-return]


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module._buffers.items() if value is not None}


def set_state(module: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    state = mapped(state, Tensor.clone)
    vars(module).update(state.pop("own"))
    for name, buffers in state.items():
        (module._modules[name] if name else module)._buffers.update(buffers)  # type: ignore[union-attr]


@contextlib.contextmanager
def offloaded_weights(model: nn.Module) -> Iterator[None]:
    """The weights that accelerate keeps on the host or on disk, in their places: between forwards they are nowhere.

    Not for a forward: its hooks expect what they left.
    """
    moved: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            kept: Mapping[str, Tensor] = getattr(vars(module).get("_hf_hook"), "weights_map", None) or {}
            for name, value in module._parameters.items():
                if value is not None and value.is_meta and name in kept:
                    moved.append((module, name, value))
                    module._parameters[name] = nn.Parameter(kept[name], requires_grad=False)
        yield
    finally:
        for module, name, value in moved:
            module._parameters[name] = value


class HostParameters(dict[str, Any]):
    """Parameters by name, copied to the host on demand; iterating over all shows only shapes and dtypes."""

    was_read = False
    source: Callable[[Tensor], Tensor] | None = None  # what stands for a parameter of the model, where asked for

    def __getitem__(self, name: str) -> Any:
        self.was_read = True
        value = super().__getitem__(name)
        if self.source is not None and value is not None:
            return self.source(value)
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
    """Every module by name, without hooks or instance-level forwards, with its buffers on the host."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(p): p for p in module._parameters.values() if p is not None}
        memo |= {id(b): b.detach().to("cpu", copy=True) for b in module._buffers.values() if b is not None}
        attributes = vars(module)
        memo |= {id(attributes[name]): _torchs_own(name, attributes[name]) for name in _HOOKS if name in attributes}
        memo |= {id(attributes[name]): None for name in _OWN_FORWARDS if name in attributes}
        memo |= {id(x): copied(x) for x in attributes.values() if isinstance(x, Tensor)}
    try:
        twin = copy.deepcopy(model, dict(memo))
    except Exception:  # of a lock, a file, a handle: code that uses one can't be run on the host, other code can
        memo |= {id(value): object() for module in model.modules() for value in _not_copied(module, memo)}
        twin = copy.deepcopy(model, memo)
    names = [name for name, _ in model.named_modules()]
    found = dict(twin.named_modules())
    for module in found.values():
        give_code_from_disk(module, _without_call_wrapper(type(module)))
        own: dict[str, Any] = module.__dict__
        own["_parameters"] = HostParameters(own["_parameters"])
    return {name: found[name] for name in names}


def _torchs_own(name: str, hooks: dict[int, Any]) -> dict[int, Any]:
    """Of forward hooks those of torch, which are part of the model: quantisation-aware training rounds outputs so."""
    kept = hooks if name == "_forward_hooks" else {}
    return type(hooks)((k, hook) for k, hook in kept.items() if getattr(hook, "__module__", "").startswith("torch."))


class _Uncompiled(nn.Module):
    """In place of torch.compile's module, which has no code of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self._modules["_orig_mod"]
        return inner(*args, **kwargs)


def _without_call_wrapper(cls: type) -> type:
    """The class below one that only wraps `__call__`: like a hook, such a wrapper runs around the model's own code."""
    if (cls.__module__, cls.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule"):
        return _Uncompiled
    own = {name for name, value in vars(cls).items() if callable(value)}
    return cls.__bases__[0] if own == {"__call__"} and len(cls.__bases__) == 1 else cls


def give_code_from_disk(module: nn.Module, cls: type) -> None:
    """Make a copy an instance of a class as its file defines it, without methods that were put on the instance."""
    own = vars(module)
    for name in [name for name, value in own.items() if _shadows(cls, name, value)]:
        del own[name]
    module.__class__ = as_on_disk(cls)


def _shadows(cls: type, name: str, value: Any) -> bool:
    return name == "forward" or (callable(value) and not isinstance(value, type) and callable(getattr(cls, name, None)))


def _not_copied(module: nn.Module, memo: dict[int, Any]) -> Iterator[Any]:
    """The attributes of a module that can't be copied."""
    for name, value in vars(module).items():
        if name[0] == "_" or id(value) in memo:
            continue
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            yield value
