"""Writes files completely or not at all.

What is written goes into a part file with an unguessable name, newly created (an existing file or symbolic link of
that name is an error), and then takes the place of the target. A symbolic link at the target is replaced, never
followed: a folder that came from elsewhere can't make noisescope write outside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from noisescope.errors import InvalidInput

_DEVICES = (Path("/dev"), Path("/dev/fd"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write into, which becomes `path` at the end of the block; on an error it is removed.

    A device or a pipe (`-o /dev/stdout`) has no contents to keep whole: it is written as it is.
    """
    if path.absolute().parent in _DEVICES:
        with path.open("wb") as file:
            yield file
        return
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x+b") as file:  # O_EXCL: refuses what is there already, links included
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong before says more
            part.unlink()
        raise


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file, creating folders as needed; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def write_sealed(path: Path, content: bytes) -> Path:
    """Write a file that `read_sealed` reads, behind its SHA-256."""
    return write_file(path, hashlib.sha256(content).digest() + content)


def read_sealed(path: Path) -> bytes | None:
    """What `write_sealed` wrote; None if there is no file, or a damaged one, which is then created again."""
    raw = path.read_bytes() if path.is_file() else b""
    seal, content = raw[:32], raw[32:]
    return content if hashlib.sha256(content).digest() == seal else None


def folder_inside(folder: Path, name: str) -> Path:
    """A subfolder of an output folder, created if missing. A symbolic link there would lead out of it."""
    inner = folder / name
    if inner.is_symlink():
        raise InvalidInput(f"{inner} is a symbolic link: remove it, or use another folder (-o)")
    inner.mkdir(parents=True, exist_ok=True)
    return inner
