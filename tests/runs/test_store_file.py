"""The file behind a store: links, locks, full disks, folders that go away, foreign tables, and what opening reads."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.runs import store as store_module
from noisescope.runs import store_file
from noisescope.runs.store import FILE, Store
from noisescope.trials import Conditions, Result, Slice, Trial

TRIALS = [Trial(Conditions("m", "float32", "cpu", "sdpa", 1), "score", Slice("d", n, n + 1)) for n in range(5)]
RESULT = Result((0,), {"kl": (0.5,)})


def filled(folder: Path) -> Path:
    with Store(folder) as store:
        store.note(asked={})
        for trial in TRIALS:
            store.put(trial, RESULT, 0.5)
    return folder


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_listing_and_showing_read_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening costs the same for 5 trials and for 200,000: notes and an index are all that is read."""
    filled(tmp_path)
    monkeypatch.setattr(store_module, "_result", lambda row: pytest.fail("a trial was read"))
    assert "5 trials" in call("runs", "list", tmp_path)
    assert "score: 5 trials" in call("runs", "show", tmp_path) and "2.5 s measured" in call("runs", "show", tmp_path)
    with Store(tmp_path) as store:
        assert store.counts().trials == 5
    with Store(tmp_path, create=False) as store:
        plan = store._db.execute("EXPLAIN QUERY PLAN SELECT measure, error, SUM(seconds) FROM trials GROUP BY 1, 2")
        assert "COVERING INDEX counts" in str(plan.fetchall())


def test_check_reports_damage(tmp_path: Path) -> None:
    """Counted, exit code 1, nothing changed; JSON says the same."""
    filled(tmp_path)
    assert call("runs", "check", tmp_path) == "5 trials, 0 damaged"
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE trials SET result = replace(result, '0.5', '0.7') WHERE rowid <= 2")
        db.execute("UPDATE about SET value = '{\"a\": 1}' WHERE key = 'asked'")
    db.close()
    said = call("runs", "check", tmp_path, code=1)
    assert "5 trials, 2 damaged" in said and "damaged: 'asked', written anew" in said
    assert f"noisescope runs resume {tmp_path}" in said
    found = json.loads(CliRunner().invoke(app, ["runs", "check", str(tmp_path), "--json"]).stdout)
    assert (found["trials"], found["damaged"], found["damaged_notes"]) == (5, 2, ["asked"])


@pytest.mark.parametrize("name", [FILE, "run.lock", f"{FILE}-wal", f"{FILE}-journal"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """A link would lead out of the folder, a pipe would hang."""
    run, target = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    target.write_text("mine")
    (run / name).symlink_to(target) if kind == "link" else os.mkfifo(run / name)
    with pytest.raises(InvalidInput, match=f"{name} is not a regular file"):
        Store(run)
    if name != FILE:
        filled(tmp_path / "other")
        shutil.copy(tmp_path / "other" / FILE, run / FILE)
    with pytest.raises(InvalidInput, match=f"{name} is not a regular file"):
        Store(run, create=False)
    assert target.read_text() == "mine"


def test_the_lock_outlives_its_holder_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never removed by us. Removed by others between opening and locking, the one that is there now is locked."""
    filled(tmp_path)
    lock = tmp_path / "run.lock"
    assert lock.exists()
    number = lock.stat().st_ino
    with Store(tmp_path):
        assert lock.stat().st_ino == number
    opened: list[int] = []
    real = os.open

    def removed_once_opened(path: Any, *arguments: Any) -> int:
        handle = real(path, *arguments)
        if not opened:
            lock.unlink()
        opened.append(handle)
        return handle

    monkeypatch.setattr(os, "open", removed_once_opened)
    handle = store_file.hold_lock(lock)
    assert len(opened) == 2 and handle == opened[1] and os.fstat(handle).st_ino == lock.stat().st_ino
    with pytest.raises(InvalidInput, match="another process is writing"):
        store_file.hold_lock(lock)
    store_file.release_lock(handle)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER evil AFTER INSERT ON trials BEGIN DELETE FROM about; END",
        "CREATE VIEW more AS SELECT * FROM trials",
        "CREATE TABLE more (x)",
        "DROP INDEX counts; CREATE INDEX counts ON trials (seconds)",
    ],
)
def test_a_file_with_other_tables_is_refused(tmp_path: Path, statement: str) -> None:
    filled(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.executescript(statement)
    db.close()
    before = (tmp_path / FILE).read_bytes()
    for create in (True, False):
        with pytest.raises(InvalidInput, match=r"contains unexpected objects \((evil|more|counts)\): it was altered"):
            Store(tmp_path, create=create)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_store_without_the_index_gets_it(tmp_path: Path) -> None:
    """Stores of version 2 from before the index: read as they are, and indexed by the next writer."""
    filled(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DROP INDEX counts")
    db.close()
    with Store(tmp_path, create=False) as store:
        assert store.counts().trials == 5
    with Store(tmp_path):
        pass
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'counts'").fetchone() == (1,)
    db.close()


def test_reading_makes_no_run(tmp_path: Path) -> None:
    """An empty file is no store, and a reader does not make it one."""
    (tmp_path / FILE).touch()
    with pytest.raises(InvalidInput, match="can't be used as a run store"):
        Store(tmp_path, create=False)
    assert (tmp_path / FILE).stat().st_size == 0 and not (tmp_path / "run.lock").exists()


def test_a_folder_that_can_not_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a read-only disk: SQLite is told to make no files beside it."""
    filled(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = sorted(path.name for path in tmp_path.iterdir())
    with Store(tmp_path, create=False) as store:
        assert store[TRIALS[0].id].values == RESULT.values and store.counts().trials == 5
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed"])
def test_a_file_that_goes_away_is_noticed(tmp_path: Path, how: str) -> None:
    """SQLite would write on into a deleted file, and the run would end well with nothing kept."""
    store = Store(tmp_path / "run")
    store.put(TRIALS[0], RESULT, 0.5)
    if how == "folder removed":
        shutil.rmtree(tmp_path / "run")
    else:
        (tmp_path / "run" / FILE).unlink()
        if how == "replaced":
            (tmp_path / "run" / FILE).touch()
    with pytest.raises(InvalidInput, match=r"was removed or replaced while this run.*the same command again"):
        store.put(TRIALS[1], RESULT, 0.5)
    with pytest.raises(InvalidInput, match="was removed or replaced"):
        store.__exit__(None, None, None)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Any, ...], Any]:
    """A run's command without its folder, and the report that it ends in."""
    command = ("robustness", "demo", "--samples", 8, "--slice", 2, "--seeds", 1, "--noise-levels", "0,0.1", "--json")
    folder = tmp_path_factory.mktemp("unbroken")
    call(*command, "-o", folder)
    return command, concluded(folder)


def concluded(folder: Path) -> Any:
    """All of a report but the facts of its run."""
    found = json.loads((folder / "report.json").read_text())
    return {name: value for name, value in found.items() if name != "run"}


def fill_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """By SQLite's own limit, which it raises to what the file has: not one more page."""
    after(monkeypatch, 2, lambda store: store._db.execute("PRAGMA max_page_count=1"))


def turn_read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    after(monkeypatch, 2, lambda store: store._db.execute("PRAGMA query_only=ON"))


def go_away(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    after(monkeypatch, 2, lambda store: shutil.rmtree(folder))


def after(monkeypatch: pytest.MonkeyPatch, count: int, work: Callable[[Store], Any]) -> None:
    put = Store.put

    def counted(self: Store, *arguments: Any) -> None:
        put(self, *arguments)
        if self.added == count:
            work(self)

    monkeypatch.setattr(Store, "put", counted)


@pytest.mark.parametrize(
    ("breaks", "words", "kept"),
    [
        (fill_up, "database or disk is full. Stored trials are kept: run the same command again", 2),
        (turn_read_only, "attempt to write a readonly database. Stored trials are kept", 2),
        (go_away, "was removed or replaced while this run was writing to it, so its results are lost", 0),
    ],
    ids=["full", "read-only", "removed"],
)
def test_a_run_whose_disk_fails(
    breaks: Any, words: str, kept: int, tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit code 2; the same command afterwards measures what is missing and ends in the same report."""
    command, expected = unbroken
    with monkeypatch.context() as broken:
        breaks(broken, tmp_path / "run")
        said = call(*command, "-o", tmp_path / "run", code=2)
        assert words in said and not (tmp_path / "run" / "report.json").exists()
    call(*command, "-o", tmp_path / "run")
    assert concluded(tmp_path / "run") == expected
    cost = json.loads((tmp_path / "run" / "report.json").read_text())["run"]["cost"]
    assert cost["trials"] == 8 and cost["trials"] - cost["trials_run_now"] >= kept


def test_bytes_of_a_damaged_schema_in_what_sqlite_says() -> None:
    """Python can't decode such a message, and raises that instead."""
    for scope, words in ((store_file.using, "can't be used as a run store"), (store_file.reading, "is damaged")):
        with pytest.raises(InvalidInput, match=words), scope("run.sqlite"):
            b"\xee".decode("utf-8")
