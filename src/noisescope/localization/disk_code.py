"""A class as its source file has it on disk, whatever was replaced in memory since it was imported."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

_PACKAGE = "transformers."  # files of others may do anything when they are run again


def as_on_disk(cls: type) -> type:
    """The class of the same name from its file, read again; the class itself where the file may not be run again."""
    if not cls.__module__.startswith(_PACKAGE) or "<locals>" in cls.__qualname__:
        return cls
    module = _read_again(cls.__module__)
    found = None if module is None else getattr(module, cls.__name__, None)
    return found if isinstance(found, type) else cls


@functools.cache
def _read_again(name: str) -> ModuleType | None:
    original = sys.modules.get(name)
    path = getattr(original, "__file__", None)
    if path is None or ".modeling_" not in name:
        return None
    apart = f"{name}_as_on_disk"
    spec = importlib.util.spec_from_file_location(apart, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[apart] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception:  # a file that can't be run a second time is used as it is in memory
        del sys.modules[apart]
        return None
    return module
