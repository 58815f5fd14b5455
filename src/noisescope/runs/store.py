"""Results on disk: one SQLite file per run, in WAL mode, a row the moment a trial ends.

A killed run loses at most the trial it was in. Only the driver writes. A row holds the result as JSON text, its arrays
as .npz bytes without pickles, and a SHA-256 of its own, verified on reading: what a disk or a copy damaged is measured
again and never believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from noisescope.errors import InvalidInput
from noisescope.foreign import MIB, FileKind, members, parse_json
from noisescope.plain_text import LONG, one_line, shown
from noisescope.trials import Result, Trial

Cell = str | bytes | float | int | None  # what SQLite gives back

STORED = FileKind("part of a run that noisescope wrote", "Run the command again into another folder (-o)", max_depth=96)
_MOST_ARRAY_BYTES = 4096 * MIB  # of one trial, unpacked
SCHEMA_VERSION = 2
FILE = "run.sqlite"
_VERSION = "schema_version"


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
INSERT OR IGNORE INTO about VALUES
    ('{_VERSION}', '{SCHEMA_VERSION}', '{checksum(_VERSION, str(SCHEMA_VERSION))}');
COMMIT;
"""


class Store(Mapping[str, Result]):
    """The results of a run by trial id; reads come from memory, writes go to the file at once.

    `folder=None` keeps everything in memory. `damaged` counts the trials whose row failed its checksum: they are no
    results here, so they are measured again. A store that is opened to write drops such rows from the file.
    """

    def __init__(self, folder: str | Path | None, *, create: bool = True) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        if self.path is not None:
            if not create and not self.path.exists():
                raise InvalidInput(
                    f"{folder} holds no run (no {FILE} in it). `noisescope runs list` shows where some are"
                )
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidInput(
                    f"can't write into {folder}: {error.strerror or error}. Choose another with -o"
                ) from error
        self._results: dict[str, Result] = {}
        self._measures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.damaged = self.damaged_gates = 0  # the second is of the last gates()
        with contextlib.ExitStack() as opened:
            self._lock = self._hold() if create and self.path is not None else None
            if self._lock is not None:
                opened.callback(self._lock.close)
            self._db = self._connect()
            opened.callback(self._db.close)
            self._read(drop_damaged=create)
            opened.pop_all()

    def _hold(self) -> Any:
        """One writer a folder: two would measure everything twice. The lock goes with the process, however it ends."""
        assert self.path is not None
        try:
            import fcntl
        except ImportError:  # not on this system: two writers are the user's care
            return None
        lock = self.path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise InvalidInput(
                f"another process is writing into {self.path.parent}: wait for it, or use another folder (-o)"
            ) from None
        return lock

    @property
    def _name(self) -> str:
        return ":memory:" if self.path is None else str(self.path)

    def _connect(self) -> sqlite3.Connection:
        """The open database, of this version; another one is refused before anything is written into it."""
        with contextlib.ExitStack() as opened:
            try:
                db = sqlite3.connect(self._name, timeout=30, isolation_level=None)
                opened.callback(db.close)
                db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # its checksum shows damaged text
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")  # in WAL mode a killed process loses nothing that was committed
                if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,):
                    db.executescript(_TABLES)
                found = db.execute("SELECT value FROM about WHERE key = ?", (_VERSION,)).fetchone()
            except sqlite3.DatabaseError as error:
                raise InvalidInput(
                    f"{self._name} can't be used as a run's store: {one_line(str(error), LONG)}. Use another "
                    "folder (-o)"
                ) from error
            if found != (str(SCHEMA_VERSION),):
                has = "no schema version" if found is None else f"schema version {found[0]}"
                raise InvalidInput(
                    f"{self._name} has {has}, and this noisescope reads version {SCHEMA_VERSION} only: run the "
                    "command again into another folder (-o), or open this one with the noisescope that wrote it"
                )
            opened.pop_all()
        return db

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """What SQLite itself can't read is refused in one line."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise InvalidInput(
                f"{self._name} is damaged ({one_line(str(error), LONG)}): restore it from a copy, or run the command "
                "again into another folder (-o)"
            ) from error

    def _read(self, *, drop_damaged: bool) -> None:
        """Every row that is intact; the others are counted."""
        damaged: list[tuple[int]] = []
        with self._reading():
            rows = self._db.execute(
                "SELECT rowid, checksum, id, content, measure, result, arrays, error, seconds FROM trials"
            )
            for number, seal, identity, content, measure, result, arrays, error, seconds in rows:
                cells = (identity, content, measure, result, arrays, error, seconds)
                if checksum(*cells) != seal or not is_content_of(identity, content):
                    damaged.append((number,))
                    continue
                self._results[identity] = decode(result, arrays, error)
                self._measures[identity] = measure
                self.seconds[identity] = seconds
            if damaged and drop_damaged:
                self._drop(damaged)
        self.damaged = len(damaged)

    def _drop(self, rows: list[tuple[int]]) -> None:
        """Delete trials by row number; refused where more than single rows is damaged."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        self._db.execute("REINDEX trials")  # where an id was damaged, the index does not know it
        self._db.executemany("DELETE FROM trials WHERE rowid = ?", rows)

    def __getitem__(self, identity: str) -> Result:
        return self._results[identity]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def put(self, trial: Trial, result: Result, seconds: float) -> None:
        """Keep a result; a second one for the same trial is refused, for nothing may be measured twice."""
        if trial.id in self._results and not self._results[trial.id].failed:
            raise AssertionError(f"trial {trial.id} is stored already")
        text, arrays = encode(result)
        cells = (trial.id, trial.content(), trial.measure, text, arrays, result.error, float(seconds))
        self._db.execute(
            "INSERT OR REPLACE INTO trials (id, content, measure, result, arrays, error, seconds, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*cells, checksum(*cells)),
        )
        self._results[trial.id] = decode(text, arrays, result.error)  # as a resumed run would read it
        self._measures[trial.id] = trial.measure
        self.seconds[trial.id] = seconds

    def forget_failures(self) -> int:
        """Failed rows go, so that they run again."""
        failed = [identity for identity, result in self._results.items() if result.failed]
        for identity in failed:
            self._db.execute("DELETE FROM trials WHERE id = ?", (identity,))
            del self._results[identity], self._measures[identity], self.seconds[identity]
        return len(failed)

    def about(self) -> dict[str, Any]:
        """Everything that was noted."""
        with self._reading():
            rows = self._db.execute("SELECT key, value, checksum FROM about WHERE key != ?", (_VERSION,)).fetchall()
        return {key: self._noted(key, value, seal) for key, value, seal in rows}

    def fact(self, name: str) -> Any:
        """One thing that was noted; None where it was not."""
        with self._reading():
            row = self._db.execute("SELECT value, checksum FROM about WHERE key = ?", (name,)).fetchone()
        return None if row is None else self._noted(name, *row)

    def _noted(self, key: str, value: str, seal: str) -> Any:
        if checksum(key, value) != seal:
            folder = "" if self.path is None else f" with -o {self.path.parent}"
            raise InvalidInput(
                f"{key!r} in {self._name} fails its checksum, so the file is damaged there: run the same command again"
                f"{folder}, which keeps intact trials and writes it anew; if this stays, use another folder"
            )
        return parse_json(value, f"{key!r} in {self._name}", STORED)

    def measures(self) -> dict[str, int]:
        """How many trials of each kind are kept."""
        return dict(sorted(Counter(self._measures.values()).items()))

    def contents(self) -> dict[str, str]:
        """The canonical JSON of every trial that is kept, by id."""
        with self._reading():
            rows = self._db.execute("SELECT id, content FROM trials").fetchall()
        return {identity: text for identity, text in rows if identity in self and is_content_of(identity, text)}

    def damage(self) -> list[str]:
        """For the notes of a report: what was found damaged, in a sentence."""
        if not self.damaged:
            return []
        what = "1 stored trial" if self.damaged == 1 else f"{self.damaged} stored trials"
        return [f"{what} in {FILE} failed the checksum: discarded, and measured again where this run needed the result"]

    def note(self, **facts: Any) -> None:
        """Keep facts about the run itself: the command's settings, versions, dates."""
        for key, value in facts.items():
            text = json.dumps(value)
            self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (key, text, checksum(key, text)))

    def add_gate(self, result: Mapping[str, Any]) -> None:
        """Keep a gate's result, after those before it."""
        text = json.dumps(result, allow_nan=False)
        (number,) = self._db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM gates").fetchone()
        self._db.execute("INSERT INTO gates VALUES (?, ?, ?)", (number, text, checksum(number, text)))

    def gates(self) -> list[dict[str, Any]]:
        """Results of gates, the oldest first; damaged ones are left out and counted in `damaged_gates`."""
        with self._reading():
            rows = self._db.execute("SELECT number, result, checksum FROM gates ORDER BY number").fetchall()
        intact = [text for number, text, seal in rows if checksum(number, text) == seal]
        self.damaged_gates = len(rows) - len(intact)
        return [parse_json(text, f"a gate in {self._name}", STORED) for text in intact]

    def close(self) -> None:
        self._db.close()
        if self._lock is not None and self.path is not None:
            self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_content_of(identity: Cell, content: Cell) -> bool:
    """Whether a trial's id is the hash of its content (trials.content_id)."""
    return isinstance(content, str) and hashlib.sha256(content.encode("utf-8", "replace")).hexdigest() == identity


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
    """The result that `encode` wrote; refused where it is anything else, for a folder may come from elsewhere."""
    data = members(parse_json(text, "a result", STORED), "a result", STORED)
    samples, values, facts = (data.get(name, ()) for name in ("samples", "values", "facts"))
    numbers = isinstance(values, dict) and all(_is_column(column) for column in values.values())
    if not isinstance(samples, list) or set(map(type, samples)) - {int} or not numbers or not isinstance(facts, dict):
        raise STORED.refuse("a result", f"samples, values and facts were expected, got {shown(data)}")
    loaded: dict[str, Any] = {}
    if arrays:
        with STORED.explaining("the arrays of a result"), np.load(io.BytesIO(arrays), allow_pickle=False) as archive:
            if sum(member.file_size for member in archive.zip.infolist()) > _MOST_ARRAY_BYTES:
                raise STORED.refuse("the arrays of a result", f"more than {_MOST_ARRAY_BYTES:,} bytes")
            loaded = {name: archive[name] for name in archive.files}
    return Result(tuple(samples), {name: tuple(column) for name, column in values.items()}, facts, loaded, error)


def _is_column(column: Any) -> bool:
    return isinstance(column, list) and not set(map(type, column)) - {float, int, type(None)}


def _finite(value: Any) -> Any:
    """Facts with None where a number is not finite: JSON has no NaN."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
