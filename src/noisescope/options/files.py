"""Options of a command from a YAML file: `noisescope diagnose --config run.yaml`.

Keys are the options' names with underscores or hyphens, at the top level or under `diagnostic:`. The layout and the
names of the original method notes are understood, too:

    diagnostic:
      mode: full                 # level: operator, layer and channel
      operator: {noise_scale: 0.05, operators: [matmul, softmax]}
      layer: {window_size: 3, step_size: 1}
      channel: {calibration_samples: 1000}

The command line takes precedence over the file, and the file over defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.options.base import WIDEN_TRUST, CommandOptions, canonical_names
from noisescope.options.fields import described, options_of
from noisescope.text_escaping import cut, shown
from noisescope.untrusted_files import FileKind, parse_yaml, read_text

OPTIONS = FileKind("config file", "Give a YAML file with `option: value` lines", max_bytes=2**17, max_depth=16)
SECTION = "diagnostic"
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


def read_file(path: Path, cls: type[CommandOptions]) -> dict[str, Any]:
    """Values by option, checked."""
    known = {name: option for name, option in options_of(cls, "command").items() if name != "config"}
    names = canonical_names(known.values())
    values: dict[str, Any] = {}
    came_as: dict[str, str] = {}
    for where, name, value in _entries(path, parse_yaml(read_text(path, OPTIONS), path, OPTIONS), names):
        ready = known[name].checked(value, where=f"{path}: {where}", in_file=True)
        if name in WIDEN_TRUST and ready:
            raise InvalidInput(
                f"{path}: {where} can't be set in a file, which may be anybody's: give {known[name].flag} on the "
                "command line, if you trust the model and the cluster"
            )
        if name in values and values[name] != ready:
            raise InvalidInput(
                f"{path}: {came_as[name]} and {where} both set {name!r}, to {shown(values[name])} and "
                f"{shown(ready)}: keep one of them"
            )
        values[name], came_as[name] = ready, where
    return values


def _entries(path: Path, data: Any, names: dict[str, str]) -> Iterator[tuple[str, str, Any]]:
    """(how the file names it, our name, value) of every option in the file."""
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} must hold `option: value` lines, got {described(data)}")
    prefix = ""
    if SECTION in data:
        # a file of several tools: mappings beside ours are theirs; a bare value is one of ours, lost or misspelt
        for name, value in data.items():
            if not isinstance(value, dict) and name != SECTION:
                raise InvalidInput(
                    f"{path}: {cut(str(name))} stands beside `{SECTION}:`; move it below, or it would have no effect"
                )
        data, prefix = data[SECTION], f"{SECTION}."
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise InvalidInput(f"{path}: {SECTION} must hold `option: value` lines, got {described(data)}")
    for name, value in data.items():
        if name in SECTIONS and isinstance(value, dict):
            inside = {known: ours for known, ours in names.items() if ours in SECTIONS[name]}
            for inner, one in value.items():
                yield from _entry(path, f"{prefix}{name}.", inner, one, inside)
        else:
            yield from _entry(path, prefix, name, value, names)


def _entry(path: Path, prefix: str, name: Any, value: Any, names: dict[str, str]) -> Iterator[tuple[str, str, Any]]:
    name = "on" if name is True else name  # YAML 1.1 reads a bare `on` as true
    key, where = str(name).replace("-", "_"), f"{prefix}{cut(str(name))}"
    if key in SETTLED:
        wanted, why = SETTLED[key]
        if value is not wanted:
            raise InvalidInput(f"{path}: {where} is {shown(value)}; {why}")
    elif key not in names:
        ours_first = [*dict.fromkeys(names.values()), *(known for known, ours in names.items() if known != ours)]
        raise InvalidInput(f"{path}: {unknown('option', str(name), ours_first)}")
    elif prefix.endswith("operator.") and names[key] == "operators" and isinstance(value, list):
        # the notes' own layout has the notes' own word: their "matmul" is every matrix product
        yield where, names[key], ["gemm" if member == "matmul" else member for member in value]
    else:
        yield where, names[key], value
