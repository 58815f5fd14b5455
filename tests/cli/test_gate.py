"""`noisescope gate` and `noisescope plan migration|fault-tests` on the bundled model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate
from noisescope.plans.gate_rows import ScoreChange
from noisescope.reports.saved_report import Report


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output if result.exit_code == 2 else result.stdout


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    """A quick diagnosis: operators injected, layers predicted."""
    folder = tmp_path_factory.mktemp("baseline")
    levels = ("--level", "operator,layer", "--operators", "gemm", "--effort", "screen")
    code, said = run("diagnose", "demo", "--samples", 6, "--seeds", 1, *levels, "-o", folder)
    assert code == 0, said
    return folder


def test_the_gate_passes_and_fails(baseline, tmp_path):
    """The same model passes, with JUnit and history; against a baseline half as sensitive it fails with code 1."""
    junit, history = tmp_path / "gate.xml", tmp_path / "gates"
    asked = ("gate", "demo", "--samples", 5, "--max-degradation", 0.9)
    code, said = run(*asked, "--baseline", baseline / "report.json", "--junit", junit, "--history", history)
    assert code == 0 and said.startswith("pass: demo against demo (20") and "would have detected" in said
    assert said.splitlines()[0].endswith("): 5 samples in pairs, of 6 before and 5 now")
    assert said.count("without noise") == 1 and "clean:" not in said
    assert "pass       conditions of the baseline: both dtype float32, device cpu" in said
    assert ET.parse(junit).getroot()[0][0].get("name") == "conditions of the baseline"
    headline = said.splitlines()[1]
    assert ET.parse(junit).getroot()[0].find("system-out").text == headline
    assert 0.05 < float(ET.parse(junit).getroot()[0].get("time")) < 600  # what was measured, not 0.000
    assert ET.parse(junit).getroot()[0].get("failures") == "0" and (history / "trend" / "gate-divergence.png").exists()
    assert run("runs", "list", history) == (0, f"{history}: gate history of demo; 1 verdict\n")
    report = json.loads((baseline / "report.json").read_text())
    halved = {name: [kl / 2 for kl in values] for name, values in report["gate"]["predicted_kl"].items()}
    better = Report({**report, "gate": {**report["gate"], "predicted_kl": halved}}).save(tmp_path, formats=["json"])
    code, said = run(*asked, "--baseline", better[0], "-o", tmp_path / "deep" / "run", "--json")
    result = json.loads(said)
    assert code == 1 and result["verdict"] == "fail" and result["worst"]["ratio"]["value"] == pytest.approx(2, rel=1e-3)
    listed = run("runs", "list", tmp_path / "deep" / "run")[1]
    assert ": gate of demo, " in listed and listed.endswith("; complete\n")
    assert run("runs", "resume", tmp_path / "deep" / "run")[0] == 1  # the same gate again, from its store


def test_fault_tests_load_the_model_as_the_report_says(baseline, monkeypatch):
    """In the dtype it was measured in, unless another is given."""
    seen = []

    def refused(model, *, dtype, **loading):
        seen.append((model, dtype))
        raise InvalidInput("seen enough")

    monkeypatch.setattr("noisescope.api.preparation.load", refused)
    for options in ((), ("--dtype", "bfloat16")):
        assert run("plan", "fault-tests", baseline, "--run", *options)[0] == 2
    assert seen == [("demo", "float32"), ("demo", "bfloat16")]


def test_another_model_of_the_same_name_is_refused(baseline, tmp_path):
    """A path in a report is cut to its last part, so what has that name here may be something else."""
    report = json.loads((baseline / "report.json").read_text())
    report["run"]["model"]["fingerprint"] = "0" * 64
    (tmp_path / "report.json").write_text(json.dumps(report))
    code, said = run("plan", "fault-tests", tmp_path, "--run", "--limit", 1)
    assert code == 2 and "demo is not the model of the report" in said and "with --model" in " ".join(said.split())
    assert run("plan", "fault-tests", tmp_path, "--run", "--limit", 1, "--samples", 4, "--model", "demo")[0] in (
        0,
        1,
        3,
    )


def test_migration_and_fault_tests(baseline, tmp_path):
    """Both plans from the report; a test that fails gives code 1, with everything written."""
    code, said = run("plan", "migration", baseline, "-o", tmp_path / "plan.json", "--device", "npu")
    assert code == 0 and "priority 1" in said and "--device npu" in said
    assert json.loads((tmp_path / "plan.json").read_text())["priorities"][0]["layers"][0] == 0
    code, said = run("plan", "fault-tests", baseline, "--csv", tmp_path / "tests.csv")
    assert code == 0 and "OP_GEMM" in said and "LAYER_L0-2" in said
    wanted = ("--run", "--samples", 4, "--junit", tmp_path / "faults.xml", "-o", tmp_path / "out", "--json")
    code, said = run("plan", "fault-tests", baseline, *wanted)
    found = json.loads(said)
    assert code == int(any(row["verdict"] == "fail" for row in found["results"])) == 1
    assert json.loads((tmp_path / "out" / "fault_tests.json").read_text()) == found
    assert ET.parse(tmp_path / "faults.xml").getroot()[0].get("tests") == "2"
    for options, reason in (
        (("--limit", 0, "--run"), "limit must be at least 1, got 0"),
        (("--junit", "x.xml"), "give --run"),
    ):
        code, said = run("plan", "fault-tests", baseline, *options)
        assert code == 2 and reason in " ".join(said.split())
    code, said = run("plan", "fault-tests", baseline, "--run", "--model", "tiny:gpt2")
    assert code == 2 and "the report describes LlamaForCausalLM" in said


@pytest.mark.parametrize("name", ["github", "gitlab"])
def test_templates_are_yaml_with_our_command(name):
    """They need no model, and what they run is spelled as the command is."""
    code, said = run("gate", "--template", name)
    assert code == 0 and yaml.safe_load(said)
    for option in ("--baseline", "--data", "--samples", "--max-degradation", "--junit", "--history"):
        assert option in said


def test_mistakes_are_one_line(tmp_path):
    """An unknown template, a report that is not there."""
    code, said = run("gate", "--template", "jenkins")
    assert code == 2 and "github" in said
    code, said = run("gate", "demo", "--baseline", tmp_path / "none.json")
    assert code == 2 and "no report" in said and "Traceback" not in said
    code, said = run("plan", "migration", tmp_path / "none.json")
    assert code == 2 and "no report" in said


def test_a_dry_run_measures_nothing(baseline, tmp_path):
    """It times a sample; a baseline of other samples is refused all the same."""
    asked = ("gate", "demo", "--baseline", baseline, "--samples", 5, "--dry-run")
    code, said = run(*asked, "-o", tmp_path / "none")
    assert code == 0 and "forwards" in said and "pass" not in said and not (tmp_path / "none").exists()
    assert run(*asked, "--max-tokens", 8)[0] == 2


def test_a_perplexity_has_digits():
    """Its inverse is far below a percent, and never 0.0 %."""
    low = Estimate(0.000512, 0.0004, 0.0006, 9)
    change = Estimate(-0.0000213, -0.00003, -0.00001, 9)
    row = ScoreChange("gemm", low, low, change, 0.00005, "perplexity")
    assert (row.score(0.000512), row.change, row.power) == ("0.000512", "-2.1e-05 [-3e-05, -1e-05]", "a drop of 5e-05")
    share = ScoreChange("gemm", low, low, Estimate(-0.021, -0.03, None, 9), None)
    assert (share.score(0.512), share.change, share.power) == ("51.2 %", "-2.1 points [-3.0, ...]", "no drop")
