"""Options of a command from a YAML file: `noisescope diagnose --config run.yaml`.

Keys are the options' long names with underscores, at the top level or under `diagnostic:`. The layout and the names of
the original method notes are understood, too:

    diagnostic:
      mode: full                 # level: operator, layer and channel
      operator: {noise_scale: 0.05, operators: [matmul, softmax]}
      layer: {window_size: 3, step_size: 1}
      channel: {calibration_samples: 1000}

Where a file is used, the command line wins over it, and it wins over defaults.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from noisescope.errors import InvalidInput, unknown

# A name of the original method notes, or one that is near at hand -> ours.
ALIASES = {
    "mode": "level",
    "levels": "level",
    "test_data": "data",
    "calibration_data": "calibration",
    "window_size": "window",
    "step_size": "step",
    "n_samples": "samples",
    "model_path": "model",
    "slice_samples": "slice",
    "as_json": "json",
}
# The notes' sections by level. A key of one would mean something else in another, so each has its own and no more.
SECTIONS = {
    "operator": ("noise_scale", "operators"),
    "layer": ("noise_scale", "window", "step"),
    "channel": ("calibration_samples", "outlier_threshold", "save_activations"),
}
# Keys of the notes that leave nothing to choose here -> the one value allowed, and why.
SETTLED: dict[str, tuple[bool, str]] = {
    "enabled": (True, "the command is the switch: set it to true, or leave the command out"),
}
LISTS = ("level", "operators")  # a list here is what commas are on the command line
_FULL = "operator,layer,channel"  # what the notes call mode "full"
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path as text"}


@dataclass(frozen=True)
class Key:
    """An option as a key of a file: the parameter it stands for, the type it takes, and whether it may be empty."""

    parameter: str
    kind: type
    may_be_empty: bool


def keys_of(command: Callable[..., Any]) -> dict[str, Key]:
    """The keys of a command, from its annotations: a new option is a new key without a word here."""
    import typer.models

    keys = {}
    for parameter, annotation in typing.get_type_hints(command, include_extras=True).items():
        if typing.get_origin(annotation) is not Annotated:
            continue
        kind, info = typing.get_args(annotation)[:2]
        members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if not isinstance(info, typer.models.ParameterInfo) or parameter == "config":
            continue
        written = [info.default, *(info.param_decls or ())]  # in an Annotated the first name sits in `default`
        long = [name for name in written if isinstance(name, str) and name.startswith("--")]
        name = long[0].partition("/")[0].removeprefix("--").replace("-", "_") if long else parameter
        keys[name] = Key(parameter, next(m for m in members if m is not type(None)), type(None) in members)
    return keys


def use_config(ctx: Any, path: Path | None, command: Callable[..., Any]) -> Path | None:
    """For the callback of an eager option --config: what the file holds becomes the defaults of this call.

    click itself then ranks: command line, file, default; and it knows that MODEL is there if the file has it.
    """
    if path is not None:
        ctx.default_map = read_config(path, keys_of(command))
    return path


def read_config(path: Path, allowed: Mapping[str, Key], *, section: str = "diagnostic") -> dict[str, Any]:
    """Values by parameter, checked and in the form the command line would give them."""
    values: dict[str, Any] = {}
    came_as: dict[str, str] = {}
    for where, key, value in _entries(path, _load(path), allowed, section):
        option = allowed[key]
        ready = _checked(f"{path}: {where}", key, option, value)
        if option.parameter in values and values[option.parameter] != ready:
            raise InvalidInput(
                f"{path}: {came_as[key]} and {where} both set {key!r}, to {values[option.parameter]!r} and {ready!r}: "
                "keep one of them"
            )
        values[option.parameter], came_as[key] = ready, where
    return values


def _entries(path: Path, data: Any, allowed: Mapping[str, Key], section: str) -> Iterator[tuple[str, str, Any]]:
    """(how the file names it, our key, value) of every option in the file."""
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} must hold `option: value` lines, got {_described(data)}")
    prefix = ""
    if section in data:
        # a file of several tools: mappings beside ours are theirs; a bare value is one of ours, lost or misspelt
        for name, value in data.items():
            if not isinstance(value, dict) and name != section:
                raise InvalidInput(
                    f"{path}: {name} stands beside `{section}:`; move it below, or it would have no effect"
                )
        data, prefix = data[section], f"{section}."
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise InvalidInput(f"{path}: {section} must hold `option: value` lines, got {_described(data)}")
    for name, value in data.items():
        if name in SECTIONS and isinstance(value, dict):
            for inner, one in value.items():
                yield from _entry(path, f"{prefix}{name}.", inner, one, SECTIONS[name])
        else:
            yield from _entry(path, prefix, name, value, allowed)


def _entry(path: Path, prefix: str, name: Any, value: Any, allowed: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    key, where, names = _canonical(name), f"{prefix}{name}", list(allowed)
    if key in SETTLED:
        wanted, why = SETTLED[key]
        if value is not wanted:
            raise InvalidInput(f"{path}: {where} is {value!r}; {why}")
    elif key not in names:
        aliases = [alias for alias, ours in ALIASES.items() if ours in names]
        raise InvalidInput(f"{path}: {unknown('option', str(name), [*names, *aliases])}")
    elif name == "mode" and value == "full":
        yield where, key, _FULL
    elif prefix.endswith("operator.") and key == "operators":
        # the notes' own layout has the notes' own word: their "matmul" is every matrix product
        yield where, key, ["gemm" if v == "matmul" else v for v in value] if isinstance(value, list) else value
    else:
        yield where, key, value


def _canonical(name: Any) -> str:
    plain = str(name).replace("-", "_")
    return ALIASES.get(plain, plain)


def _checked(where: str, key: str, option: Key, value: Any) -> Any:
    """The value as the option's type, or what is wrong with it."""
    kind = option.kind
    if value is None and option.may_be_empty:
        return None
    if key in LISTS and isinstance(value, list):
        if not value or any(not isinstance(member, str) for member in value):
            raise InvalidInput(f"{where} must be a list of names such as [softmax, norm], got {value!r}")
        return ",".join(value)
    if kind is float and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 5e-2 as text, for it has no point
        except (ValueError, OverflowError):
            pass
    fits = isinstance(value, str if kind is Path else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        hint = " (put it into quotes)" if kind is str and isinstance(value, (bool, int, float)) else ""
        also = " or a list of names" if key in LISTS else ""
        raise InvalidInput(f"{where} must be {_WORDS[kind]}{also}, got {_described(value)}{hint}")
    return value


def _described(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "the text", bool: "", int: "the number", float: "the number"}
    if value is None:
        return "nothing"
    name = names.get(type(value), f"a {type(value).__name__}")
    return f"{name} {value!r}".strip()


# -- YAML


def _load(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInput(f"there is no config file {path}: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} can't be read as a YAML file: {error}") from None
    try:
        tree, data = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2025-13-01
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InvalidInput(f"{path}{line}: no valid YAML: {getattr(error, 'problem', None) or error}") from None
    _refuse_duplicates(path, tree)
    return data


def _refuse_duplicates(path: Path, root: Any) -> None:
    """YAML forbids a key twice in one mapping; PyYAML takes the last in silence."""
    import yaml

    waiting, known = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in known:  # an anchor may hold itself
            continue
        known.add(id(node))
        if isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value in first and isinstance(key, yaml.ScalarNode):
                    raise InvalidInput(
                        f"{path}, line {line}: {key.value} is there twice (first in line {first[key.value]}): keep one"
                    )
                if isinstance(key, yaml.ScalarNode):
                    first[key.value] = line
                waiting.append(value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
