"""Examples in docstrings run and print what they say, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope as ns

SOURCE = Path(ns.__file__).parent
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = sorted(
    ".".join(("noisescope", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
GROUPS = ("plan", "experiment")  # modules that are commands with subcommands
LONG = {"experiment.phases"}  # trains models: tests/training/test_phases_experiment.py


def public_functions() -> dict[str, Callable[..., Any]]:
    found = {name: getattr(ns, name) for name in ns.__all__}
    for group in GROUPS:
        module = found.pop(group)
        own = {name: one for name, one in vars(module).items() if name[0] != "_" and hasattr(one, "__wrapped__")}
        found |= {f"{group}.{name}": one for name, one in own.items()}
    return {name: one for name, one in found.items() if inspect.isfunction(one) and name not in LONG}


FUNCTIONS = public_functions()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What examples take for granted: a model, data and the report of a diagnosis."""
    subject = ns.load("tiny:llama")
    batches = list(torch.randint(1, 60, (6, 10), generator=torch.Generator().manual_seed(4)).split(1))
    report = ns.diagnose(subject, batches, seeds=1, window=2, metric="agreement", operators=("linear", "softmax"))
    return {"ns": ns, "subject": subject, "batches": batches, "report": report}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own."""
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    said: list[str] = []
    for test in doctest.DocTestFinder().find(importlib.import_module(name), extraglobs=names):
        runner.run(test, out=said.append)
    assert runner.tries and not runner.failures, "".join(said)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (FUNCTIONS[name].__doc__ or "")


def test_the_commands_are_there_under_their_names() -> None:
    """What the command line can ask, Python can ask by the same name."""
    from noisescope.options.docs_tables import COMMANDS

    elsewhere = {"demo", "report", "runs list", "runs show", "runs check", "runs resume"}  # files, not questions
    named = {cls.command.replace("-", "_").replace(" ", ".") for cls in COMMANDS if cls.command not in elsewhere}
    assert named - {"runs.compare"} | {"compare_runs"} <= set(FUNCTIONS) | LONG
