"""The store keeps what was measured, whatever happens to the process."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from noisescope.errors import InvalidInput
from noisescope.runs.store import FILE, Store, StoreCounts
from noisescope.trials import Conditions, Result, Slice, Trial

TRIAL = Trial(Conditions("m", "float32", "cpu", "sdpa", 1), "score", Slice("d", 0, 2))
OTHER = Trial(TRIAL.conditions, "capture", TRIAL.slice)
RESULT = Result((0, 1), {"kl": (0.1 + 0.2, None)}, {"injections": 3}, {"sums": np.arange(3.0)})


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every digit, None, facts and arrays survive a new process."""
    with Store(tmp_path) as store:
        store.put(TRIAL, RESULT, 1.5)
        store.note(asked={"samples": 2})
    with Store(tmp_path, create=False) as again:
        found = again[TRIAL.id]
        assert found.samples == (0, 1) and found.values == RESULT.values and found.facts == RESULT.facts
        assert np.array_equal(found.arrays["sums"], np.arange(3.0))
        assert again.counts() == StoreCounts(1, 1.5, {"score": 1}, {}) and again.about() == {"asked": {"samples": 2}}
        assert list(again) == [TRIAL.id] and len(again) == 1


def test_a_fresh_result_reads_as_a_resumed_one(tmp_path: Path) -> None:
    """NaN becomes None at once, so a run and its resumption see the same."""
    with Store(None) as store:
        store.put(TRIAL, Result((0,), {"kl": (math.nan,)}), 0.0)
        assert store[TRIAL.id].values == {"kl": (None,)}


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    """A second result for a trial is a bug, unless the first had failed."""
    with Store(tmp_path) as store:
        store.put(TRIAL, Result(error="OutOfLuck: it rained"), 0.0)
        store.put(TRIAL, RESULT, 0.0)
        with pytest.raises(AssertionError, match="already stored"):
            store.put(TRIAL, RESULT, 0.0)


def test_failures_are_rows(tmp_path: Path) -> None:
    """A failed trial is kept with its error, and forgotten only when asked."""
    with Store(tmp_path) as store:
        store.put(TRIAL, Result(error="OutOfLuck: it rained"), 0.0)
        store.put(OTHER, RESULT, 0.0)
    with Store(tmp_path) as again:
        assert again[TRIAL.id].failed and again[TRIAL.id].error == "OutOfLuck: it rained"
        assert again.forget_failures() == 1 and list(again) == [OTHER.id]
    with Store(tmp_path) as third:
        assert list(third) == [OTHER.id]


def test_it_is_sqlite_in_wal_mode_and_holds_no_pickle(tmp_path: Path) -> None:
    """A row is there for another process the moment it is put."""
    with Store(tmp_path) as store:
        store.put(TRIAL, RESULT, 0.0)
        reader = sqlite3.connect(tmp_path / FILE)
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        identity, content, arrays = reader.execute("SELECT id, content, arrays FROM trials").fetchone()
        assert identity == TRIAL.id and '"measure":"score"' in content and b"pickle" not in arrays
        reader.close()


def test_a_store_that_is_none_says_so(tmp_path: Path) -> None:
    """No run there, another schema, a file that is no database, a folder that can't be made: one line each."""
    with pytest.raises(InvalidInput, match="holds no run"):
        Store(tmp_path / "nowhere", create=False)
    with Store(tmp_path / "new") as store:
        store._db.execute("UPDATE about SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(InvalidInput, match="schema version 99"):
        Store(tmp_path / "new")
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "other.sqlite").rename(tmp_path / "mine" / FILE)
    before = (tmp_path / "mine" / FILE).read_bytes()
    with pytest.raises(InvalidInput, match="no such table: about"):
        Store(tmp_path / "mine", create=False)
    assert b"trials" not in (tmp_path / "mine" / FILE).read_bytes() and b"trials" not in before
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE).write_bytes(b"this is no database, it only looks like one" * 100)
    with pytest.raises(InvalidInput, match="can't be used as a run store"):
        Store(tmp_path / "bad")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="can't write into"):
        Store(tmp_path / "file" / "deeper")


def test_one_writer_a_folder(tmp_path: Path) -> None:
    """A second process would measure everything twice; readers are welcome; leaving frees the folder."""
    with Store(tmp_path) as store:
        store.put(TRIAL, RESULT, 0.0)
        with pytest.raises(InvalidInput, match="another process is writing"):
            Store(tmp_path)
        with Store(tmp_path, create=False) as reader:
            assert list(reader) == [TRIAL.id]
    with Store(tmp_path) as again:
        assert len(again) == 1


def test_facts_that_are_not_finite_are_none(tmp_path: Path) -> None:
    """An overflowing gradient norm is no reason to lose the run."""
    with Store(tmp_path) as store:
        store.put(TRIAL, Result(facts={"norms": {"0": math.inf, "1": 2.0}, "list": [math.nan, 1]}), 0.0)
        assert store[TRIAL.id].facts == {"norms": {"0": None, "1": 2.0}, "list": [None, 1]}


def test_a_surprise_is_the_stores_where_it_held_results_before(tmp_path: Path) -> None:
    """What this process measured itself can't be wrong but by its own fault, which is to be seen as it is."""
    with Store(tmp_path) as store:
        store.put(TRIAL, Result(), 1.0)
        with pytest.raises(KeyError), store.interpreting():
            raise KeyError("x")
    with (
        Store(tmp_path) as store,
        pytest.raises(InvalidInput, match="not a valid noisescope run: KeyError: 'x'"),
        store.interpreting(),
    ):
        raise KeyError("x")
