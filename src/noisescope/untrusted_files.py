"""The one reader of files from elsewhere: reports, records, passports, configs, dumps, run folders, option files.

What it gives back is plain data within limits of size, depth and digits, checked against the type it must have
(jsonform.py). Everything else is a one-line `InvalidInput`: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.jsonform import Json, from_json
from noisescope.text_escaping import LONG, cut, one_line, shown

V = TypeVar("V")
MIB = 2**20
LONGEST_NAME = 255  # bytes of a file's name: what common file systems take
LONGEST_NUMBER = 100  # digits; what a schema calls a whole number has fewer (jsonform.LARGEST)
MOST_NODES = 10_000  # of a YAML file, aliases written out


@dataclass(frozen=True)
class FileKind:
    """A kind of file: its name in errors, how to get a valid one, and its maximum size."""

    name: str  # "report"
    cure: str  # a sentence without its full stop
    root: str = "it"  # what the paths in errors start with
    max_bytes: int = 256 * MIB
    max_depth: int = 64
    infinite: bool = False  # whether Infinity and NaN are numbers in it, as Python writes them

    def refuse(self, where: str | Path, reason: object) -> InvalidInput:
        return InvalidInput(
            f"{_end(str(where))} is not a valid {self.name}: {one_line(str(reason), LONG)}. {self.cure}"
        )

    @contextmanager
    def explaining(self, where: str | Path) -> Iterator[None]:
        """Turn errors of other libraries into one line about the file; `--debug` shows the rest."""
        try:
            yield
        except NoisescopeError:
            raise
        except Exception as error:
            raise self.refuse(where, f"{type(error).__name__}: {error}") from error


def read_foreign(path: Path, schema: type[V], kind: FileKind) -> V:
    """A JSON file as a value of its schema."""
    return fitting(schema, parse_json(read_text(path, kind), path, kind), path, kind)


def fitting(schema: type[V], data: Json, where: str | Path, kind: FileKind) -> V:
    """Parsed data as a value of its schema."""
    try:
        return from_json(schema, data, kind.root)
    except InvalidInput as error:
        raise kind.refuse(where, error) from None


def members(data: Json, where: str | Path, kind: FileKind) -> Mapping[str, Json]:
    """Parsed data that must be an object, to check its version before its schema."""
    if not isinstance(data, dict):
        raise kind.refuse(where, f"an object was expected, got {shown(data)}")
    return data


def read_text(path: Path, kind: FileKind) -> str:
    raw = read_bytes(path, kind)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind.refuse(path, f"byte {raw[error.start]:#x} at {error.start} is not UTF-8") from None


def read_bytes(path: Path, kind: FileKind) -> bytes:
    """The whole file; a pipe or a device is refused, for reading it may never end."""
    try:
        if not path.exists():
            raise InvalidInput(f"there is no {kind.name} at {_end(str(path))}. {kind.cure}")
        if not path.is_file():
            raise kind.refuse(path, "it is a folder, a pipe or a device")
        with path.open("rb") as file:
            raw = file.read(kind.max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        raise error if isinstance(error, InvalidInput) else kind.refuse(path, f"it can't be read: {error}") from None
    if len(raw) > kind.max_bytes:
        raise kind.refuse(path, f"it is larger than {kind.max_bytes:,} bytes")
    return raw


def inside(folder: Path, name: str, kind: FileKind) -> Path:
    """A file that another one names: in the same folder, never elsewhere."""
    odd = name in ("", ".", "..") or any(sign in name for sign in "/\\\0") or name != Path(name).name
    if odd or len(name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise kind.refuse(folder, f"the name of a file in this folder was expected, got {shown(name)}")
    return folder / name


# -- JSON


def parse_json(text: str, where: str | Path, kind: FileKind) -> Json:
    """JSON as the standard has it: finite numbers, each key once, no deeper than allowed."""
    if len(text) > kind.max_bytes:
        raise kind.refuse(where, f"it is longer than {kind.max_bytes:,} characters")
    try:
        found = json.loads(
            text,
            parse_constant=float if kind.infinite else _refuse_constant,
            parse_float=float if kind.infinite else _finite,
            parse_int=_whole_number,
            object_pairs_hook=_unique_keys,
        )
        check_depth(found, kind.max_depth)
    except RecursionError:
        raise kind.refuse(where, f"it is nested deeper than {kind.max_depth}") from None
    except ValueError as error:
        raise kind.refuse(where, error) from None
    return found


def check_depth(data: Json, most: int) -> None:
    """Check nesting without recursion: data too deep for `most` may be too deep for Python."""
    level: list[Any] = [data]
    for _ in range(most):
        level = [member for each in level for member in _containers(each)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {most}")


def _containers(value: Json) -> Iterator[Json]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (member for member in values if isinstance(member, (dict, list)))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON; use null")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {cut(digits, 20)} is too large")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"the whole number {cut(digits, 20)} has {len(digits)} digits, at most {LONGEST_NUMBER}")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


# -- YAML


def parse_yaml(text: str, where: str | Path, kind: FileKind) -> Json:
    """YAML of plain values: no key twice, and aliases no larger than what they stand for."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _check_nodes(root, kind.max_depth)
        found = None if root is None else loader.construct_document(root)
    except RecursionError:
        raise kind.refuse(where, f"it is nested deeper than {kind.max_depth}") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise kind.refuse(where, f"{line}{getattr(error, 'problem', None) or error}") from None
    return found


def _check_nodes(root: Any, most_deep: int) -> None:
    """Count the nodes with every alias expanded: nine lines can stand for a billion values."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any, depth: int) -> int:
        if depth > most_deep:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {most_deep}", problem_mark=node.start_mark)
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise yaml.MarkedYAMLError(problem="an alias of itself", problem_mark=node.start_mark)
            return sizes[id(node)]
        sizes[id(node)] = 0  # open: met again before it is known, it holds itself
        inner = [*_members_of(node)] if isinstance(node, yaml.CollectionNode) else []
        sizes[id(node)] = 1 + sum(size(member, depth + 1) for member in inner)
        if sizes[id(node)] > MOST_NODES:
            problem = f"more than {MOST_NODES:,} values after expanding its aliases"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > LONGEST_NUMBER:
            raise yaml.MarkedYAMLError(problem="a whole number of too many digits", problem_mark=node.start_mark)
        return sizes[id(node)]

    size(root, 0)


def _members_of(node: Any) -> Iterator[Any]:
    """Nodes right under a node; a key twice is refused, where PyYAML takes the last in silence."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        yield from node.value
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in first:
                problem = f"{cut(key.value)} occurs twice (first on line {first[key.value]}): keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
        yield key
        yield value


def _end(path: str) -> str:
    """A path in an error; of a very long one the end, which is more informative."""
    line = one_line(path)
    return line if len(line) <= LONG else f"...{line[-LONG:]}"
