"""Reads a safetensors file with numpy only: an 8-byte length, a JSON header, the numbers.

The numpy reader of safetensors does not support bfloat16. Here bfloat16 values are read as uint16 and widened to
float32 without loss.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisescope.errors import InvalidInput
from noisescope.text_escaping import shown
from noisescope.untrusted_files import MIB, FileKind, fitting, members, parse_json

Array = NDArray[np.generic]

TENSORS = FileKind("tensor file", "It is truncated or damaged: copy it again, or record again", root="header")
_LONGEST_HEADER = 100 * MIB  # as safetensors itself has it
_MOST_DIMENSIONS, _MOST_BYTES = 32, 2**60  # of a tensor, with those of no elements counted as one

_STORED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1",
}  # fmt: skip
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Numbers:
    """An array, and the dtype it had on the device."""

    values: Array
    dtype: str


@dataclass(frozen=True)
class Entry:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Header:
    entries: Mapping[str, Entry]
    same: Mapping[str, str]  # tensors that are the same as another, by name


class TensorFile:
    """One file; rejected unless its size and checksum match record.json."""

    def __init__(self, path: Path, size: int, digest: str) -> None:
        self.path = path
        try:
            found = path.stat().st_size
            if found != size:
                raise TENSORS.refuse(path, f"it has {found} bytes, expected {size}")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise TENSORS.refuse(path, "its checksum does not match")
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if length > min(found, _LONGEST_HEADER):
                    raise TENSORS.refuse(path, f"its header can't have {length} bytes")
                header = file.read(length).decode("utf-8", "replace")
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error.strerror or error}. Copy the record again") from error
        self._header = _header(header, path)
        self._start, self._end = 8 + length, found
        for name, entry in self._header.entries.items():
            self._check(name, entry)

    def _check(self, name: str, entry: Entry) -> None:
        """A tensor must lie within its file and have a known dtype."""
        if entry.dtype not in _STORED:
            raise TENSORS.refuse(self.path, f"{shown(name)} has the dtype {shown(entry.dtype)}")
        (first, last), item = entry.data_offsets, np.dtype(_STORED[entry.dtype]).itemsize
        size, largest = math.prod(entry.shape) * item, math.prod(max(1, n) for n in entry.shape) * item
        fits = min((first, *entry.shape)) >= 0 and last - first == size and self._start + last <= self._end
        if not fits or largest > _MOST_BYTES or len(entry.shape) > _MOST_DIMENSIONS:
            raise TENSORS.refuse(self.path, f"{shown(name)} lies outside the file")

    def read(self, name: str) -> Numbers | None:
        name = self._header.same.get(name, name)
        if name not in self._header.entries:
            return None
        entry = self._header.entries[name]
        stored = np.dtype(_STORED[entry.dtype])
        if math.prod(entry.shape) == 0:
            values: Array = np.zeros(entry.shape, stored)
        else:
            values = np.memmap(self.path, stored, "r", self._start + entry.data_offsets[0], entry.shape)
        if entry.dtype == "BF16":
            values = widened(values.view(np.uint16))
        return Numbers(values, _NAMES.get(entry.dtype, ""))


def _header(text: str, path: Path) -> _Header:
    found = dict(members(parse_json(text, path, TENSORS), path, TENSORS))
    metadata = found.pop("__metadata__", None) or {}
    same = metadata.get("same", "{}") if isinstance(metadata, dict) else "{}"
    same = parse_json(same, path, TENSORS) if isinstance(same, str) else same
    return fitting(_Header, {"entries": found, "same": same}, path, TENSORS)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16, given by its bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
