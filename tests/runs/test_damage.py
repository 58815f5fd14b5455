"""A damaged store is never believed: bits are flipped in the file itself, not only through SQL."""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from noisescope import api
from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.model.loading import wrap
from noisescope.options.shared import Options
from noisescope.runs.store import FILE, Store, StoreCheck
from noisescope.testing import tiny_model
from noisescope.trials import Conditions, Result, Slice, Trial

CONDITIONS = Conditions("m", "float32", "cpu", "sdpa", 1)
TRIALS = [Trial(CONDITIONS, "score", Slice("d", at, at + 8)) for at in range(0, 32, 8)]
GATES = [{"verdict": "pass", "worst": 1.25}, {"verdict": "fail", "worst": 2.5}]


def result_of(number: int) -> Result:
    drawn = np.random.default_rng(number)
    columns = {name: tuple(drawn.normal(size=8).tolist()) for name in ("kl", "accuracy")}
    return Result(tuple(range(8)), columns, {"injections": 40 + number}, {"sums": drawn.normal(size=700)})


def filled(folder: Path) -> Path:
    """A store with four trials, two notes and two gates; its file."""
    with Store(folder) as store:
        for number, trial in enumerate(TRIALS):
            store.put(trial, result_of(number), 1.5 + number)
        store.note(asked={"samples": 32}, report={"score": 0.125, "words": "x" * 6000})
        for gate in GATES:
            store.add_gate(gate)
    assert not (folder / f"{FILE}-wal").exists()
    return folder / FILE


def believed(folder: Path) -> StoreCheck:
    """Whatever a store gives is what was put into it; raises InvalidInput where it is refused."""
    with Store(folder, create=False) as store:
        for number, trial in enumerate(TRIALS):
            if trial.id in store:
                found, put = store[trial.id], result_of(number)
                assert (found.samples, found.values, found.facts) == (put.samples, put.values, put.facts)
                assert np.array_equal(found.arrays["sums"], put.arrays["sums"])
                assert not found.error
        assert set(store.contents()) <= {trial.id for trial in TRIALS}
        gates = store.gates()
        assert [gate for gate in GATES if gate in gates] == gates
        try:
            about = store.about()
            assert about.get("report") in (None, {"score": 0.125, "words": "x" * 6000})
            assert about.get("asked") in (None, {"samples": 32})
        except InvalidInput as error:
            assert "\n" not in str(error)
        return store.check()


def flip(file: Path, position: int, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= 1 << bit
    file.write_bytes(raw)


def positions_of(raw: bytes, cells: list[bytes]) -> list[int]:
    """Where the parts of cells lie in the file, 64 bytes at a time: long cells are spread over pages."""
    found: set[int] = set()
    for cell in cells:
        for at in range(0, len(cell) - 63, 64):
            start = raw.find(cell[at : at + 64])
            if start >= 0:
                found.update(range(start, start + 64))
    return sorted(found)


def test_one_flipped_bit_in_stored_numbers_is_never_believed(tmp_path: Path) -> None:
    """200 positions inside values and arrays of trials: the row is dropped and counted, the other rows stay."""
    file = filled(tmp_path)
    raw = file.read_bytes()
    with sqlite3.connect(file) as db:
        rows = db.execute("SELECT result, arrays FROM trials").fetchall()
    db.close()
    where = positions_of(raw, [part for result, arrays in rows for part in (result.encode(), arrays)])
    assert len(where) > 10_000
    drawn = random.Random(0)
    for position in drawn.sample(where, 200):
        file.write_bytes(raw)
        flip(file, position, drawn.randrange(8))
        found = believed(tmp_path)
        assert found.damaged == 1 and found.trials == len(TRIALS) and not found.sound, position


def test_one_flipped_bit_anywhere_is_never_believed(tmp_path: Path) -> None:
    """400 positions over the whole file, pages and indexes included: right numbers, fewer of them, or one line."""
    file = filled(tmp_path)
    raw = file.read_bytes()
    drawn = random.Random(1)
    outcomes = {"refused": 0, "fewer": 0, "whole": 0}
    for _ in range(400):
        for beside in tmp_path.glob(f"{FILE}-*"):  # what SQLite may leave beside a damaged file
            beside.unlink()
        file.write_bytes(raw)
        flip(file, drawn.randrange(len(raw)), drawn.randrange(8))
        try:
            found = believed(tmp_path)
        except InvalidInput as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error)
        else:
            outcomes["whole" if found.trials - found.damaged == len(TRIALS) else "fewer"] += 1
    assert outcomes["fewer"] > 20 and outcomes["whole"] > 20, outcomes


def test_a_writer_mends_a_row_whose_id_was_hit(tmp_path: Path) -> None:
    """The index then disagrees with the table: the row can be dropped and the trial put again all the same."""
    file = filled(tmp_path)
    raw = file.read_bytes()
    wanted = TRIALS[2].id.encode()
    places = [at for at in range(len(raw)) if raw.startswith(wanted, at)]
    assert len(places) == 2  # table and index
    lost = 0
    for place in places:
        file.write_bytes(raw)
        flip(file, place + 5, 0)
        with Store(tmp_path) as store:
            for number, trial in enumerate(TRIALS):
                if trial.id not in store:
                    store.put(trial, result_of(number), 1.5 + number)
            lost += store.added
            store.mend()
        assert believed(tmp_path) == StoreCheck(len(TRIALS), 0, 0, (), "ok")
    assert lost == 2  # by the table it is damaged, by the index it is not there
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT COUNT(*) FROM trials").fetchone() == (len(TRIALS),)
    db.close()


CHANGES = {
    "result": "UPDATE trials SET result = replace(result, '0.', '1.') WHERE id = ?",
    "arrays": "UPDATE trials SET arrays = NULL WHERE id = ?",
    "error": "UPDATE trials SET error = 'it rained' WHERE id = ?",
    "seconds": "UPDATE trials SET seconds = 2.75 WHERE id = ?",
    "measure": "UPDATE trials SET measure = 'screen' WHERE id = ?",
    "content": "UPDATE trials SET content = replace(content, 'cpu', 'gpu') WHERE id = ?",
    "id": "UPDATE trials SET id = 'f' || substr(id, 2) WHERE id = ?",
    "kind": "UPDATE trials SET result = CAST(result AS BLOB) WHERE id = ?",
    "checksum": "UPDATE trials SET checksum = '' WHERE id = ?",
}


@pytest.mark.parametrize("column", CHANGES)
def test_every_column_is_under_the_checksum(tmp_path: Path, column: str) -> None:
    """Question and answer alike. A writer drops the row and can put the trial again; a reader changes nothing."""
    file = filled(tmp_path)
    change(file, CHANGES[column], TRIALS[1].id)
    with Store(tmp_path, create=False) as store:
        assert TRIALS[1].id not in store and len(store) == 3 and store.check().damaged == 1
    with Store(tmp_path) as store:
        store.mend()
        assert store.damaged == 1
        assert store.damage() == [
            "1 stored trial in run.sqlite failed the checksum: discarded, and measured again if this run needed the "
            "result"
        ]
        store.put(TRIALS[1], result_of(1), 2.5)
    with Store(tmp_path) as store:
        assert (store.check().sound, store.damage(), len(store)) == (True, [], 4)
    believed(tmp_path)


def change(file: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(file) as db:
        assert db.execute(statement, values).rowcount == 1
    db.close()


def test_an_id_that_is_not_the_hash_of_its_content_is_refused(tmp_path: Path) -> None:
    """Also where the checksum was made to match: an answer stands under the question it belongs to."""
    from noisescope.runs.store_file import checksum

    file = filled(tmp_path)
    with sqlite3.connect(file) as db:
        row = db.execute(
            "SELECT content, measure, result, arrays, error, seconds FROM trials WHERE id = ?", (TRIALS[0].id,)
        ).fetchone()
        stranger = hashlib.sha256(b"another question").hexdigest()
        db.execute(
            "UPDATE trials SET id = ?, checksum = ? WHERE id = ?",
            (stranger, checksum(stranger, *row), TRIALS[0].id),
        )
    db.close()
    with Store(tmp_path, create=False) as store:
        assert stranger not in store and store.damaged == 1 and store.check().damaged == 1


def test_a_damaged_note_is_refused_and_written_anew(tmp_path: Path) -> None:
    """One line says which, and what to do; other notes and the trials can still be read."""
    file = filled(tmp_path)
    change(file, "UPDATE about SET value = replace(value, '0.125', '0.625') WHERE key = 'report'")
    with Store(tmp_path, create=False) as store:
        with pytest.raises(InvalidInput, match=r"'report' in .*run.sqlite fails its checksum.*run the same command"):
            store.about()
        with pytest.raises(InvalidInput, match="keeps intact trials and rewrites the rest"):
            store.fact("report")
        assert store.fact("asked") == {"samples": 32} and store.fact("nothing") is None and len(store) == 4
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2 and "fails its checksum" in flat(refused.output)
    assert refused.exception is None or isinstance(refused.exception, SystemExit)
    with Store(tmp_path) as store:
        store.note(report={"score": 0.125, "words": "x" * 6000})
    with Store(tmp_path, create=False) as store:
        assert store.about()["report"]["score"] == 0.125


def test_a_damaged_gate_is_left_out_and_counted(tmp_path: Path) -> None:
    file = filled(tmp_path)
    change(file, "UPDATE gates SET result = replace(result, '1.25', '9.25') WHERE number = 1")
    with Store(tmp_path) as store:
        assert store.gates() == GATES[1:] and store.damaged_gates == 1
        store.add_gate(GATES[0])
        assert store.gates() == [GATES[1], GATES[0]] and store.damaged_gates == 1
    change(file, "UPDATE gates SET number = 7 WHERE number = 2")
    with Store(tmp_path, create=False) as store:
        assert store.gates() == [GATES[0]] and store.damaged_gates == 2


def test_a_trend_says_how_many_gates_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from noisescope.api import gates

    change(filled(tmp_path), "UPDATE gates SET result = '{}' WHERE number = 1")
    monkeypatch.setattr(gates, "trend", lambda history: history)
    monkeypatch.setattr(gates, "from_json", lambda kind, row, where: row)  # the rows here are no whole gates
    monkeypatch.setattr(gates, "to_json", lambda result: result)
    monkeypatch.setattr("noisescope.reports.figure_files.save_figures", lambda history, folder: history)
    with pytest.warns(UserWarning, match="1 earlier gates in .* failed the checksum and are left out"):
        assert gates.keep({"verdict": "pass"}, tmp_path) == [GATES[1], {"verdict": "pass"}]


OLD = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trials (id TEXT PRIMARY KEY, content TEXT NOT NULL, measure TEXT NOT NULL, result TEXT NOT NULL,
    arrays BLOB, error TEXT NOT NULL, seconds REAL NOT NULL, finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE gates (number INTEGER PRIMARY KEY, result TEXT NOT NULL);
INSERT INTO about VALUES ('schema_version', '1'), ('asked', '{}');
"""


@pytest.mark.parametrize("command", [["runs", "show"], ["runs", "resume"], ["report"]], ids=" ".join)
def test_a_store_of_version_1_is_refused_in_one_line(tmp_path: Path, command: list[str]) -> None:
    """What came, what is allowed, what to do; exit 2, no traceback, and the file stays as it is."""
    with sqlite3.connect(tmp_path / FILE) as db:
        db.executescript(OLD)
        db.execute("PRAGMA journal_mode=WAL")
    db.close()
    before = (tmp_path / FILE).read_bytes()
    found = CliRunner().invoke(app, [*command, str(tmp_path)])
    shown = flat(found.output)
    assert found.exit_code == 2 and "Traceback" not in shown
    assert f"{FILE} has schema version 1, but this noisescope reads only version 2: run the command again" in shown
    assert (tmp_path / FILE).read_bytes() == before
    with pytest.raises(InvalidInput, match=r"reads only version 2.*with another folder \(-o\)"):
        Store(tmp_path)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_resumed_run_measures_damaged_trials_again_and_says_so(tmp_path: Path) -> None:
    """The report is that of an unbroken run, and a note says what happened; `runs check` counts it before."""
    import torch

    asked: dict[str, Any] = {"samples": 2, "seeds": 1, "levels": ("operator",), "calibration_samples": 0}
    run: Callable[[], Any] = lambda: api.diagnose(  # noqa: E731
        wrap(tiny_model("llama")),
        [torch.arange(1, 9)[None], torch.arange(9, 17)[None]],
        **asked,
        options=Options(output=tmp_path),
    )
    first = run()
    with Store(tmp_path, create=False) as store:
        count = len(store)
    with sqlite3.connect(tmp_path / FILE) as db:
        numbers = "UPDATE trials SET result = replace(result, '0.', '0.0') WHERE rowid <= 2"
        assert db.execute(numbers).rowcount == 2
    db.close()
    shown = CliRunner().invoke(app, ["runs", "check", str(tmp_path)])
    assert shown.exit_code == 1 and f"{count} trials, 2 damaged" in shown.output
    again = run()
    assert again["run"]["cost"]["trials_run_now"] == 2 and again["run"]["cost"]["trials"] == count
    assert again["run"]["notes"][0].startswith("2 stored trials in run.sqlite failed the checksum: discarded")
    assert {k: v for k, v in again.data.items() if k != "run"} == {k: v for k, v in first.data.items() if k != "run"}
    assert run()["run"]["notes"] == first["run"]["notes"]
