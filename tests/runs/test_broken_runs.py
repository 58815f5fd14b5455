"""Runs broken in every way: each call to the disk fails once, runs are killed, writers meet. No torch in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import noisescope

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")  # a file system in memory, where waiting for a disk takes no time


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def small_run(what: str, folder: Path, *arguments: int, **environment: str) -> Any:
    path = str(Path(noisescope.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(HERE / "small_run.py"), what, str(folder)]
        + [str(argument) for argument in arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_every_call_to_the_disk_fails_once(folder: Path, tmp_path: Path) -> None:
    """The n-th open, write, fsync and rename, for every n, alone and with all after it: a run ends in its report or in
    one line with exit code 2, and the same command afterwards loses no stored trial and ends in the same report."""
    shim = tmp_path / "failing_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", shim, HERE / "failing_calls.c", "-ldl"], check=True)
    found = small_run("fail", folder, LD_PRELOAD=str(shim))
    assert found["wrong"] == []
    assert found["calls"]["write"] > 50 and found["calls"]["open"] > 10
    assert found["calls"]["fsync"] > 5 and found["calls"]["rename"] == 2
    assert found["cases"] == 2 * sum(found["calls"].values()) and found["refused"] > found["cases"] / 2


def test_killed_at_any_moment(folder: Path) -> None:
    """kill -9: what was said to be stored is stored, nothing runs twice, and all reports are that of one run."""
    found = small_run("kill", folder, 150)
    assert found["kills"] == 150 and found["lost"] == found["other_reports"] == 0
    assert found["ends"] >= 1 and found["stored"] > 10


def test_one_writer_at_a_time(folder: Path) -> None:
    """Four processes open one store over and over: nobody is ever in it beside another."""
    found = small_run("contest", folder, 1000)
    assert found["held"] == 1000 and found["refused"] > 0 and found["double"] == 0
