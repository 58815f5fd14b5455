"""Functions of torch and transformers that were replaced in memory, and the packages' originals.

A device plug-in may replace F.silu with its own version, and so may a fault. The host must not use such a function as
its reference: while the host computes, the packages' own functions are put back.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from operator import is_not
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _pop_mode, _push_mode

from noisescope.localization.classes_from_disk import read_again
from noisescope.localization.patched_functions import original_of, patched_functions

_TORCH = str(Path(torch.__file__).parent)
_NATIVE: dict[Any, Any] = {torch: torch._C._VariableFunctions, torch.Tensor: torch._C.TensorBase, F: torch._C._nn}
_FILES = {torch: "torch.functional", torch.Tensor: "torch._tensor", F: "torch.nn.functional"}  # of what is not native
_HOOKS = [
    held for name, held in vars(nn.modules.module).items() if name.startswith("_global_") and isinstance(held, dict)
]
_COMPUTES_NOTHING = {"compile"}  # Lightning wraps torch.compile, and the host compiles nothing


def _owners() -> list[Any]:
    layers = [each for each in vars(nn.modules).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return [F, torch, torch.Tensor, nn.Module, *dict.fromkeys(layers)]


def _held(owner: Any) -> dict[str, Any]:
    """By name; for tensors including the functions of the native base class, which a patch hides."""
    return {**vars(torch._C.TensorBase), **vars(owner)} if owner is torch.Tensor else dict(vars(owner))


def _counts(owner: Any, name: str) -> bool:
    """For a layer class, only what is called when it runs; others often generate the rest (dataclasses)."""
    is_layer = isinstance(owner, type) and issubclass(owner, nn.Module)
    if owner is torch and name in _COMPUTES_NOTHING:
        return False
    return not is_layer or name in ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")


def _is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, BuiltinFunctionType)) or hasattr(value, "__objclass__")


def _foreign(value: Any) -> bool:
    """Whether its code lies outside torch; anything that is neither Python code nor torch's own counts."""
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith((_TORCH, "<"))  # "<string>": made by dataclasses and the like
    return not (_is_function(value) or isinstance(value, type))


# What was there when noisescope was imported: mostly before anything is replaced.
_AT_IMPORT = {
    owner: {name: f for name, f in _held(owner).items() if _is_function(f) and _counts(owner, name)}
    for owner in _owners()
}
_FOREIGN_AT_IMPORT = {
    (owner, name): None for owner, held in _AT_IMPORT.items() for name, f in held.items() if _foreign(f)
}
# With views that stay current: these 2,000 names are compared before every product on the host, so no Python code runs
# for each of them.
_LOOKUPS = [(owner, vars(owner).get, tuple(held), tuple(held.values())) for owner, held in _AT_IMPORT.items()]


@dataclass(frozen=True)
class Replaced:
    """A function that is not its package's own."""

    owner: Any  # a module, a class or a mapping
    name: str
    shipped: Any

    def __str__(self) -> str:
        home = "implementation" if isinstance(self.owner, dict) else self.owner.__name__
        return f"{home}.{self.name}"


_in_model_code: list[tuple[Replaced, Any]] = []  # and by what; many files are searched, so once per audit


def search_code(model: nn.Module) -> None:
    """Search transformers and the model's classes for functions that were replaced until now."""
    _in_model_code[:] = [(each, _get(each)) for each in starmap(Replaced, patched_functions(model))]


def calls_replaced(method: Any) -> bool:
    """Whether a method calls a function of its own file that was replaced: by a fused kernel, in most cases."""
    code = inspect.unwrap(method)
    if not isinstance(code, FunctionType):
        return False
    names = {each.name for each, _ in _in_model_code if getattr(each.owner, "__name__", "") == code.__module__}
    return not names.isdisjoint(code.__code__.co_names)


def replaced_functions() -> list[Replaced]:
    """All replaced functions that have a known original."""
    changed = dict(_FOREIGN_AT_IMPORT)
    for owner, get, names, was in _LOOKUPS:
        if any(map(is_not, map(get, names, was), was)):
            changed |= {(owner, name): None for name, f in zip(names, was, strict=True) if get(name, f) is not f}
    found = []
    for owner, name in changed:
        was_held = _AT_IMPORT[owner][name]
        now = vars(owner).get(name, was_held)
        if callable(now) and _foreign(now):
            shipped = _from_package(owner, name) if (owner, name) in _FOREIGN_AT_IMPORT else was_held
            if shipped is not None:
                found.append(Replaced(owner, name, shipped))
    return found + [each for each, patch in _in_model_code if _get(each) is patch]


def _from_package(owner: Any, name: str) -> Any:
    """The function of that name in torch's file or native code, for what was replaced before the import."""
    home = sys.modules[_FILES.get(owner) or owner.__module__]
    found = original_of(home, owner, f"{owner.__name__}.{name}" if isinstance(owner, type) else name)
    found = found or getattr(_NATIVE.get(owner), name, None)
    if found is not None or owner in _FILES:
        return found
    again = read_again(owner.__module__, files=("",))
    return None if again is None else vars(getattr(again, owner.__name__)).get(name)


@contextmanager
def shipped_functions() -> Iterator[None]:
    """Temporarily restore the packages' own functions, without hooks on all modules."""
    replaced = replaced_functions()
    before = [_get(each) for each in replaced]
    hooks = [(table, dict(table)) for table in _HOOKS if table]
    try:
        for each in replaced:
            _set(each, each.shipped)
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for each, value in zip(replaced, before, strict=True):
            _set(each, value)
        for table, held in hooks:
            table.update(held)


def _get(each: Replaced) -> Any:
    return (each.owner if isinstance(each.owner, dict) else vars(each.owner)).get(each.name)


def _set(each: Replaced, value: Any) -> None:
    if isinstance(each.owner, dict):
        each.owner[each.name] = value
    else:
        setattr(each.owner, each.name, value)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run with tensor subclasses active but without the caller's modes (a simulated fault is one)."""
    held = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(held):
            _push_mode(mode)  # type: ignore[no-untyped-call]
