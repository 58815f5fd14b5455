"""How classes and functions are named inside a trial's id.

Two classes that share a short name must never share an id, so a class is known by its module and qualified name.
noisescope's own classes are known by a registered name instead ("noisescope.Gaussian"): moving a file then leaves every
stored id as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from noisescope.errors import InvalidInput

_T = TypeVar("_T")
_NAMES: dict[type, str] = {}
_OWNERS: dict[str, str] = {}  # registered name -> where its class is defined


def registered(name: str) -> Callable[[type[_T]], type[_T]]:
    """A class decorator: the name that trials use for the class, wherever it is. A subclass needs its own name."""

    def register(cls: type[_T]) -> type[_T]:
        here = f"{cls.__module__}.{cls.__qualname__}"
        owner = _OWNERS.setdefault(name, here)
        if owner != here:
            raise ValueError(f"{name} is the registered name of {owner}: give {here} another one")
        _NAMES[cls] = name
        return cls

    return register


def class_name(cls: type) -> str:
    """The registered name, or module and qualified name. A class made inside a function has neither."""
    return _NAMES.get(cls) or _qualified(cls)


def function_name(value: Any) -> str:
    """Module and qualified name of a function: all that is the same in every process. Its code is not examined."""
    bound = getattr(value, "__self__", None)
    if inspect.ismethod(value):
        if not isinstance(bound, type):
            raise InvalidInput(
                f"{value!r} is a bound method, whose object has no stable name: use a function, or a dataclass with "
                f"__call__"
            )
        return f"{class_name(bound)}.{value.__name__}"  # a class method may do something else in a subclass
    return _qualified(value)


def short_name(name: str) -> str:
    """For people: "Gaussian" of "noisescope.Gaussian"."""
    return name.rpartition(".")[2]


def _qualified(value: Any) -> str:
    name = getattr(value, "__qualname__", "")
    if not name or "<" in name:  # "<lambda>", "<locals>"
        raise InvalidInput(
            f"{value!r} has no unique name, so stored trials with it can't be distinguished: define it with `def` "
            f"or `class` at the top level of a module"
        )
    return f"{getattr(value, '__module__', None) or 'builtins'}.{name}"
