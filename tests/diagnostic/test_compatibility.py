"""Every name of the notes is where docs/compatibility.md says it is, and nothing heavy is loaded for it early."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import noisescope
from noisescope import diagnostic, noisy_ops

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")]
NAMES = {row[0].strip("`"): row[1].strip("` |") for row in ROWS if row[1].startswith("`noisescope.")}
COMMANDS = [row[1] for row in ROWS if row[1].startswith("`noisescope ")]


@pytest.mark.parametrize(("theirs", "ours"), NAMES.items())
def test_python_names(theirs, ours):
    """A name of the table exists, and is called as in the notes."""
    module, _, name = ours.rpartition(".")
    if theirs.startswith("verl."):
        assert importlib.import_module(ours)
        return
    assert name == theirs and callable(getattr(importlib.import_module(module), name))


def test_the_table_is_whole():
    """Every public name of both modules is in it."""
    functions = [value for value in vars(noisy_ops).values() if inspect.isfunction(value)]
    public = [f.__name__ for f in functions if f.__module__ == noisy_ops.__name__]
    ours_alone = {"get_noise_phases", "get_selective_layers", "get_selective_operators", "noisy_ops_context"}
    wanted = {*diagnostic.__all__, *(name for name in public if not name.startswith("_"))} - ours_alone
    assert wanted <= set(NAMES)
    assert set(diagnostic.__all__) == set(dir(diagnostic))


def test_commands_and_flags():
    """A command of the table exists and has the flag."""
    from noisescope.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert COMMANDS
    for text in COMMANDS:
        _, command, *rest = re.findall(r"`([^`]*)`", text)[0].split()
        flags = {flag for parameter in commands[command].params for flag in parameter.opts}
        assert all(word == "MODEL" or word in flags for word in rest), text


def test_names_are_loaded_when_used():
    """Importing the package loads no torch; a name that is not there says so."""
    heavy = "{'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    script = f"import sys, noisescope.diagnostic as names; assert not {heavy}; assert names.__all__"
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=environment, check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        diagnostic.nonsense  # noqa: B018
