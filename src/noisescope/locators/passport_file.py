"""Passports on disk: written whole, read with every doubt. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput

KIND = "noisescope passport"
SCHEMA_VERSION = 2


def write_passport(passport: dict[str, Any], path: str | Path) -> None:
    """Into a file; folders on the way to it are made."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(passport, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}. Choose another place with -o") from error


def read_passport(path: str | Path) -> dict[str, Any]:
    """A passport from a file; anything else is refused with the reason."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not text: a passport is JSON from `noisescope passport -o FILE`") from error
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not whole JSON ({error}): cut off or no passport. Take it again") from error
    return check_passport(found, str(path))


def check_passport(found: Any, what: str) -> dict[str, Any]:
    """The passport itself, if it is one of the version this noisescope reads."""
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InvalidInput(f"{what} is no passport (no kind {KIND!r} in it). Make one: noisescope passport -o FILE")
    if found.get("schema_version") != SCHEMA_VERSION:
        came = found.get("schema_version")
        raise InvalidInput(f"{what} has schema version {came!r}; this noisescope reads {SCHEMA_VERSION}: take it again")
    if not isinstance(found.get("facts"), dict) or not isinstance(found.get("dtypes"), dict):
        raise InvalidInput(f"{what} is damaged: no facts or no dtypes in it. Take it again")
    for dtype in found["dtypes"].values():
        for lines in _tables(dtype) if isinstance(dtype, dict) else [None]:
            if not isinstance(lines, dict) or not all(isinstance(line, dict | str) for line in lines.values()):
                raise InvalidInput(f"{what} is damaged: a table of it has no lines. Take it again")
    return found


def _tables(dtype: dict[str, Any]) -> Iterator[Any]:
    for section, lines in dtype.items():
        if section == "products" and isinstance(lines, dict):
            yield from lines.values()
        elif section != "skipped":
            yield lines
