"""`noisescope plan precision` and `plan smoothquant` on the bundled model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app

FORMATS = ("--formats", "int3,int4,int8")


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *(str(argument) for argument in arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diagnosis of the demo, as small as it may be: formats scored, four windows, channels."""
    target = tmp_path_factory.mktemp("run")
    report = ns.diagnose(
        ns.load("demo"),
        samples=16,
        seeds=1,
        levels=("layer", "channel"),
        window=4,
        step=4,
        calibration_samples=4,
        options=ns.Options(output=target),
    )
    report.save(target, formats=("json",))
    return target


@pytest.mark.slow
def test_a_plan_beats_random_ones(folder: Path) -> None:
    """Carried out on problems it was not made on: below the uniform plan of fewer bits, far below random ones."""
    found = json.loads(call("precision", folder, "--average-bits", 5, *FORMATS, "--verify", "--random", 8, "--json"))
    assert found["average_bits"] == pytest.approx(5, abs=0.02) and found["average_bits"] <= 5 + 1e-6
    assert found["random"]["n"] == 8 and found["typical_kl"] < 0.35 * found["random"]["median_typical_kl"]
    assert found["typical_kl"] < found["uniform_typical_kl"] and found["uniform_format"] == "int4"
    assert found["typical_kl"] < found["bit_rule_typical_kl"] and found["bit_rule_bits"] >= 5
    assert found["prediction"]["value"] == found["predicted_mean_kl"] and found["prediction"]["n"] == 16
    assert found["data"]["samples"] == 64 and len(found["rows"]) == 1 + 3 + 1 + 8


@pytest.mark.slow
def test_words_and_files(folder: Path, tmp_path: Path) -> None:
    """Without --verify nothing is loaded or claimed; exports are written; layers share a format."""
    said = call("precision", folder / "report.json", "--average-bits", 4.5, "--granularity", "layer", *FORMATS)
    assert "optimal by layer: 4." in said and "predicted only: --verify" in said
    assert re.search(r"\n  int8: \d+ modules\n    model\.layers\.\{\d+[-, \d]+\}\.mlp\.down_proj\n", said)
    assert (
        "\npredicted mean KL 0.0" in said and "(standard error at most 0.0" in said and "; 16 samples, about " in said
    )
    recipe = tmp_path / "missing" / "folder" / "recipe.yaml"
    found = json.loads(
        call("precision", folder, "--max-megabytes", 1, *FORMATS, "--export", "llm-compressor", "-o", recipe, "--json")
    )
    assert found["megabytes"] <= 1 and found["typical_kl"] is None and found["verified"] is False
    assert "QuantizationModifier" in recipe.read_text()
    assert any("96 inputs are not a multiple of 64" in note for note in found["notes"])  # the demo's width
    said = call("precision", folder, "--average-bits", 5, *FORMATS, "--export", "torchao", "-o", recipe)
    assert "note: model.layers.0." in said and "groups of 32" in said
    plan = tmp_path / "other" / "migration.json"
    assert str(plan) in call("migration", folder, "-o", plan)
    assert json.loads(plan.read_text())["priorities"]
    (tmp_path / "file").write_text("")
    assert "can't write" in call("migration", folder, "-o", tmp_path / "file" / "plan.json", code=2)
    assert "belong together" in call("precision", folder, "--average-bits", 5, "--export", "json", code=2)
    assert "needs a limit" in call("precision", folder, code=2)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"*": {"int3": 1, "int4": 2, "int8": 3}}))
    slow = ("--latency-table", table, "--max-milliseconds", 1e-9)
    assert "can't be reached" in call("precision", folder, *slow, *FORMATS, code=2)
    table.write_text("[]")
    assert "must be JSON of the form" in call("precision", folder, *slow, code=2)


@pytest.mark.slow
def test_few_samples_are_told(folder: Path, tmp_path: Path) -> None:
    """Data with no more samples than formats are scored on: the plan is measured on them, and a note says so."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}"}) + "\n" for i in range(10, 14)))
    said = call("precision", folder, "--average-bits", 5, *FORMATS, "--verify", "--random", 0, "--data", few)
    assert "measured on 4 held-out samples" in said
    assert "note: the data holds 4 samples, no more than the 16 used to choose formats" in said


@pytest.mark.slow
def test_smoothquant(folder: Path, tmp_path: Path) -> None:
    """KL before and after with n, the float error, and what was asked for in a file."""
    out = tmp_path / "missing" / "smooth.json"
    said = call("smoothquant", folder, "--samples", 8, "--max-tokens", 64, "-o", out)
    found = json.loads(out.read_text())
    assert "folds smoothed" in said and found["float_error"] < 1e-5 and found["kl"]["after"]["typical"]["n"] == 4
    assert found["gain"]["n"] == 4 and found["kl"]["before"]["mean"]["value"] > 0
    gain, after, before = (
        found["gain"]["value"],
        *(found["kl"][side]["typical"]["value"] for side in ("after", "before")),
    )
    assert f"{gain:.3g}" in said and f"{after:.3g}" in said
    assert len(found["folds"]) == 4 * 16 and after < 2 * before
    assert "or search" in call("smoothquant", folder, "--alpha", "much", code=2)
