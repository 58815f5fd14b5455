"""`noisescope locate`: what a user sees, and exit codes that a script can rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.localization.coverage import Cell, Coverage
from noisescope.localization.verdict import Verdict
from noisescope.options.device_commands import LocateOptions


def call(*arguments: Any, code: int) -> Any:
    result = CliRunner().invoke(app, ["locate", *(str(argument) for argument in arguments)])
    assert result.exit_code == code, result.output
    return result


def test_a_healthy_model_is_called_healthy() -> None:
    """With what would have shown, by operator."""
    output = call("tiny:llama", code=0).stdout
    assert output.startswith("healthy: ") and "method: auto: audit" in output and "detection limits:" in output
    assert "linear: " in output and "softmax: " in output


@pytest.mark.parametrize(
    ("fault", "where", "kind"),
    [
        ("gain:0.01@1/linear/down_proj", "linear at block 1 (model.layers.1.mlp.down_proj)", "gain"),
        ("dead_zone:0.3@1", "residual at block 1", "dead zone"),
        ("exp_table@0/softmax", "softmax at block 0", "function table"),
        ("bias:0.3@lm_head", "linear at lm_head", "bias"),
    ],
)
def test_a_simulated_fault_is_found(fault: str, where: str, kind: str) -> None:
    """The layer, the operator, the module and the kind; exit code 0, for the search was right."""
    output = call("tiny:llama", "--quick", "--simulate", fault, code=0).stdout
    first = output.splitlines()[1]
    assert output.startswith("faulty") and where in first and kind in first and "): found" in output


def test_the_machine_form(tmp_path: Path) -> None:
    """--json prints what -o writes, and nothing else."""
    file = tmp_path / "verdict.json"
    printed = json.loads(
        call("demo", "--quick", "--simulate", "gain:0.01@3/linear/q_proj", "--json", "-o", file, code=0).stdout
    )
    assert printed == json.loads(file.read_text()) and printed["elements_changed"] > 0
    assert printed["suspects"][0]["module"] == "model.layers.3.self_attn.q_proj"


def test_the_suffix_decides_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page and a Markdown file with the model, the verdict and the limits."""
    found = Verdict("undecided", "audit", coverage=Coverage(cells=(Cell(0, "norm", 0, 1),)), notes=("nothing ran",))
    monkeypatch.setattr("noisescope.localization.locate.locate", lambda subject, options: found)
    for name, opening in (("v.html", "<!DOCTYPE html>"), ("new/v.md", "# noisescope locate")):
        output = call("demo", "-o", tmp_path / name, code=3).stdout
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.startswith(opening) and "demo" in text and "nothing ran" in text and "nothing ran" in output


def test_shapes_reach_the_locator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts on the command line are a file."""
    seen: list[LocateOptions] = []

    def locate(subject: Any, options: LocateOptions) -> Verdict:
        seen.append(options)
        return Verdict("healthy", "audit")

    monkeypatch.setattr("noisescope.localization.locate.locate", locate)
    file = tmp_path / "prompts.txt"
    file.write_text("3 + 4 =", encoding="utf-8")
    words = ["--tokens", "4096", "--batch", "4", "--decode", "16", "--budget", "90", "--repeat", "3"]
    call("demo", *words, "--inputs", file, code=0)
    call("demo", "--quick", code=0)
    assert seen[0].pick("tokens", "batch", "decode", "budget", "repeat", "quick", "inputs") == {
        "tokens": 4096, "batch": 4, "decode": 16, "budget": 90.0, "repeat": 3, "quick": False, "inputs": file,
    }  # fmt: skip
    assert seen[1].quick and seen[1].inputs is None


def test_prompts_of_a_file_are_run(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("3 + 4 = 7 and 5 + 6 = 11\n\n8 + 1 = 9\n", encoding="utf-8")
    assert call("demo", "--inputs", file, "--method", "relations", code=0).stdout.startswith("healthy: ")


def test_what_is_refused() -> None:
    """A family, a place or a method that does not exist; a fingerprint without outputs."""
    assert "Did you mean 'dead_zone'" in call("demo", "--simulate", "deadzone:0.3@10", code=2).output
    assert "16 blocks" in call("demo", "--simulate", "gain@99", code=2).output
    assert "audit" in call("demo", "--method", "audti", code=2).output
    assert "failure" in call("demo", "--method", "fingerprint", code=2).output
