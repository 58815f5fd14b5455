"""The commands a user meets: diagnose, robustness, runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app

QUICK = ["--samples", "6", "--seeds", "1", "--slice", "6", "--level", "operator", "--operators", "softmax,linear"]


def call(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    output = call("diagnose", "demo", *QUICK, "-o", folder).output
    assert "risk:" in output and "next:" in output and str(folder / "report.md") in output
    return folder


def test_the_first_screen(run: Path) -> None:
    """Risk, findings, next step, cost and files; the same command again runs nothing."""
    again = call("diagnose", "demo", *QUICK, "-o", run).output
    assert "0 trials run now" in again and "demo: LlamaForCausalLM" in again
    assert "the bundled model's own problems" in again


def test_json_is_the_report(run: Path) -> None:
    """--json prints what report.json holds, apart from the run itself."""
    printed = json.loads(call("diagnose", "demo", *QUICK, "-o", run, "--json").stdout)
    saved = json.loads((run / "report.json").read_text())
    assert printed["operator_analysis"] == saved["operator_analysis"]


def test_dry_run_measures_nothing(tmp_path: Path) -> None:
    """Trials, forwards, time and memory, and no folder."""
    output = call("diagnose", "demo", *QUICK, "-o", tmp_path / "none", "--dry-run").output
    assert "trials, about" in output and "GiB" in output and not (tmp_path / "none").exists()


def test_runs_are_listed_shown_and_resumed(run: Path) -> None:
    """What lies in a store, and the same command from it."""
    assert "diagnose of demo" in call("runs", "list", run.parent).output
    assert json.loads(call("runs", "list", run.parent, "--json").stdout)[0]["trials"] > 5
    shown = call("runs", "show", run).output
    assert "score:" in shown and "screen:" in shown and "data: demo" in shown
    assert json.loads(call("runs", "show", run, "--json").stdout)["errors"] == {}
    assert "0 trials run now" in call("runs", "resume", run).output
    assert "no runs in" in call("runs", "list", run.parent.parent / "nothing-here").output
    assert "holds no run" in call("runs", "show", run.parent, code=2).output


def test_robustness_prints_a_table(tmp_path: Path) -> None:
    """Accuracy and retention with intervals at each level."""
    arguments = [
        "robustness",
        "demo",
        "--noise-levels",
        "0,0.1",
        "--samples",
        "8",
        "--seeds",
        "1",
        "--max-new-tokens",
        "4",
    ]
    output = call(*arguments, "-o", tmp_path).output
    assert "by generation" in output and "retention" in output and "[" in output
    assert (tmp_path / "report.json").exists()
    assert "teacher-forced" in call(*arguments, "--no-generate").output
    assert (
        json.loads(call(*arguments, "--no-generate", "--json").stdout)["robustness"]["levels"][1]["noise_level"] == 0.1
    )
    assert "noise" in call("runs", "resume", tmp_path).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diagnose", "demo", "--level", "operators"], "operator"),
        (["diagnose", "demo", "--operators", "sofmax"], "softmax"),
        (["diagnose", "demo", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["diagnose", "nowhere/at/all"], "nowhere/at/all"),
        (["diagnose", "demo", "--noise-scale", "0"], "injects nothing"),
        (["diagnose", "demo", "--executor", "slurm"], "local"),
        (["robustness", "demo", "--noise-levels", "a,b"], "numbers with commas"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    """Exit code 2, no traceback."""
    output = call(*arguments, "-o", tmp_path, code=2).output
    assert words in output and "Traceback" not in output


def test_bad_data_names_file_and_line(tmp_path: Path) -> None:
    """The third line lacks its answer."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "2 + 2", "answer": "4"}\n{"prompt": "3 + 3"}\n')
    output = call("diagnose", "demo", "--data", file, code=2).output
    assert "bad.jsonl" in output and "3" in output and "answer" in output


def test_what_round_off_does(tmp_path: Path) -> None:
    """The band, digits and greedy texts in words, as JSON and as a page; a comparison of files takes the band."""
    quick = ["--rounding", "--dtype", "bfloat16", "--samples", "6", "--seeds", "1", "--max-new-tokens", "8"]
    output = call("robustness", "demo", *quick, "-o", tmp_path / "out").output
    assert "Two healthy systems in bfloat16 differ by" in output and "greedy texts" in output and "layer 15" in output
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    band = saved["roundoff"]["band"]
    assert 0.001 < band["expected"]["value"] < band["high"] < 0.1 and len(saved["roundoff"]["layers"]) == 16
    page = call("report", tmp_path / "out", "--format", "md", "-o", tmp_path / "again").output
    assert "report.md" in page and "Significant digits" in (tmp_path / "again" / "report.md").read_text()
    values = [[-0.1 * (n + t % 7) - 0.05 for t in range(20)] for n in range(6)]
    for name, moved in (("a", 0.0), ("b", 0.002)):
        rows = [{"logprobs": [v + moved * (-1) ** (at + at // 7) for at, v in enumerate(row)]} for row in values]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert "explained by round-off" in call("compare", *files, "--roundoff", tmp_path / "out").output
    assert "has no round-off band" in call("compare", *files, "--roundoff", _curve(tmp_path), code=2).output


def test_round_off_in_float32_is_that_against_float64(tmp_path: Path) -> None:
    quick = ["--rounding", "--dtype", "float32", "--samples", "2", "--max-new-tokens", "4"]
    output = " ".join(call("robustness", "demo", *quick, "-o", tmp_path / "out").output.split())
    assert "Measured as the distance of this model to its own result in float64" in output
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["roundoff"]["band"]["method"] == saved["run"]["settings"]["perturbation"] == "float64"
    assert 1e-8 < saved["roundoff"]["band"]["expected"]["value"] < 1e-5


def _curve(folder: Path) -> Path:
    call("robustness", "demo", "--samples", "4", "--seeds", "1", "--no-generate", "-o", folder / "curve")
    return folder / "curve"


def test_perplexity_of_a_text_file(tmp_path: Path) -> None:
    """As a metric of noise levels: perplexity and its ratio to the clean one, both with intervals; a gate takes it."""
    (tmp_path / "text.txt").write_text("\n".join(f"one and {n} is" for n in ("two", "three", "four", "five", "six")))
    where = ["--data", tmp_path / "text.txt", "--metric", "perplexity", "--seeds", "1", "-o", tmp_path / "out"]
    output = call("robustness", "demo", *where, "--noise-levels", "0,0.1").output
    assert "perplexity" in output and "every line" not in output.splitlines()[0]
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    clean, noisy = saved["robustness"]["levels"]
    assert clean["accuracy"]["value"] > 1 and clean["accuracy"]["n"] == 5
    ratio = clean["accuracy"]["value"] / noisy["accuracy"]["value"]
    assert noisy["retention"]["value"] == pytest.approx(ratio) and noisy["retention"]["low"] < ratio
    assert any("every line of the text file is a sample" in note for note in saved["could_not_see"])
