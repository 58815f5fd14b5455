"""Functions that were replaced in memory: in transformers, and in the classes of a model. Each with its original.

A patch of the code that all models share (masks, activations, attention and expert functions, Conv1D) changes every
model in the process, and a patch of a class every module of it. The original is compiled from the file alone, so
nothing is imported or registered again.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_LIBRARY = "transformers."
_READ_AGAIN = ("transformers.models.", "transformers.cache_utils")  # files that are executed again as a whole
_STANDARD = str(Path(os.__file__).parent)
_FOUND = (importlib.util.find_spec(name) for name in ("torch", "transformers"))
_HOMES = tuple(str(Path(spec.origin).parent) + os.sep for spec in _FOUND if spec is not None and spec.origin)
_TABLE = "_global_mapping"  # of implementations by name: attention, masks, experts


def patched_functions(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Owner, name and original of each function, method and table entry that its file does not define."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(_LIBRARY) and not name.startswith(_READ_AGAIN) and isinstance(module, ModuleType):
            own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
            for owner in (module, *own):
                found += [(owner, key, original) for key, original in _replaced(module, owner)]
            found += [entry for each in list(vars(module).values()) for entry in _replaced_entries(each)]
    for cls in dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__):
        home = sys.modules.get(cls.__module__)
        if home is not None and cls.__module__.startswith(_READ_AGAIN):
            found += [(owner, key, original) for owner in (home, cls) for key, original in _replaced(home, owner)]
        elif home is not None and not cls.__module__.startswith((_LIBRARY, "torch.", "builtins")):
            found += [(cls, key, original) for key, original in _replaced(home, cls)]
    return list({(id(owner), key): (owner, key, value) for owner, key, value in found}.values())


def is_foreign(value: Any) -> bool:
    """Whether it is Python code that lies neither in transformers nor in torch nor in the standard library."""
    if not isinstance(value, FunctionType):
        return False
    path = value.__code__.co_filename
    standard = path.startswith((_STANDARD, "<frozen")) and "site-packages" not in path
    return not standard and not path.startswith(_HOMES)


def _replaced(module: ModuleType, owner: Any) -> Iterator[tuple[str, Any]]:
    in_library = module.__name__.startswith(_LIBRARY)
    prefix = "" if owner is module else f"{owner.__name__}."
    for name, value in list(vars(owner).items()):
        if not isinstance(value, FunctionType) or (name[:2] == "__" and name != "__call__"):
            continue
        own = value.__code__.co_qualname == prefix + name and _codes(value)[0][0] == Path(_file_of(module)).name
        if not own and (is_foreign(value) or not in_library):
            original = original_of(module, owner, prefix + name)
            if original is not None and _codes(original) != _codes(value):
                yield name, original


def _codes(function: Any) -> list[tuple[str, int]]:
    """Where the code of a function lies, and that of what it decorates."""
    found = []
    while isinstance(function, FunctionType):
        found.append((Path(function.__code__.co_filename).name, function.__code__.co_firstlineno))
        function = getattr(function, "__wrapped__", None)
    return found


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def original_of(module: ModuleType, owner: Any, name: str) -> Any:
    """The function of that name in the module's file; None if it has none, or several under conditions."""
    path = _file_of(module)
    definition = _definitions(path).get(name)
    if definition is None:
        return None
    made = ast.parse("def make(__class__): return")  # the variable that super() needs
    outer: Any = made.body[0]
    outer.body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    flags = __future__.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(made), path, "exec", flags, dont_inherit=True)
    make = next(each for each in code.co_consts if isinstance(each, CodeType))
    original = FunctionType(make, vars(module))(owner)  # runs the definition alone, as importing the module did
    return original if isinstance(original, FunctionType) else None


@functools.cache
def _definitions(path: str) -> dict[str, ast.FunctionDef]:
    found = list(_defined(_statements(path)))
    often = Counter(name for name, _ in found)
    always = {id(each) for each in _statements(path)}  # of several, as overloads have, the last counts
    return {k: v for k, v in found if isinstance(v, ast.FunctionDef) and (often[k] == 1 or id(v) in always)}


@functools.cache
def _statements(path: str) -> list[ast.stmt]:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []


def _defined(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes with their names, also under conditions."""
    for each in body:
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + each.name, each
        if isinstance(each, ast.ClassDef):
            yield from _defined(each.body, f"{prefix}{each.name}.")
        elif isinstance(each, (ast.If, ast.Try)):
            yield from _defined([*each.body, *each.orelse], prefix)


def _replaced_entries(table: Any) -> Iterator[tuple[Any, str, Any]]:
    """Entries of a table of implementations, or of one instance of it, that have the name of one of its own."""
    cls = table if isinstance(table, type) else type(table)
    module = sys.modules.get(cls.__module__)
    if _TABLE not in vars(cls) or module is None:
        return
    for entries in (vars(cls)[_TABLE], vars(table).get("_local_mapping", {})):
        for key, value in list(entries.items()) if any(map(is_foreign, entries.values())) else ():
            name = _names_in_table(_file_of(module), cls.__name__).get(key, "")
            original = vars(module).get(name)
            if is_foreign(original):
                original = original_of(module, module, name)
            if is_foreign(value) and original is not None:
                yield entries, key, original


@functools.cache
def _names_in_table(path: str, cls: str) -> dict[str, str]:
    """The functions that the class's own table names."""
    body = dict(_defined(_statements(path))).get(cls)
    tables = [each.value for each in getattr(body, "body", ()) if isinstance(each, ast.Assign)]
    pairs = [pair for each in tables if isinstance(each, ast.Dict) for pair in zip(each.keys, each.values, strict=True)]
    return {str(k.value): v.id for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Name)}
