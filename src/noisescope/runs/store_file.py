"""The file behind a store: only regular files with the expected tables are opened, one writer locks it, and its removal
is noticed. Problems are reported in one line. A row is a result as JSON text with its arrays as .npz bytes, sealed by a
checksum. No pickles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from noisescope.errors import InvalidInput
from noisescope.text_escaping import LONG, cut, one_line, shown
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


SCHEMA_VERSION = 2
FILE = "run.sqlite"
LOCK = "run.lock"
VERSION = "schema_version"
_BESIDE = ("", "-wal", "-shm", "-journal")  # what SQLite opens by itself

_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    id TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    measure TEXT NOT NULL,
    result TEXT NOT NULL,
    arrays BLOB,
    error TEXT NOT NULL,
    seconds REAL NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    checksum TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS gates (number INTEGER PRIMARY KEY, result TEXT NOT NULL, checksum TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS counts ON trials (measure, error, seconds);
INSERT OR IGNORE INTO about VALUES
    ('{VERSION}', '{SCHEMA_VERSION}', '{checksum(VERSION, str(SCHEMA_VERSION))}');
COMMIT;
"""
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)  # SQLite's own message may hold bytes of a damaged schema
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@functools.cache
def _our_schema() -> frozenset[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(_TABLES)
        return frozenset(db.execute(_SCHEMA))


def connect(path: Path | None, *, write: bool) -> sqlite3.Connection:
    """Open the database of this version; anything else is rejected before it is written to. None is in memory."""
    name = ":memory:" if path is None else str(path)
    with contextlib.ExitStack() as opened, using(name):
        db = _open(path, write=write)
        opened.callback(db.close)
        if write or path is None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")  # in WAL mode a killed process loses nothing that was committed
            if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,):
                db.executescript(_TABLES)
        found = db.execute("SELECT value FROM about WHERE key = ?", (VERSION,)).fetchone()
        if found != (str(SCHEMA_VERSION),):
            has = "no schema version" if found is None else f"schema version {cut(str(found[0]))}"
            raise InvalidInput(
                f"{name} has {has}, but this noisescope reads only version {SCHEMA_VERSION}: run the command again "
                f"with another folder (-o), or open this one with the noisescope version that wrote it"
            )
        strange = sorted(str(row[1]) for row in db.execute(_SCHEMA) if row not in _our_schema())
        if strange:
            raise InvalidInput(
                f"{name} contains unexpected objects ({cut(', '.join(strange))}): it was altered, so use another "
                f"folder (-o)"
            )
        if write:
            db.executescript(_TABLES)  # stores of this version that were made before a table or an index was added
        opened.pop_all()
    return db


def _open(path: Path | None, *, write: bool) -> sqlite3.Connection:
    address = ":memory:" if path is None else f"{path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"
    if path is not None and not write and not os.access(path.parent, os.W_OK) and not _has_log(path):
        address += "&immutable=1"  # SQLite's own files beside it can't be made, and are not needed
    db = sqlite3.connect(address, uri=True, timeout=30, isolation_level=None)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # its checksum shows damaged text
    db.execute("PRAGMA trusted_schema=OFF")
    return db


def _has_log(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Report in one line what SQLite can't open."""
    try:
        yield
    except _UNREADABLE as error:
        raise InvalidInput(f"{name} can't be used as a run store: {_reason(error)}. Use another folder (-o)") from error


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Report in one line what SQLite can't read."""
    try:
        yield
    except _UNREADABLE as error:
        raise InvalidInput(
            f"{name} is damaged ({_reason(error)}): restore it from a copy, or run the command again with another "
            f"folder (-o)"
        ) from error


@contextlib.contextmanager
def writing(name: str) -> Iterator[None]:
    """A full disk, a read-only file system, a failing device: one line, and how to continue."""
    try:
        yield
    except (*_UNREADABLE, OSError) as error:
        raise InvalidInput(
            f"can't write into {name}: {_reason(error)}. Stored trials are kept: run the same command again once "
            f"the folder is writable, or use another folder (-o)"
        ) from error


def _reason(error: Exception) -> str:
    return one_line(str(error), LONG)  # names in a foreign schema are in it


def refuse_links(folder: Path) -> None:
    """A run's files must be regular files: a link, a pipe or a device would lead outside the folder."""
    for name in (LOCK, *(FILE + ending for ending in _BESIDE)):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                raise InvalidInput(
                    f"{folder / name} is not a regular file (a symbolic link, a pipe or a folder): remove it, or use "
                    "another folder (-o)"
                )


def hold_lock(path: Path) -> int | None:
    """One writer per folder; the descriptor of the lock, which goes with the process however it ends.

    The lock file is never removed: a process that opened it before the removal and one that created it again would both
    hold a lock. If another program removes it, the current file counts.
    """
    try:
        import fcntl
    except ImportError:  # not on this system: two writers are the user's care
        return None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(
                    f"another process is writing to {path.parent}: wait for it to finish, or use another folder (-o)"
                ) from None
            if file_number(path) == _number_of(os.fstat(handle)):
                opened.pop_all()
                return handle


def release_lock(handle: int) -> None:
    """Also where a forked child still has the descriptor."""
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def file_number(path: Path) -> tuple[int, int] | None:
    """Distinguishes a file from another one of the same name; None if there is none."""
    try:
        return _number_of(path.stat())
    except OSError:
        return None


def _number_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
