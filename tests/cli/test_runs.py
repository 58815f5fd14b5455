"""`noisescope runs`: states, settings, and two runs compared, from stores alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import noisescope
from noisescope.cli import app
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts, SettingsFacts
from noisescope.injection import Injection
from noisescope.jsonform import to_json
from noisescope.probe.noise import Gaussian
from noisescope.runs.store import Store
from noisescope.trials import Conditions, Result, Slice, Trial

SETTINGS = SettingsFacts(
    "Gaussian(0.05)", 0.05, ("layer",), ("gemm", "softmax"), ("gemm",), 3, 1, 10.0, (0, 1), "full", 2, 0.1, 0.2, 8
)


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def stored(folder: Path, model: str = "m", *, lost: int = 0, scale: float = 0.05, command: bool = True) -> Path:
    """A store with 40 samples, clean and noisy, of which `lost` answers are wrong throughout."""
    where = Conditions(model, "float32", "cpu", "sdpa", 2)
    noise = Injection(Gaussian(scale), operators=frozenset({"gemm"}), phases=frozenset({"forward"}))
    right = np.ones(40)
    right[:lost] = 0
    with Store(folder) as store:
        for injection in (None, noise, dataclasses.replace(noise, seed=1)):
            noisy = right.copy()
            if injection is not None:
                noisy[30 + 2 * injection.seed :] = 0
            values = {"accuracy": tuple(noisy.tolist()), "nll": tuple((2 - noisy).tolist())}
            store.put(Trial(where, "score", Slice("d", 0, 40), injection), Result(tuple(range(40)), values), 0.5)
        asked = to_json(
            Asked(
                ModelFacts(f"models/{model}", "Llama", model, 2, ()),
                DataFacts("x.jsonl", "task", 40, 400, "d", "", "score"),
                SETTINGS,
                "accuracy",
                where,
                "cpu (here)",
                0.0,
            )
        )
        store.note(asked=asked, report={"schema_version": 1, "run": {**asked, "host": "h"}})
        if command:
            store.note(command={"name": "diagnose", "options": {"model": model}})
    return folder


def test_the_verdict_and_the_largest_changes(tmp_path: Path) -> None:
    """Plain lines: both runs, what differs, the verdict, changes with intervals and n."""
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b", "worn", lost=12)
    lines = call("runs", "compare", a, b).splitlines()
    assert lines[0] == f"A  {a}: models/m (Llama, 2 blocks), x.jsonl, 40 samples, float32 on cpu (here)"
    assert lines[2] == ("asked differently: model.source (A models/m, B models/worn), model.fingerprint (A m, B worn)")
    assert lines[4].startswith(
        "verdict: B is worse than A. accuracy: 2 significantly worse, none better of 2; loss: 1 significantly worse,"
    )
    assert lines[5].startswith("  accuracy, no noise: 100.0 % -> 70.0 %, -30 points [-4")
    assert lines[5].endswith("n = 40, paired; worse") and lines[7].startswith("  accuracy, gemm at 0.05: 77.5 %")
    same = call("runs", "compare", a, a)
    assert (
        ("verdict: no significant difference.") in same
        and "asked differently: nothing" in same
        and "bit for bit" in same
    )


def test_files_and_json(tmp_path: Path) -> None:
    """-o writes what --format names; --json prints the same value."""
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b", "worn", lost=12)
    printed = call("runs", "compare", a, b, "-o", tmp_path / "out", "--format", "json,md")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.json", "comparison.md"]
    assert str(tmp_path / "out" / "comparison.md") in printed
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert json.loads(call("runs", "compare", a, b, "--json")) == saved and saved["schema_version"] == 2
    assert "B is worse than A" in (tmp_path / "out" / "comparison.md").read_text()


def test_what_can_not_be_compared_is_one_line(tmp_path: Path) -> None:
    """No run, nothing in common, an unknown format, a store that does not say what it asked: exit code 2."""
    a, other = stored(tmp_path / "a"), stored(tmp_path / "b", scale=0.1)
    with Store(tmp_path / "silent") as store:
        assert len(store) == 0
    for arguments, words in (
        ((a, tmp_path), "holds no run"),
        ((a, other), "no injection in common"),
        ((a, tmp_path / "silent"), "does not say what was asked"),
        ((a, a, "-o", tmp_path / "out", "--format", "docx"), "unknown report format 'docx'"),
    ):
        output = call("runs", "compare", *arguments, code=2)
        assert words in output and "Traceback" not in output
    assert "--noise-scale" in call("runs", "compare", a, other, code=2)


def test_states(tmp_path: Path) -> None:
    """Complete with a report of this question; else how to go on, which differs for runs from Python."""
    stored(tmp_path / "done")
    for name, command in (("cut", True), ("python", False)):
        with Store(stored(tmp_path / name, command=command)) as store:
            store.note(report={})
    with Store(stored(tmp_path / "asked-more")) as store:  # a report, but of an earlier question
        store.note(asked={**store.about()["asked"], "settings": {**to_json(SETTINGS), "window": 1}})
    states = {Path(row["folder"]).name: row["state"] for row in json.loads(call("runs", "list", tmp_path, "--json"))}
    assert states == {
        "done": "complete",
        "cut": f"not finished: noisescope runs resume {tmp_path / 'cut'}",
        "asked-more": f"not finished: noisescope runs resume {tmp_path / 'asked-more'}",
        "python": f"not finished: call the same function again with output='{tmp_path / 'python'}'",
    }
    lines = call("runs", "list", tmp_path).splitlines()
    assert f"{tmp_path / 'done'}: diagnose of models/m, 3 trials; complete" in lines and len(lines) == 4


def test_the_history_of_gates_is_no_unfinished_run(tmp_path: Path) -> None:
    """Verdicts and nothing to resume; a run into the same folder is still a run."""
    for model in ("first", "second"):
        with Store(tmp_path / "gates") as store:
            store.add_gate({"model": model})
    with Store(stored(tmp_path / "both")) as store:
        store.add_gate({"model": "first"})
    lines = call("runs", "list", tmp_path).splitlines()
    assert lines == [
        f"{tmp_path / 'both'}: diagnose of models/m, 3 trials; complete",
        f"{tmp_path / 'gates'}: gate history of second; 2 verdicts",
    ]
    assert call("runs", "show", tmp_path / "gates").splitlines()[:2] == [
        "gate history of second, data: ?",
        "2 verdicts",
    ]
    found = {Path(row["folder"]).name: row["gates"] for row in json.loads(call("runs", "list", tmp_path, "--json"))}
    assert found == {"gates": 2, "both": 1}


def test_show_prints_the_settings(tmp_path: Path) -> None:
    """What was asked, one line each, and the state."""
    lines = call("runs", "show", stored(tmp_path / "a")).splitlines()
    assert lines[:2] == ["diagnose of models/m, data: x.jsonl", "complete"]
    for line in ("  score: 3 trials", "  operators: gemm, softmax", "  seeds: 0, 1", "  metric: accuracy",
                 "  dtype: float32", "  samples: 40", "  device: cpu (here)"):  # fmt: skip
        assert line in lines
    assert not any("None" in line for line in lines)
    assert json.loads(call("runs", "show", tmp_path / "a", "--json"))["settings"]["window"] == 3


@pytest.mark.parametrize(
    "arguments", [["compare", "a", "b", "-o", "out", "--format", "json,md"], ["list"], ["show", "a"]]
)
def test_stores_are_read_without_torch(arguments: list[str], tmp_path: Path) -> None:
    """On a laptop without torch or transformers, too."""
    stored(tmp_path / "a")
    stored(tmp_path / "b", "worn", lost=12)
    code = f"""
import sys
sys.modules['torch'] = sys.modules['transformers'] = None
sys.argv = ['noisescope', 'runs', *{arguments!r}]
from noisescope.cli import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
