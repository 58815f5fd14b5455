"""Values as JSON: a frozen dataclass written, read back with every type checked, and described by its JSON Schema.

The three come from the same annotations, so what is written, what is accepted and what is published can't drift apart.
A field's JSON key is its name. All fields are always written, and all must be there when a file is read: a report that
lacks one was written by another version, and half a report is never understood. A field with the metadata ADDED may
be missing: older files of the same version have none.

Annotations may be str, int, float, bool, None, Literal, X | None, tuple[X, ...], tuple[X, Y], Mapping[str, X], a
dataclass, or `Json` for a part whose shape another tool owns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from noisescope.errors import InvalidInput
from noisescope.text_escaping import LONG, one_line, shown, visible

V = TypeVar("V")
Json = Any  # JSON whose shape is not ours: kept as it is
ADDED = {"added": True}  # metadata of a field that files of this version may lack: its default counts there
LARGEST = 2**128  # larger integers are not counts, layers or seeds


def to_json(value: object) -> Any:
    """A value as what `json.dumps` takes. Hidden characters of a text are escaped: a reader refuses them.

    >>> from noisescope.stats import Estimate
    >>> to_json(Estimate(0.5, 0.4, None, 10))["low"]
    0.4
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidInput(f"{value} can't be stored as JSON: use None, and give the reason in a note")
        return float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(vars(value)[field.name]) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {visible(str(name)): to_json(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(member) for member in value]
    raise InvalidInput(f"{shown(value)} ({type(value).__name__}) can't be stored as JSON")


def from_json(kind: type[V], data: object, where: str = "") -> V:
    """The value that JSON stands for; `InvalidInput` names the first part that does not fit, by its path."""
    read: V = _read(kind, data, where or kind.__name__)
    return read


def schema_of(kind: type, *, title: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a dataclass; each nested dataclass has one definition."""
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


# -- reading


def _read(kind: Any, data: object, where: str) -> Any:
    if kind is Any or kind is object:
        return data
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, where)
    if origin is Literal:
        if data not in arguments or isinstance(data, bool) != isinstance(arguments[0], bool):
            raise _unfit(where, data, " or ".join(map(repr, arguments)))
        return data
    if origin is tuple:
        return _read_tuple(arguments, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise _unfit(where, data, "an object")
        return {
            _key(arguments[0], name, where): _read(arguments[1], member, f"{where}.{name}")
            for name, member in data.items()
        }
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    return _read_plain(kind, data, where)


def _key(kind: Any, name: object, where: str) -> Any:
    """JSON has text keys alone; a mapping by layer has ints, one by place a few names."""
    if typing.get_origin(kind) is Literal:
        return _read(kind, name, f"{where}.{name}")
    if kind is not int:
        return _read_plain(str, name, where)
    if not re.fullmatch(r"-?\d{1,18}", str(name), re.ASCII):
        raise _unfit(f"{where}.{name}", name, "a whole number as key")
    return int(str(name))


def _read_plain(kind: Any, data: object, where: str) -> Any:
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        try:
            value = float(data)
        except OverflowError:  # a whole number of more than 308 digits
            value = math.inf
        if not math.isfinite(value):
            raise _unfit(where, data, "a finite number")
        return value
    wanted = {type(None): "null", str: "text", int: "a whole number", bool: "true or false", float: "a number"}
    if kind is float or not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _unfit(where, data, wanted.get(kind, str(kind)))
    if isinstance(data, str) and visible(data) != data:
        raise _unfit(where, data, "text without control characters")
    if isinstance(data, int) and abs(data) > LARGEST:
        raise _unfit(where, data, "a whole number below 2^128")
    return data


def _read_union(kinds: tuple[Any, ...], data: object, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    left = [kind for kind in kinds if kind is not type(None)]
    for kind in left[:-1]:
        try:
            return _read(kind, data, where)
        except InvalidInput:
            continue
    return _read(left[-1], data, where)


def _read_tuple(arguments: tuple[Any, ...], data: object, where: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise _unfit(where, data, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], member, f"{where}[{at}]") for at, member in enumerate(data))
    if len(data) != len(arguments):
        raise _unfit(where, data, f"a list of {len(arguments)}")
    return tuple(
        _read(kind, member, f"{where}[{at}]") for at, (kind, member) in enumerate(zip(arguments, data, strict=True))
    )


def _read_dataclass(kind: Any, data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _unfit(where, data, "an object")
    hints = field_types(kind)
    missing = [name for name in _required(kind) if name not in data]
    if missing:
        raise InvalidInput(f"{_place(where)} has no {missing[0]!r}")
    strange = [str(name) for name in data if name not in hints]
    if strange:
        raise InvalidInput(f"{_place(where)} has {shown(strange[0])}, which this version does not know")
    read = {name: _read(hint, data[name], f"{where}.{name}") for name, hint in hints.items() if name in data}
    try:
        return kind(**read)
    except InvalidInput as error:  # a value that refuses itself does not know its path
        raise InvalidInput(f"{_place(where)}: {error}") from None


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields, in order."""
    found = typing.get_type_hints(kind)
    return {field.name: found[field.name] for field in dataclasses.fields(kind)}


def _required(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if "added" not in field.metadata]


def _unfit(where: str, data: object, wanted: str) -> InvalidInput:
    return InvalidInput(f"{_place(where)}: {wanted} was expected, got {shown(data)}")


def _place(where: str) -> str:
    """A path in an error: keys from elsewhere are in it."""
    return one_line(where, LONG)


# -- schema

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if kind is Any or kind is object:
        return {}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": _schema(arguments[0], definitions)}
        parts = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin is not None and issubclass(origin, Mapping):
        names = {"propertyNames": _schema(arguments[0], definitions)} if typing.get_origin(arguments[0]) else {}
        return {"type": "object", **names, "additionalProperties": _schema(arguments[1], definitions)}
    if not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
        raise TypeError(f"{kind} has no JSON Schema")
    name = kind.__name__
    if name not in definitions:
        definitions[name] = {}  # its place is taken: a value may hold others of its own kind
        hints = field_types(kind)
        definitions[name] = {
            "type": "object",
            **({"description": _first_line(kind)} if _first_line(kind) else {}),
            "properties": {key: _schema(hint, definitions) for key, hint in hints.items()},
            "required": _required(kind),
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def _first_line(kind: Any) -> str:
    text = (kind.__doc__ or "").strip()
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.partition("\n\n")[0].split())
