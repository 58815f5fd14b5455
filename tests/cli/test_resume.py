"""`noisescope runs resume`: nothing in a folder from elsewhere widens trust, and what is about to run is shown."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.cli.command_builder import COMMANDS, resumable_options
from noisescope.options.sensitivity import DiagnoseOptions, GateOptions
from noisescope.runs.store import Store
from noisescope.runs.store_file import checksum


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that `diagnose` and `gate` would have run with."""
    found: list[Any] = []
    for name in ("diagnose", "gate"):
        monkeypatch.setitem(COMMANDS, name, (COMMANDS[name][0], found.append))
    return found


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def forged(folder: Path, name: str = "diagnose", again: Any = (), **options: Any) -> Path:
    """A run's folder as somebody else may send it."""
    with Store(folder) as store:
        store.note(command={"name": name, "options": options, "again": list(again)}, asked={})
    return folder


def test_a_resumed_demo_looks_for_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As every other run does that is resumed."""
    seen: list[Any] = []
    monkeypatch.setitem(COMMANDS, "demo", (COMMANDS["demo"][0], seen.append))
    call("runs", "resume", forged(tmp_path, "demo"))
    assert seen[0].resumes == ""


def test_what_widens_trust_is_never_stored(tmp_path: Path) -> None:
    """Neither are files outside the run's folder; that they were given is."""
    chosen = DiagnoseOptions(model="demo", trust_remote_code=True, executor="ray", address="ray://10.0.0.1", samples=8)
    repeat = resumable_options(chosen).repeat
    assert repeat["again"] == ["trust_remote_code", "address"] and repeat["options"]["samples"] == 8
    assert not {"trust_remote_code", "address", "output"} & repeat["options"].keys()
    gate = GateOptions(model="demo", baseline={}, junit=tmp_path / "x.xml", history=tmp_path)
    assert resumable_options(gate).repeat["again"] == ["junit", "history"]
    assert not {"junit", "history"} & resumable_options(gate).repeat["options"].keys()


def test_a_folder_of_someone_else_can_not_switch_trust_on(ran: list[Any], tmp_path: Path) -> None:
    """Whatever its options say: the flag counts where it is typed."""
    evil = {"model": "demo", "trust_remote_code": True, "executor": "ray", "address": "ray://evil:1"}
    folder = forged(tmp_path / "run", **evil, output="/somewhere/else", repeat={}, resumes="x")
    said = call("runs", "resume", folder)
    assert not ran[0].trust_remote_code and ran[0].address is None
    assert ran[0].output == folder and ran[0].resumes == "" and ran[0].repeat is None
    assert f"resuming {folder}: noisescope diagnose" in said and '  executor: "ray"' in said
    call("runs", "resume", folder, "--trust-remote-code", "--address", "ray://mine:1")
    assert ran[1].trust_remote_code and ran[1].address == "ray://mine:1"


def test_a_gate_writes_no_file_that_a_folder_names(ran: list[Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    options = {"baseline": str(tmp_path / "report.json"), "junit": "/etc/x.xml", "history": "/etc"}
    said = call("runs", "resume", forged(tmp_path / "run", "gate", ("junit", "nonsense"), **options))
    assert ran[0].junit is None and ran[0].history is None
    assert "not repeated: --junit (it writes outside the run's folder)" in said and "nonsense" not in said


def test_a_flag_that_was_given_is_needed_again(ran: list[Any], tmp_path: Path) -> None:
    """The same command would fail without it, or go to another cluster."""
    for name, flag in (("trust_remote_code", "--trust-remote-code"), ("address", "--address")):
        folder = forged(tmp_path / name, again=[name], model="demo")
        said = " ".join(call("runs", "resume", folder, code=2).split())
        assert f"started with {flag}, which is never stored" in said and f"resume {folder} {flag}" in said
    assert not ran
    call("runs", "resume", folder, "--address", "local")
    assert ran[0].address == "local"
    assert "--address is no option of" in call(
        "runs", "resume", forged(tmp_path / "demo", "demo"), "--address", "x", code=2
    )


def test_a_models_path_is_shown_and_where_it_leads(ran: list[Any], tmp_path: Path) -> None:
    """Before anything is loaded; control characters of a store are escapes on the terminal."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    said = call("runs", "resume", forged(tmp_path / "run", model=str(tmp_path / "link")))
    assert f'model: "{tmp_path / "link"}" (leads to "{tmp_path / "real"}")' in said and len(ran) == 1
    (tmp_path / "\x1b[2Jx").mkdir()
    said = call("runs", "resume", forged(tmp_path / "other", model=str(tmp_path / "\x1b[2Jx")))
    assert "\x1b" not in said and "\\u001b[2Jx" in said


def test_a_name_is_not_followed_into_a_folder(ran: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id was stored as a name; a folder of that name here is another model."""
    folder = forged(tmp_path / "run", model="org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = " ".join(call("runs", "resume", folder, code=2).split())
    assert f'was "org/name" by name, and {Path.cwd() / "org/name"} is a file or folder' in said and not ran


@pytest.mark.parametrize("command", [[], "x", {"name": 3, "options": {}}, {"name": "diagnose", "options": [1]}])
def test_a_stored_command_of_another_shape_is_one_line(command: Any, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.note(command=command)
    assert "the command stored in" in call("runs", "resume", tmp_path, code=2)


def test_another_model_at_the_same_path_is_refused(tmp_path: Path) -> None:
    """The run was of a model; what lies at its path now would be measured into its folder, under its name."""
    from safetensors.torch import load_file, save_file

    from noisescope import demo

    shutil.copytree(demo.folder(), tmp_path / "model")
    data, out = demo.test_file(), tmp_path / "out"
    asked = ("--data", data, "--samples", 4, "--seeds", 1, "--noise-levels", "0,0.1", "-o", out)
    call("robustness", tmp_path / "model", *asked)
    before = json.loads((out / "report.json").read_text())
    assert f'model: "{tmp_path / "model"}"' in call("runs", "resume", out)
    again = json.loads((out / "report.json").read_text())
    assert again["run"]["cost"]["trials_run_now"] == 0 and again["robustness"] == before["robustness"]
    file = next((tmp_path / "model").glob("*.safetensors"))
    weights = load_file(file)
    name = min(weights)
    weights[name] = weights[name] * 1.5
    save_file(weights, file, {"format": "pt"})
    said = " ".join(call("runs", "resume", out, code=2).split())
    assert f"{tmp_path / 'model'} is not the model that the run in {out} measured" in said
    assert "put the model back, or measure this one into another folder (-o)" in said
    assert json.loads((out / "report.json").read_text()) == again


@pytest.mark.parametrize(
    "result",
    [
        {"samples": [0, 1, 2, 3], "values": {"accuracy": [1.0] * 4}, "facts": {"injections": "x"}},
        {"samples": [0, 1, 2, 3], "values": {"other": [1.0] * 4}, "facts": {"injections": 1}},
        {"samples": [], "values": {}, "facts": {}},
    ],
)
def test_results_that_fit_no_question_are_one_line(result: dict[str, Any], tmp_path: Path) -> None:
    """Somebody made them, with the right checksums."""
    call("robustness", "demo", "--samples", 4, "--seeds", 1, "--noise-levels", "0,0.1", "-o", tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:
        for row in db.execute("SELECT id, content, measure, arrays, error, seconds FROM trials").fetchall():
            cells = (*row[:3], json.dumps(result), *row[3:])
            db.execute(
                "UPDATE trials SET result = ?, checksum = ? WHERE id = ?", (cells[3], checksum(*cells), cells[0])
            )
        db.commit()
    said = call("runs", "resume", tmp_path, code=2)
    assert "run.sqlite is not a valid noisescope run: " in said and "another folder (-o)" in said
