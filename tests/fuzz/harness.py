"""Runs one reader on many inputs, and watches what it does besides: time, messages, files, processes, network."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.fuzz.mutations import Input, inputs
from tests.fuzz.readers import Reader

from noisescope.errors import NoisescopeError

SLOWEST = 5.0  # seconds of processor time: other work on the machine is no hang
LONGEST = 2000  # bytes of a message
PROCESSES = ("os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen")
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "urllib.Request")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "shutil.move", "shutil.rmtree")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ALLOWED = ("/dev/null",)
OTHERS = "noisescope-tally"  # a thread of a worker that another test has started: it writes every few seconds
_MEMORY = "/dev/shm"  # SQLite waits for a disk after every commit
_SCRATCH = _MEMORY if os.access(_MEMORY, os.W_OK) else None


class Watch:
    """An audit hook for good, which only looks while an input is read."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or threading.current_thread().name == OTHERS:
            return
        if event in PROCESSES or event in NETWORK:
            self.seen.append(f"{event} {arguments!r:.100}")
        elif event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & WRITING:
            self._place(event, arguments[0])
        elif event in CHANGES:
            for path in arguments:
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._place(event, path)

    def _place(self, event: str, path: Any) -> None:
        where = os.path.realpath(os.fsdecode(path))
        if self.folder is not None and not where.startswith(self.folder) and where not in _ALLOWED:
            self.seen.append(f"{event} {where}")


@dataclass
class Tally:
    """What came of a reader's inputs."""

    reader: str
    kinds: Counter[str] = field(default_factory=Counter)
    read: int = 0
    refused: int = 0
    slowest: float = 0.0
    longest: int = 0
    failures: list[str] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kinds.total()


class Fuzzer:
    def __init__(self, keep: Path | None = None) -> None:
        self.watch = Watch()
        self.keep = keep  # inputs that failed are kept here

    def warm_up(self, reader: Reader) -> None:
        """Valid files must be read: what is refused for another reason shows nothing. Libraries are imported here."""
        for content in reader.corpus:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                (Path(folder) / reader.file).write_bytes(content)
                reader.read(Path(folder) / reader.file)

    def run(self, reader: Reader, examples: int, number: int, tally: Tally) -> None:
        """So many inputs of a reader; the same number gives the same inputs."""

        @seed(number)
        @settings(max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(inputs(reader.corpus, is_json=reader.is_json))
        def each(one: Input) -> None:
            self.try_one(reader, one, tally)

        each()

    def try_one(self, reader: Reader, one: Input, tally: Tally) -> None:
        folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="fuzz-", dir=_SCRATCH)))
        (folder / reader.file).write_bytes(one.content)
        tally.kinds[one.kind] += 1
        wrong = []
        started = time.process_time()
        try:
            with self._watched(folder), _time_limit():
                reader.read(folder / reader.file)
            tally.read += 1
        except NoisescopeError as error:
            tally.refused += 1
            message = str(error)
            tally.longest = max(tally.longest, len(message.encode("utf-8", "replace")))
            if "\n" in message or len(message.encode("utf-8", "replace")) > LONGEST:
                wrong.append(f"a message of {len(message)} characters: {message[:300]!r}")
            if not message.isprintable():
                wrong.append(f"hidden characters in a message: {message[:300]!r}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong.append("".join(traceback.format_exception(error))[-1500:])
        spent = time.process_time() - started
        tally.slowest = max(tally.slowest, spent)
        if spent > SLOWEST:
            wrong.append(f"{spent:.1f} s")
        wrong += self.watch.seen
        self.watch.seen.clear()
        shutil.rmtree(folder, ignore_errors=True)
        if wrong:
            tally.failures.append(f"{reader.name}: " + "; ".join(wrong))
            if self.keep is not None:
                self.keep.mkdir(parents=True, exist_ok=True)
                (self.keep / f"{reader.name.replace(' ', '-')}-{len(tally.failures)}").write_bytes(one.content)

    @contextlib.contextmanager
    def _watched(self, folder: Path) -> Iterator[None]:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            self.watch.folder = str(folder)
            try:
                yield
            finally:
                self.watch.folder = None


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """A reader that goes on for ever is stopped: a hang must not end the fuzzing."""

    def stop(*_: object) -> None:
        raise TimeoutError("still reading")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, 2 * SLOWEST), signal.ITIMER_REAL: (signal.SIGALRM, 20 * SLOWEST)}
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
