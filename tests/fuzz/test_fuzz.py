"""A few inputs for every reader: `make fuzz` has the rest. The harness itself is shown to see what it must see."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fuzz.harness import Fuzzer, Tally
from tests.fuzz.mutations import MUTATED, Input
from tests.fuzz.readers import Reader, all_readers

from noisescope.errors import InvalidInput

READERS = {reader.name: reader for reader in all_readers()}
INPUTS = 20


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    yield Fuzzer()


@pytest.mark.parametrize("name", READERS)
def test_hostile_files_are_refused_in_one_line(name: str, fuzzer: Fuzzer) -> None:
    """No traceback, no hang, no long or hidden message, nothing written elsewhere, nothing run."""
    tally = Tally(name)
    fuzzer.warm_up(READERS[name])
    fuzzer.run(READERS[name], INPUTS, 1, tally)
    assert not tally.failures, tally.failures[0]
    assert tally.total >= INPUTS and tally.kinds[MUTATED]  # more than half of many; of twenty, by chance fewer


def hang(path: Path) -> None:
    while True:
        path.read_bytes()


def connect(path: Path) -> None:
    with socket.socket() as out:
        out.connect_ex(("127.0.0.1", 9))


def refuse(message: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        raise InvalidInput(message)

    return read


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda path: {}["x"], "KeyError"),
        (refuse("x" * 3000), "a message of 3000 characters"),
        (refuse("a\nb"), "a message of 3 characters"),
        (refuse("a\u202eb"), "hidden characters"),
        (lambda path: (path.parent.parent / "fuzz-outside").write_text(""), "open "),
        (lambda path: (path.parent.parent / "fuzz-outside").unlink(), "os.remove "),
        (lambda path: os.system("true"), "os.system"),
        (lambda path: subprocess.run(["true"], check=True), "subprocess.Popen"),
        (connect, "socket.connect"),
        (hang, "TimeoutError"),
    ],
)
def test_the_harness_sees_it(
    read: Callable[[Path], object], words: str, fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of failure, made on purpose."""
    monkeypatch.setattr("tests.fuzz.harness.SLOWEST", 0.2)
    tally = Tally("x")
    fuzzer.try_one(Reader("x", "file", read, (b"",)), Input(MUTATED, b"abc"), tally)
    assert len(tally.failures) == 1 and words in tally.failures[0]


def test_the_harness_is_quiet_about_what_is_right(fuzzer: Fuzzer) -> None:
    """A file read, one written beside it, and a refusal."""
    tally = Tally("x")
    for read in (Path.read_bytes, lambda path: path.with_name("y").write_text("y"), refuse("no"), time.localtime):
        one = (lambda path, read=read: read()) if read is time.localtime else read
        fuzzer.try_one(Reader("x", "file", one, (b"",)), Input(MUTATED, b"abc"), tally)
    assert not tally.failures and (tally.read, tally.refused) == (3, 1)
