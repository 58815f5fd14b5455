"""Stores results on disk: one SQLite file per run, in WAL mode, with a row written as soon as a trial ends.

A killed run loses at most the current trial. Only the driver writes. A row holds the result as JSON text, its arrays as
.npz bytes without pickles, and a SHA-256 that is verified on reading: damaged results are measured again and never
trusted. Opening reads no trials; each is read on demand.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.runs import store_file
from noisescope.runs.store_file import FILE as FILE
from noisescope.runs.store_file import LOCK, RESULTS, STORED, VERSION, Cell, checksum, decode, encode, is_intact
from noisescope.trials import Result, Trial
from noisescope.untrusted_files import parse_json

_ROW = "SELECT checksum, id, content, measure, result, arrays, error, seconds FROM trials"


@dataclass(frozen=True)
class StoreCounts:
    """A store in numbers, from its index: no trial is read or verified for them."""

    trials: int
    seconds: float
    measures: Mapping[str, int]
    errors: Mapping[str, int]  # of failed trials: how many have this message

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


@dataclass(frozen=True)
class StoreCheck:
    """The result of checking every row."""

    trials: int
    damaged: int  # trials whose results are damaged
    damaged_gates: int
    damaged_notes: tuple[str, ...]
    structure: str  # what SQLite says of pages and indexes; "ok"

    @property
    def sound(self) -> bool:
        return not (self.damaged or self.damaged_gates or self.damaged_notes) and self.structure == "ok"


class Store(Mapping[str, Result]):
    """The results of a run by trial id; a trial is read and verified on first access, and writes go to the file.

    `folder=None` keeps everything in memory. A trial whose row fails its checksum does not count as a result, so it is
    measured
    again; `damaged` counts those met so far. A store that is opened to write drops all such rows when it meets one.
    """

    def __init__(self, folder: str | Path | None, *, create: bool = True) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        self._write = create
        self._known: dict[str, Result] = {}
        self._damaged: set[str] = set()
        self.added = 0  # trials put since it was opened
        self._dropped = self.damaged_gates = 0  # the second is of the last gates()
        with contextlib.ExitStack() as opened:
            self._lock = None if self.path is None else self._prepare(self.path.parent)
            if self._lock is not None:
                opened.callback(store_file.release_lock, self._lock)
            self._db = store_file.connect(self.path, write=create)
            self._number = None if self.path is None else store_file.file_number(self.path)
            with self._reading():
                self._is_resumed = self._db.execute("SELECT 1 FROM trials LIMIT 1").fetchone() is not None
            opened.pop_all()

    def _prepare(self, folder: Path) -> int | None:
        """The folder of a writer, made and locked; that of a reader, with a run in it."""
        if not self._write:
            store_file.refuse_links(folder)
            if not (folder / FILE).exists():
                raise InvalidInput(
                    f"{folder} holds no run (it has no {FILE}). `noisescope runs list` shows where runs are"
                )
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store_file.refuse_links(folder)
            return store_file.hold_lock(folder / LOCK)
        except OSError as error:
            raise InvalidInput(
                f"can't write into {folder}: {error.strerror or error}. Choose another with -o"
            ) from error

    @property
    def _name(self) -> str:
        return ":memory:" if self.path is None else str(self.path)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return store_file.reading(self._name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Around each change: SQLite would keep writing to a deleted file, and all of it would be lost."""
        with store_file.writing(self._name):
            yield
        self._require_file()

    def _require_file(self) -> None:
        if self.path is not None and store_file.file_number(self.path) != self._number:
            raise InvalidInput(
                f"{self.path} was removed or replaced while this run was writing to it, so its results are lost: "
                f"run the same command again, or use another folder (-o)"
            )

    # -- trials

    def __getitem__(self, identity: str) -> Result:
        if identity not in self._known:
            found = self._read(identity)
            if found is None:
                raise KeyError(identity)
            self._known[identity] = found
        return self._known[identity]

    def _read(self, identity: str, *, again: bool = False) -> Result | None:
        """A trial from the file; None if it is missing or damaged."""
        with self._reading():
            # by way of the row's number: the id is to be the table's, and not the index's
            one = f"{_ROW} WHERE rowid = (SELECT rowid FROM trials WHERE id = ?)"
            row = self._db.execute(one, (identity,)).fetchone()
        if row is None:
            return None
        found = _result(row)
        if found is not None and row[1] == identity:
            return found
        self._damaged.add(identity)
        if not self._write or again:
            return None
        self._drop_damaged()
        return self._read(identity, again=True)

    def _rows(self) -> Iterator[tuple[int, tuple[Cell, ...], Result | None]]:
        """Every row of the table with its number, and its content: None if it is damaged."""
        with self._reading():
            for number, *row in self._db.execute(f"{_ROW.replace('checksum', 'rowid, checksum', 1)} NOT INDEXED"):
                yield number, tuple(row), _result(row)

    def _drop_damaged(self) -> None:
        """Rewrite the intact rows only; an error if more than single rows are damaged.

        Deleting rows one by one would need an index that still fits: where an id was hit it does not.
        """
        with self._reading():
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        damaged = [(number,) for number, _, result in self._rows() if result is None]
        with self._writing(), self._db:  # the connection commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TEMP TABLE damaged (number INTEGER PRIMARY KEY)")
            self._db.executemany("INSERT INTO damaged VALUES (?)", damaged)
            self._db.execute(
                "CREATE TEMP TABLE intact AS SELECT * FROM trials NOT INDEXED WHERE rowid NOT IN damaged ORDER BY rowid"
            )
            self._db.execute("DELETE FROM trials")
            self._db.execute("INSERT OR REPLACE INTO trials SELECT * FROM intact")
            self._db.execute("DROP TABLE temp.intact")
            self._db.execute("DROP TABLE temp.damaged")
        self._dropped += len(damaged)
        self._damaged.clear()

    def mend(self) -> None:
        """Check every row, and rewrite the intact ones if one is damaged or an index does not match."""
        found = self.check()
        if found.damaged or found.structure != "ok":
            self._drop_damaged()

    @property
    def damaged(self) -> int:
        """The number of damaged trials found so far."""
        return self._dropped + len(self._damaged)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(str(row[1]) for _, row, result in self._rows() if result is not None))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def put(self, trial: Trial, result: Result, seconds: float) -> None:
        """Store a result; a second one for the same trial is an error, because nothing may be measured twice."""
        before = self.get(trial.id)
        if before is not None and not before.failed:
            raise AssertionError(f"trial {trial.id} is already stored")
        text, arrays = encode(result)
        cells = (trial.id, trial.content(), trial.measure, text, arrays, result.error, float(seconds))
        with self._writing():
            self._db.execute(
                "INSERT OR REPLACE INTO trials (id, content, measure, result, arrays, error, seconds, checksum) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*cells, checksum(*cells)),
            )
        self._known[trial.id] = decode(text, arrays, result.error)  # as a resumed run would read it
        self.added += 1

    def forget_failures(self) -> int:
        """Delete failed rows, so that they run again."""
        with self._reading():
            found = self._db.execute("SELECT id FROM trials WHERE error != ''").fetchall()
        failed = [identity for (identity,) in found if identity in self]
        for identity in failed:
            with self._writing():
                self._db.execute("DELETE FROM trials WHERE id = ?", (identity,))
            del self._known[identity]
        return len(failed)

    def contents(self) -> dict[str, str]:
        """The canonical JSON of every stored trial, by id."""
        return {str(row[1]): str(row[2]) for _, row, result in self._rows() if result is not None}

    def interpreting(self) -> contextlib.AbstractContextManager[None]:
        """Around what is concluded from results: where they were stored before, by whomever, a surprise is theirs."""
        return RESULTS.explaining(self._name) if self._is_resumed else contextlib.nullcontext()

    # -- the run itself

    def about(self) -> dict[str, Any]:
        """All stored facts."""
        with self._reading():
            rows = self._db.execute("SELECT key, value, checksum FROM about WHERE key != ?", (VERSION,)).fetchall()
        return {key: self._noted(key, value, seal) for key, value, seal in rows}

    def fact(self, name: str) -> Any:
        """One stored fact; None if it was not stored."""
        with self._reading():
            row = self._db.execute("SELECT value, checksum FROM about WHERE key = ?", (name,)).fetchone()
        return None if row is None else self._noted(name, *row)

    def _noted(self, key: str, value: str, seal: str) -> Any:
        if checksum(key, value) != seal:
            folder = "" if self.path is None else f" with -o {self.path.parent}"
            raise InvalidInput(
                f"{key!r} in {self._name} fails its checksum, so the file is damaged: run the same command "
                f"again{folder}, "
                "which keeps intact trials and rewrites the rest; if the error persists, use another folder"
            )
        return parse_json(value, f"{key!r} in {self._name}", STORED)

    def counts(self) -> StoreCounts:
        """How many trials of each kind there are, how many failed and why, and what they took."""
        measures: dict[str, int] = {}
        errors: dict[str, int] = {}
        spent = 0.0
        with self._reading():
            rows = self._db.execute(
                "SELECT measure, error, COUNT(*), SUM(seconds) FROM trials GROUP BY 1, 2"
            ).fetchall()
            if not all(map(_is_count, rows)):
                raise sqlite3.DatabaseError("a trial without measure, message or time")
        for measure, error, count, seconds in rows:
            measures[measure] = measures.get(measure, 0) + count
            spent += seconds
            if error:
                errors[error] = errors.get(error, 0) + count
        return StoreCounts(sum(measures.values()), spent, measures, errors)

    def check(self) -> StoreCheck:
        """Check every row and page of the file; nothing is changed."""
        with self._reading():
            (structure,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            notes = self._db.execute("SELECT key, value, checksum FROM about").fetchall()
        whole = [result is not None for _, _, result in self._rows()]
        self.gates()
        wrong = tuple(str(key) for key, value, seal in notes if checksum(key, value) != seal)
        return StoreCheck(len(whole), whole.count(False), self.damaged_gates, wrong, structure)

    def damage(self) -> list[str]:
        """For the notes of a report: a sentence about damaged rows."""
        if not self.damaged:
            return []
        what = "1 stored trial" if self.damaged == 1 else f"{self.damaged} stored trials"
        return [f"{what} in {FILE} failed the checksum: discarded, and measured again if this run needed the result"]

    def note(self, **facts: Any) -> None:
        """Store facts about the run itself: the command's settings, versions, dates."""
        for key, value in facts.items():
            text = json.dumps(value)
            with self._writing():
                self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (key, text, checksum(key, text)))

    def add_gate(self, result: Mapping[str, Any]) -> None:
        """Store a gate's result, after the earlier ones."""
        text = json.dumps(result, allow_nan=False)
        with self._writing():
            (number,) = self._db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM gates").fetchone()
            self._db.execute("INSERT INTO gates VALUES (?, ?, ?)", (number, text, checksum(number, text)))

    def gates(self) -> list[dict[str, Any]]:
        """Results of gates, the oldest first; damaged ones are skipped and counted in `damaged_gates`."""
        with self._reading():
            rows = self._db.execute("SELECT number, result, checksum FROM gates ORDER BY number").fetchall()
        intact = [text for number, text, seal in rows if checksum(number, text) == seal]
        self.damaged_gates = len(rows) - len(intact)
        return [parse_json(text, f"a gate in {self._name}", STORED) for text in intact]

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            store_file.release_lock(self._lock)
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close()
        if kind is None and self._write:
            self._require_file()


def _is_count(row: Any) -> bool:
    """SQLite accepts any type of value in any column, and infinite sums."""
    measure, error, _, seconds = row
    return isinstance(measure, str) and isinstance(error, str) and isinstance(seconds, float) and seconds < math.inf


def _result(row: Any) -> Result | None:
    """The content of a row (checksum, id, content, measure, result, arrays, error, seconds); None if it is damaged."""
    seal, identity, content, measure, result, arrays, error, seconds = row
    if not is_intact(seal, identity, content, measure, result, arrays, error, seconds):
        return None
    try:
        return decode(result, arrays, error)
    except InvalidInput:  # the checksum was made to match
        return None
