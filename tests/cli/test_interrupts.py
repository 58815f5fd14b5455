"""Ctrl-C, as a terminal sends it to a process: one line that says how to go on, and exit code 130."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
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


# Runs commands, each in a process forked from one that has imported what all of them import. Each line of its input is
# a pipe for stderr and a command; it answers with the number of the process, and later with its exit code.
FORKED = """
import os, sys
import transformers.models.llama.modeling_llama
from noisescope.__main__ import main
from noisescope.api import defaults, diagnosis, gates, locate_simulated, systems
for line in sys.stdin:
    pipe, *sys.argv[1:] = line.split()
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.dup2(os.open(pipe, os.O_WRONLY), 2)
    os.dup2(2, 1)
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """In a folder with the baseline of a gate."""
    here = tmp_path_factory.mktemp("interrupted")
    report = ns.diagnose(ns.load("demo"), samples=4, effort="screen", level="operator", seeds=1)
    report.save(here / "base", formats=["json"])
    with subprocess.Popen(
        [sys.executable, "-c", FORKED],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_ctrl_c,
    ) as process:
        yield process


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_in_one_line(command: str, commands: subprocess.Popen[str], tmp_path: Path) -> None:
    """No traceback, and 130 as a shell has it."""
    phase, words = COMMANDS[command]
    assert commands.stdin is not None and commands.stdout is not None
    os.mkfifo(tmp_path / "stderr")
    print(tmp_path / "stderr", command, file=commands.stdin, flush=True)
    with (tmp_path / "stderr").open() as stderr:
        process = int(commands.stdout.readline())
        before = next(line for line in stderr if line.startswith(phase))
        os.kill(process, signal.SIGINT)
        after = stderr.read()
    assert int(commands.stdout.readline()) == 130, before + after
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
