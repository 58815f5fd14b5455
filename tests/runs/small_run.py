"""A small run without torch, and what tests do to it: a few trials in two waves, a report, its files.

`python small_run.py WHAT FOLDER [N]` prints what came of it as JSON. WHAT is `fail` (with failing_calls.c preloaded,
each call fails in a run of its own), `kill` (N runs are killed at random) or `contest` (N times a lock is held).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from noisescope.errors import NoisescopeError
from noisescope.reports.document import Document
from noisescope.reports.saved_report import SavedReport
from noisescope.runs.store import Store
from noisescope.tables import Sheet
from noisescope.trials import Conditions, Result, Slice, Trial, missing

KINDS = ("open", "write", "fsync", "rename")
ERRORS = {"open": errno.EROFS, "write": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EROFS}
WAVES = 2
PER_WAVE = 2


class SmallReport(SavedReport[Any]):
    """Numbers as a report: `save` is the one of all reports."""

    def __init__(self, numbers: dict[str, Any]) -> None:
        self.numbers = numbers

    def document(self) -> Document:
        raise NotImplementedError("its two files are drawn without one")

    def sheet(self) -> Sheet:
        raise NotImplementedError("its two files need no table")

    def to_json(self) -> str:
        return json.dumps(self.numbers, indent=1)

    def to_markdown(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.numbers.items())


def trial_of(number: int) -> Trial:
    return Trial(Conditions("m", "float32", "cpu", "sdpa", 1), "score", Slice("d", number, number + 1))


def measured(trial: Trial) -> Result:
    drawn = np.random.default_rng(trial.slice.start)
    return Result((0,), {"kl": (float(drawn.normal()),)}, {}, {"sums": drawn.normal(size=300)})


def run(folder: Path, stored: Callable[[Trial], None], *, per_wave: int = PER_WAVE) -> int:
    """As a command runs: every trial that is not stored, the report, its files. The number of trials measured."""
    with Store(folder) as store:
        store.note(asked={"trials": WAVES * per_wave})
        for wave in range(1, WAVES + 1):
            for trial in missing(map(trial_of, range(wave * per_wave)), store):
                store.put(trial, measured(trial), 0.5)
                stored(trial)
        numbers = {str(n): float(store[trial_of(n).id].arrays["sums"].sum()) for n in range(WAVES * per_wave)}
        measured_now = store.added
    with Store(folder) as store:
        store.note(report=numbers)
    SmallReport(numbers).save(folder, formats=("json", "md"))
    return measured_now


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("report.json", "report.md")}


def broken_run(folder: Path, arm: Callable[[], None]) -> tuple[int, str, set[str]]:
    """A run in a process of its own, armed: its exit code, its last words, and the trials it said it stored."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        arm()
        code, words = 0, ""
        try:
            run(folder, lambda trial: os.write(writing, f"{trial.id}\n".encode()) and None)
        except NoisescopeError as error:
            code, words = error.exit_code, str(error)
        except BaseException as error:  # a user would see a traceback
            code, words = 99, f"{type(error).__name__}: {error}"
        os.write(writing, f"said {words}".encode())
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "r") as pipe:
        stored, _, words = pipe.read().partition("said ")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), words, set(stored.split())


def fail_every_call(folder: Path) -> dict[str, Any]:
    """Every n of every kind of call, once and from then on; what came of each."""
    shim = ctypes.CDLL(None)
    whole = folder / "whole"
    shim.arm(str(whole).encode(), 0, ctypes.c_long(0), 0, 0)
    run(whole, lambda trial: None)
    counts = {kind: int(shim.counted(number)) for number, kind in enumerate(KINDS)}
    shim.disarm()
    expected = files_of(whole)
    outcomes: dict[str, Any] = {"calls": counts, "cases": 0, "refused": 0, "unharmed": 0, "wrong": []}
    for number, kind in enumerate(KINDS):
        for n in range(1, counts[kind] + 1):
            for on in (0, 1):
                where = folder / f"{kind}-{n}-{on}"
                given = (str(where).encode(), number, ctypes.c_long(n), ERRORS[kind], on)
                code, words, stored = broken_run(where, lambda given=given: shim.arm(*given))
                outcomes["cases"] += 1
                if problem := _problem(where, code, words, stored, expected):
                    outcomes["wrong"].append(f"{kind} {n} {'on' if on else 'once'}: {problem}")
                outcomes["refused" if code else "unharmed"] += 1
                shutil.rmtree(where)
    return outcomes


def _problem(where: Path, code: int, words: str, stored: set[str], expected: dict[str, bytes]) -> str:
    """What is wrong with a broken run, and with the same command after it; "" where nothing is."""
    if code not in (0, 2):
        return f"a traceback: {words}"
    if code == 0 and files_of(where) != expected:
        return "it ended well with another report"
    if code and (not words or "\n" in words):
        return f"not one line: {words!r}"
    again: set[str] = set()
    count = run(where, lambda trial: again.add(trial.id))
    if again & stored:
        return f"{len(again & stored)} stored trials were lost"
    if files_of(where) != expected:
        return "the same command ends in another report"
    with Store(where, create=False) as store:
        if not store.check().sound:
            return "the store is damaged"
    left = [path.name for path in where.iterdir() if path.suffix == ".part"]
    return f"it left {left}" if left and code == 0 else "" if count == len(again) else "counted wrongly"


def kill_runs(folder: Path, kills: int) -> dict[str, int]:
    """Runs killed at random moments, resumed until they end, over and over."""
    run(folder / "whole", lambda trial: None, per_wave=10)
    expected, drawn = files_of(folder / "whole"), random.Random(7)
    found = {"kills": 0, "ends": 0, "stored": 0, "lost": 0, "other_reports": 0}
    while found["kills"] < kills:
        where, stored, ended = folder / str(found["kills"]), set[str](), False
        while not ended:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                run(where, lambda trial, to=writing: os.write(to, f"{trial.id}\n".encode()) and None, per_wave=10)
                os._exit(0)
            os.close(writing)
            if found["kills"] < kills:
                time.sleep(drawn.uniform(0, 0.1))
                os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)[1] == 0
            with os.fdopen(reading, "r") as pipe:
                now = pipe.read().split()
            found["lost"] += len(stored.intersection(now)) + len(now) - len(set(now))
            stored |= set(now)
            found["kills"] += not ended
        found["ends"] += 1
        found["stored"] += len(stored)
        found["other_reports"] += files_of(where) != expected
        shutil.rmtree(where)
    return found


def contest(folder: Path, count: int, contenders: int = 4) -> dict[str, int]:
    """Processes that open the same store over and over: how often one was let in, refused, and in beside another."""
    with Store(folder):
        pass
    children = []
    for _ in range(contenders):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(_contend(folder, count // contenders)).encode())
            os._exit(0)
        os.close(writing)
        children.append((child, reading))
    totals: Counter[str] = Counter()
    for child, reading in children:
        with os.fdopen(reading) as pipe:
            totals.update(json.loads(pipe.read()))
        os.waitpid(child, 0)
    return dict(totals)


def _contend(folder: Path, count: int) -> dict[str, int]:
    found, drawn = {"held": 0, "refused": 0, "double": 0}, random.Random(os.getpid())
    while found["held"] < count:
        try:
            with Store(folder):
                found["held"] += 1
                try:
                    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
                    time.sleep(drawn.uniform(0, 0.001))
                    (folder / "inside").unlink()
                except FileExistsError:
                    found["double"] += 1
        except NoisescopeError:
            found["refused"] += 1
    return found


if __name__ == "__main__":
    place, more = Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]
    print(json.dumps({"fail": fail_every_call, "kill": kill_runs, "contest": contest}[sys.argv[1]](place, *more)))
