"""The commands that a report suggests, carried out as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app
from noisescope.reports.next_steps import next_steps, run_command

ASKED = "diagnose demo --effort screen --samples 8 --max-tokens 20 --seeds 1 --level operator --slice 20 --stream host"


def test_a_report_passes_its_own_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where samples were cut at another length; the terminal shows the same command as the report."""
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, [*ASKED.split(), "--operators", "softmax,norm", "-o", "base"])
    assert made.exit_code == 0, made.output
    report = ns.load_report("base").diagnosis
    steps = {words[1]: words[1:] for words in (shlex.split(step.text) for step in next_steps(report))}
    assert list(steps) == ["diagnose", "gate"]
    assert re.search(r"\nConfirm the predictions by injection \(about \d+ (s|min)\):\n", made.output)
    for words in steps.values():
        assert shlex.join(["noisescope", *words]) in made.output
    passed = CliRunner().invoke(app, steps["gate"])
    assert passed.exit_code == 0, passed.output
    assert passed.stdout.startswith("pass:")
    assert "--stream" in steps["gate"]  # the model may not fit the device otherwise
    at = steps["gate"].index("--max-tokens")
    refused = CliRunner().invoke(app, steps["gate"][:at] + steps["gate"][at + 2 :])
    assert refused.exit_code == 2 and "--max-tokens" in refused.output  # it was needed
    again = CliRunner().invoke(app, [*shlex.split(run_command(report.run))[1:], "--json"])
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert found["run"]["cost"]["trials_run_now"] == 0  # the same question, to the last trial
    assert found["run"]["command"] == ns.load_report("base")["run"]["command"]
