"""A safetensors file read by numpy alone: an 8-byte length, a JSON header, the numbers.

safetensors' own numpy reader knows no bfloat16. Here 16-bit brain floats come as uint16 and are widened to float32,
which loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescope.errors import InvalidInput

Array = NDArray[Any]

_STORED = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "u1",
}
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Numbers:
    """An array, and the dtype it had on the device."""

    values: Array
    dtype: str


class TensorFile:
    """One file; its size and checksum are those that record.json tells, or it is refused."""

    def __init__(self, path: Path, size: int, digest: str) -> None:
        self.path = path
        try:
            found = path.stat().st_size
            if found != size:
                raise _damaged(path, f"it has {found} bytes, {size} belong there")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise _damaged(path, "its checksum is another")
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error.strerror or error}. Copy the record again") from error
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            raise _damaged(path, str(error)) from error
        self.same: dict[str, str] = json.loads(header.pop("__metadata__", {}).get("same", "{}"))
        self._header = header
        self._start = 8 + length

    def read(self, name: str) -> Numbers | None:
        name = self.same.get(name, name)
        if name not in self._header:
            return None
        about = self._header[name]
        stored, shape = np.dtype(_STORED[about["dtype"]]), tuple(about["shape"])
        if math.prod(shape) == 0:
            values: Array = np.zeros(shape, stored)
        else:
            offset = self._start + about["data_offsets"][0]
            values = np.memmap(self.path, stored, "r", offset, shape)
        return Numbers(widened(values) if about["dtype"] == "BF16" else values, _NAMES.get(about["dtype"], ""))


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16, given by its bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _damaged(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(f"{path} is truncated or damaged: {reason}. Copy it again, or record again")
