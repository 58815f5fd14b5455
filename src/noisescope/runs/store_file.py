"""The file behind a store: only regular files with the expected tables are opened, one writer locks it, and its removal
is noticed. Problems are reported in one line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from noisescope.errors import InvalidInput
from noisescope.runs.store_rows import checksum
from noisescope.text_escaping import LONG, cut, one_line

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
