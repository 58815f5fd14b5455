"""The code that the host runs as a reference: classes as they are on disk.

Anything in transformers that was patched in memory after import (a function, a method of a cache) is ignored: the file
is loaded again under another name.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_PACKAGE = "transformers."  # files of others may do anything when they are run again
_FILES = ("modeling_", "cache_utils")  # a model's own code, and the caches


def as_on_disk(cls: type) -> type:
    """The class of the same name, loaded again from its file; the class itself if the file can't be loaded again."""
    if not cls.__module__.startswith(_PACKAGE) or "<locals>" in cls.__qualname__:
        return cls
    module = read_again(cls.__module__)
    found = None if module is None else getattr(module, cls.__name__, None)
    return found if isinstance(found, type) else cls


def restore_code(value: Any, depth: int = 4) -> None:
    """Give an object, and the objects it holds, their methods from disk. They remain instances of their own class."""
    if depth < 0 or isinstance(value, type):
        return
    if isinstance(value, (list, tuple)):
        for each in value:
            restore_code(each, depth - 1)
    elif isinstance(value, dict):
        for each in value.values():
            restore_code(each, depth - 1)
    elif type(value).__module__.startswith(_PACKAGE) and hasattr(value, "__dict__"):
        cls: type = type(value)
        value.__class__ = _restored(cls)
        for name, each in vars(value).items():
            if isinstance(each, type):  # which class new layers of a cache have
                vars(value)[name] = _restored(each)
            else:
                restore_code(each, depth - 1)


@functools.cache
def _restored(cls: type) -> type:
    """A subclass of the class in memory whose methods come from disk."""
    disk = as_on_disk(cls)
    if disk is cls:
        return cls
    try:
        with _registries_kept():
            return type(cls.__name__, (disk, cls), {"__module__": cls.__module__})
    except TypeError:  # their bases can't be put in one order
        return cls


@contextmanager
def _registries_kept() -> Iterator[None]:
    """Cache layer classes register themselves when they are defined; their copies must not."""
    held = vars(sys.modules["transformers.cache_utils"]) if "transformers.cache_utils" in sys.modules else {}
    tables = [value for name, value in held.items() if name.isupper() and isinstance(value, dict)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


@functools.cache
def read_again(name: str, files: tuple[str, ...] = _FILES) -> ModuleType | None:
    """A module executed again from its file under another name; None if its file has another name or can't be run."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not name.rpartition(".")[2].startswith(files):
        return None
    apart = f"{name}_as_on_disk"
    spec = importlib.util.spec_from_file_location(apart, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[apart] = module  # dataclasses look their module up
    try:
        with _registries_kept():
            spec.loader.exec_module(module)
    except Exception:  # a file that can't be run a second time is used as it is in memory
        del sys.modules[apart]
        return None
    return module
