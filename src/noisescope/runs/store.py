"""Results on disk: one SQLite file a run, in WAL mode, a row the moment a trial ends.

A killed run loses at most the trial it was in. Only the driver writes. Arrays are kept as .npy bytes inside an .npz
without pickles.
"""

from __future__ import annotations

import io
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from noisescope.errors import InvalidInput
from noisescope.trials import Result, Trial

SCHEMA_VERSION = 1
FILE = "run.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    id TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    measure TEXT NOT NULL,
    result TEXT NOT NULL,
    arrays BLOB,
    error TEXT NOT NULL,
    seconds REAL NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS gates (number INTEGER PRIMARY KEY, result TEXT NOT NULL);
"""


class Store(Mapping[str, Result]):
    """The results of a run by trial id; reads come from memory, writes go to the file at once.

    `folder=None` keeps everything in memory.
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
        self._lock = self._hold() if create and self.path is not None else None
        try:
            self._db = self._connect()
        except InvalidInput:
            if self._lock is not None:
                self._lock.close()
            raise
        self._results: dict[str, Result] = {}
        self.seconds: dict[str, float] = {}
        kept = self._db.execute("SELECT id, result, arrays, error, seconds FROM trials")
        for identity, result, arrays, failure, seconds in kept:
            self._results[identity] = _decode(result, arrays, failure)
            self.seconds[identity] = seconds

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

    def _connect(self) -> sqlite3.Connection:
        name = ":memory:" if self.path is None else str(self.path)
        try:
            db = sqlite3.connect(name, timeout=30, isolation_level=None)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")  # in WAL mode a killed process loses nothing that was committed
            db.executescript(_TABLES)
            found = db.execute("SELECT value FROM about WHERE key = 'schema_version'").fetchone()
        except sqlite3.DatabaseError as error:
            raise InvalidInput(f"{name} can't be used as a run's store: {error}. Use another folder (-o)") from error
        if found is None:
            db.execute("INSERT OR IGNORE INTO about VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        elif int(found[0]) != SCHEMA_VERSION:
            raise InvalidInput(
                f"{name} has schema version {found[0]}, this noisescope writes {SCHEMA_VERSION}: use another folder"
            )
        return db

    # -- the mapping

    def __getitem__(self, identity: str) -> Result:
        return self._results[identity]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    # -- writing

    def put(self, trial: Trial, result: Result, seconds: float) -> None:
        """Keep a result; a second one for the same trial is refused, for nothing may be measured twice."""
        if trial.id in self._results and not self._results[trial.id].failed:
            raise AssertionError(f"trial {trial.id} is stored already")
        record = (trial.id, trial.content(), trial.measure, *_encode(result), result.error, seconds)
        self._db.execute(
            "INSERT OR REPLACE INTO trials (id, content, measure, result, arrays, error, seconds) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            record,
        )
        self._results[trial.id] = _decode(record[3], record[4], result.error)  # as a resumed run would read it
        self.seconds[trial.id] = seconds

    def forget_failures(self) -> int:
        """Failed rows go, so that they run again."""
        failed = [identity for identity, result in self._results.items() if result.failed]
        for identity in failed:
            self._db.execute("DELETE FROM trials WHERE id = ?", (identity,))
            del self._results[identity]
        return len(failed)

    # -- about the run

    def about(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT key, value FROM about WHERE key != 'schema_version'")
        return {key: json.loads(value) for key, value in rows}

    def measures(self) -> dict[str, int]:
        """How many trials of each kind are kept."""
        return dict(self._db.execute("SELECT measure, COUNT(*) FROM trials GROUP BY measure ORDER BY measure"))

    def note(self, **facts: Any) -> None:
        """Keep facts about the run itself: the command's settings, versions, dates."""
        for key, value in facts.items():
            self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, json.dumps(value)))

    def add_gate(self, result: Mapping[str, Any]) -> None:
        """Keep what a gate said, after those before it."""
        self._db.execute("INSERT INTO gates (result) VALUES (?)", (json.dumps(result, allow_nan=False),))

    def gates(self) -> list[dict[str, Any]]:
        """What gates said, the oldest first."""
        return [json.loads(text) for (text,) in self._db.execute("SELECT result FROM gates ORDER BY number")]

    def close(self) -> None:
        self._db.close()
        if self._lock is not None and self.path is not None:
            self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encode(result: Result) -> tuple[str, bytes | None]:
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


def _finite(value: Any) -> Any:
    """Facts with None where a number is not finite: JSON has no NaN."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, (list, tuple)) else value


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _decode(text: str, arrays: bytes | None, error: str) -> Result:
    data = json.loads(text)
    loaded: dict[str, Any] = {}
    if arrays:
        with np.load(io.BytesIO(arrays), allow_pickle=False) as archive:
            loaded = {name: archive[name] for name in archive.files}
    values = {name: tuple(column) for name, column in data["values"].items()}
    return Result(tuple(data["samples"]), values, data["facts"], loaded, error)
