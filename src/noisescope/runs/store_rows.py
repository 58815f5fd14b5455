"""A row of the store: a result as JSON text with its arrays as .npz bytes, sealed by a checksum. No pickles."""

from __future__ import annotations

import hashlib
import io
import json
import math
from typing import Any

import numpy as np

from noisescope.text_escaping import shown
from noisescope.trials import Result
from noisescope.untrusted_files import MIB, FileKind, members, parse_json

Cell = str | bytes | float | int | None  # what SQLite gives back

STORED = FileKind("noisescope run", "Run the command again with another folder (-o)", max_depth=96)
RESULTS = FileKind("noisescope run", STORED.cure)
_MOST_ARRAY_BYTES = 4096 * MIB  # of one trial, unpacked


def checksum(*cells: Cell) -> str:
    """SHA-256 over the cells of a row, each with its kind and length, so that no two rows share their bytes."""
    digest = hashlib.sha256()
    for cell in cells:
        if isinstance(cell, bytes):
            raw = cell
        elif isinstance(cell, str):
            raw = cell.encode("utf-8", "surrogatepass")
        else:
            raw = (cell.hex() if isinstance(cell, float) else str(cell)).encode()
        digest.update(f"{type(cell).__name__} {len(raw)}:".encode())
        digest.update(raw)
    return digest.hexdigest()


def is_content_of(identity: Cell, content: Cell) -> bool:
    """Whether a trial's id is the hash of its content (trials.content_id)."""
    return isinstance(content, str) and hashlib.sha256(content.encode("utf-8", "replace")).hexdigest() == identity


def is_intact(seal: Cell, identity: Cell, content: Cell, *rest: Cell) -> bool:
    """Whether a trial's row is as written: its checksum matches, and the result belongs to its own question."""
    return checksum(identity, content, *rest) == seal and is_content_of(identity, content)


def encode(result: Result) -> tuple[str, bytes | None]:
    """JSON text, and the arrays as .npz bytes."""
    values = {name: [_number(v) for v in column] for name, column in result.values.items()}
    text = json.dumps(
        {"samples": list(result.samples), "values": values, "facts": _finite(dict(result.facts))},
        allow_nan=False,
        sort_keys=True,
    )
    if not result.arrays:
        return text, None
    buffer = io.BytesIO()
    plain: dict[str, Any] = {name: np.asarray(array) for name, array in result.arrays.items()}
    np.savez(buffer, **plain)
    return text, buffer.getvalue()


def decode(text: str, arrays: bytes | None, error: str) -> Result:
    """The result that `encode` wrote; anything else is an error, because a folder may come from elsewhere."""
    if not (isinstance(text, str) and isinstance(error, str) and isinstance(arrays, bytes | None)):
        raise STORED.refuse("a result", "a cell of another kind")  # SQLite keeps any value in any column
    data = members(parse_json(text, "a result", STORED), "a result", STORED)
    samples, values, facts = (data.get(name, ()) for name in ("samples", "values", "facts"))
    known = isinstance(samples, list) and not set(map(type, samples)) - {int} and isinstance(facts, dict)
    if not (known and isinstance(values, dict) and all(_is_column(one, len(samples)) for one in values.values())):
        raise STORED.refuse("a result", f"samples, values and facts were expected, got {shown(data)}")
    loaded: dict[str, Any] = {}
    if arrays:
        with STORED.explaining("the arrays of a result"), np.load(io.BytesIO(arrays), allow_pickle=False) as archive:
            if sum(member.file_size for member in archive.zip.infolist()) > _MOST_ARRAY_BYTES:
                raise STORED.refuse("the arrays of a result", f"more than {_MOST_ARRAY_BYTES:,} bytes")
            loaded = {name: archive[name] for name in archive.files}
    return Result(tuple(samples), {name: tuple(column) for name, column in values.items()}, facts, loaded, error)


def _is_column(column: Any, length: int) -> bool:
    return isinstance(column, list) and len(column) == length and not set(map(type, column)) - {float, int, type(None)}


def _finite(value: Any) -> Any:
    """Facts with None where a number is not finite: JSON has no NaN."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
