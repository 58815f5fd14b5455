"""Ctrl-C, as a terminal sends it to a process of its own: one line that says how to go on, and exit code 130."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import noisescope as ns

SOURCE = Path(ns.__file__).parents[1]
KEPT = r"What was measured is kept: noisescope runs resume "
NOTHING = "Nothing was kept: run the same command again"
COMMANDS = {  # -> the end of which phase it is interrupted at, and how to go on
    "diagnose demo --samples 64 --seeds 1 -v -o run": ("clean model: ", f"{KEPT}run"),
    "gate demo --baseline base --samples 64 -v -o gated": ("clean model: ", f"{KEPT}gated"),
    "gate demo --baseline base -v": ("loading: ", "Nothing was kept: with -o DIR the same command can be resumed"),
    "locate demo -v": ("loading: ", NOTHING),
    "compare transformers:demo transformers:demo -v": ("loading: ", NOTHING),
}


def _hears_ctrl_c() -> None:
    """A process that a shell started in the background ignores the signal, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the baseline of a gate."""
    here = tmp_path_factory.mktemp("interrupted")
    report = ns.diagnose(ns.load("demo"), samples=4, effort="screen", level="operator", seeds=1)
    report.save(here / "base", formats=["json"])
    return here


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_in_one_line(command: str, folder: Path) -> None:
    """No traceback, and 130 as a shell has it."""
    phase, words = COMMANDS[command]
    with subprocess.Popen(
        [sys.executable, "-m", "noisescope", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_ctrl_c,
    ) as process:
        assert process.stderr is not None
        before = next(line for line in process.stderr if line.startswith(phase))
        os.kill(process.pid, signal.SIGINT)
        after = process.stderr.read()
        assert process.wait(timeout=60) == 130, before + after
    assert "Traceback" not in after
    last = after.strip().splitlines()[-1]
    assert re.fullmatch(f"interrupted. {words}", last), after


def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    """Before any option was read there is nothing to go on with."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    found = subprocess.run(
        [sys.executable, "-m", "noisescope", "diagnose", "demo"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        capture_output=True,
        text=True,
        preexec_fn=_hears_ctrl_c,
    )
    assert found.returncode == 130 and found.stderr.strip() == f"interrupted. {NOTHING}"
