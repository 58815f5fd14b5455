"""A rendered command asks the same: every option that a command has, through the parser and back."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app, command_builder
from noisescope.options.base import CommandOptions
from noisescope.options.command_text import OF_THIS_CALL, command_line, command_values
from noisescope.options.fields import INTEGERS, Option, options_of
from noisescope.options.sensitivity import DiagnoseOptions, GateOptions, RobustnessOptions
from noisescope.options.shared import DataFile

GROUPED = {"perturbation": "int4"}
WITH = {  # what an option needs besides
    "on": GROUPED,
    "group_size": GROUPED,
    "asymmetric": GROUPED,
    "answer_field": {"prompt_field": "a question"},
    "noise_scale": {},
}
VALUES: dict[str, Any] = {"model": "tiny:gpt2", "on": "kv-cache", "perturbation": INTEGERS[0], "device": "cuda:1"}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """What a command line asks for; nothing is run."""
    caught: list[Any] = []
    monkeypatch.setattr(command_builder, "refuse_early", lambda options: None)
    monkeypatch.setattr(command_builder, "carry_out", lambda run, options: caught.append(options))

    def parse(line: str) -> Any:
        words = shlex.split(line)
        assert words[0] == "noisescope"
        found = CliRunner().invoke(app, words[1:])
        assert found.exit_code == 0, found.output
        return caught.pop()

    return parse


def other_value(option: Option, folder: Path) -> Any:
    """A value that is not the option's default."""
    if option.name in VALUES:
        return VALUES[option.name]
    if option.exists or option.kind is Path:
        path = folder / "a file; of mine.jsonl"
        path.write_text("{}")
        return path
    if option.many:
        members = option.choices or ("softmax", "norm") if option.kind is str else (0.125, 1e-07)
        return tuple(members[:2])
    if option.choices:
        return next(choice for choice in reversed(option.choices) if choice != option.default)
    if option.kind is bool:
        return not option.default
    if option.kind is int:
        return 7
    return 0.123456789 if option.kind is float else "it's $HOME"


def without_call(options: CommandOptions) -> dict[str, Any]:
    """What a question depends on; where values came from is no part of it."""
    kept = {name: value for name, value in vars(options).items() if name != "left_open"}
    return {name: value for name, value in kept.items() if name in options_of(type(options), "command")}


COMMANDS = (DiagnoseOptions, RobustnessOptions, GateOptions)
EVERY = [(cls, name) for cls in COMMANDS for name in options_of(cls, "command")]


@pytest.mark.parametrize(("cls", "name"), EVERY, ids=[f"{cls.command} {name}" for cls, name in EVERY])
def test_every_option_comes_back(
    cls: type[CommandOptions], name: str, parsed: Callable[[str], Any], tmp_path: Path
) -> None:
    """From the definitions of options: a new one is tried without anybody adding it here."""
    option = options_of(cls)[name]
    given: dict[str, Any] = {name: other_value(option, tmp_path), **WITH.get(name, {})}
    given |= {"baseline": tmp_path} if cls is GateOptions and name != "baseline" else {}
    given |= {"output": Path("out")} if name != "output" else {}
    asked = cls(**given)
    values = command_values(asked)
    assert values is not None
    if name in OF_THIS_CALL or not option.stored:
        assert name not in values  # of one call, or never written down
        return
    stored = json.loads(json.dumps({"model": "demo", **values}))
    assert without_call(parsed(command_line(cls, stored))) == without_call(asked)


def test_what_no_command_line_can_ask_has_no_command() -> None:
    """Objects from Python; seeds counted from 0 are a number, and named fields are options."""
    file = DataFile(Path("a.jsonl"), "q", "a")
    found = command_values(DiagnoseOptions(data=file, seeds=(0, 1, 2, 3)))
    assert found is not None and found["seeds"] == 4
    assert (found["data"], found["prompt_field"], found["answer_field"]) == ("a.jsonl", "q", "a")
    for given in ({"seeds": (4, 7)}, {"metric": len}, {"data": [1]}, {"perturbation": ns.Gaussian(0.1)},
                  {"highest_scale": 0.3}):  # fmt: skip
        assert command_values(DiagnoseOptions(**given)) is None, given


def test_options_of_another_command_are_left_out() -> None:
    """One set of values serves several commands."""
    text = command_line(GateOptions, {"model": "m", "baseline": "b", "max_tokens": 9, "window": 5, "data": None})
    assert text == "noisescope gate m --baseline b --max-tokens 9"
    assert not dataclasses.fields(CommandOptions)  # nothing that every command would have to print
