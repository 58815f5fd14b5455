"""Exit codes of the commands that check something: 0 passed, 1 failed, 3 undecided, which one flag makes 0."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.jsonform import to_json
from noisescope.localization.verdict import Verdict
from noisescope.options.docs_tables import COMMANDS
from noisescope.options.fields import options_of
from noisescope.plans.fault_tests import FaultTestResult


def codes(*arguments: Any) -> tuple[int, int]:
    """Without and with --allow-undecided."""
    lines = ([*arguments], [*arguments, "--allow-undecided"])
    plain, allowed = (CliRunner().invoke(app, [str(word) for word in line]) for line in lines)
    assert not [r for r in (plain, allowed) if r.exception and not isinstance(r.exception, SystemExit)], plain.output
    return plain.exit_code, allowed.exit_code


@pytest.mark.parametrize(("verdict", "wanted"), [("healthy", (0, 0)), ("faulty", (1, 1)), ("undecided", (3, 0))])
def test_locate(verdict: str, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that is undecided is neither a fault nor health."""
    monkeypatch.setattr("noisescope.api.preparation.load_subject", lambda options: None)
    monkeypatch.setattr("noisescope.localization.locate.locate", lambda subject, options: Verdict(verdict, "audit"))
    assert codes("locate", "demo") == wanted


@pytest.mark.parametrize(("verdict", "wanted"), [("healthy", (1, 1)), ("undecided", (3, 0))])
def test_locate_with_a_simulated_fault(verdict: str, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that was not found is a failure; one that nobody could decide about is not."""
    monkeypatch.setattr("noisescope.api.preparation.load_subject", lambda options: None)
    found = (Verdict(verdict, "audit"), 3, 100)
    monkeypatch.setattr("noisescope.api.locate_simulated.locate_simulated", lambda subject, options: found)
    assert codes("locate", "demo", "--simulate", "gain:0.01@3") == wanted
    said = CliRunner().invoke(app, ["locate", "demo", "--simulate", "gain:0.01@3"]).output
    assert "fault simulated at block 3 (100 elements changed): not found, nothing is suspected" in said


@pytest.mark.parametrize(("verdict", "wanted"), [("pass", (0, 0)), ("fail", (1, 1)), ("undecided", (3, 0))])
def test_gate(verdict: str, wanted: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is the gate's own."""
    (tmp_path / "report.json").write_text("{}")
    monkeypatch.setattr("noisescope.api.preparation.load_subject", lambda options: None)
    result = SimpleNamespace(verdict=verdict, seconds=1.0, checks=[0])
    monkeypatch.setattr("noisescope.api.gates.gate", lambda subject, options: result)
    monkeypatch.setattr("noisescope.api.reports.as_json", lambda value: "{}")
    assert codes("gate", "demo", "--baseline", tmp_path, "--json") == wanted


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [(["pass", "undecided"], (0, 0)), (["pass", "fail"], (1, 1)), (["undecided", "undecided"], (3, 0))],
)
def test_fault_tests(rows: list[str], wanted: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undecided tests are counted, and decide only where all are."""
    monkeypatch.setattr("noisescope.api.reports.load_report", lambda path: SimpleNamespace(diagnosis=None))
    monkeypatch.setattr("noisescope.api.plan.as_report", lambda report: report)
    monkeypatch.setattr("noisescope.api.plan.generate", lambda report: [])
    loaded = "noisescope.cli.command_builder.load_reported_model"
    monkeypatch.setattr(loaded, lambda report, options: (None, options))
    results = [FaultTestResult("t", "t", row, "m", (), None) for row in rows]  # type: ignore[arg-type]
    monkeypatch.setattr("noisescope.api.fault_tests.run_report_tests", lambda *_, **__: results)
    assert codes("plan", "fault-tests", tmp_path, "--run") == wanted
    said = CliRunner().invoke(app, ["plan", "fault-tests", str(tmp_path), "--run"]).output
    assert ("1 of 2 checks undecided" in said) == (rows == ["pass", "undecided"])
    printed = CliRunner().invoke(app, ["plan", "fault-tests", str(tmp_path), "--run", "--json"]).stdout
    assert json.loads(printed)["results"] == to_json(results)


def test_no_other_flag_allows_what_is_undecided() -> None:
    """One flag, in all commands that check."""
    flags = {
        o.flag for cls in COMMANDS for o in options_of(cls).values() if "undecided" in o.help or "undecided" in o.name
    }
    having = {cls.command for cls in COMMANDS if "allow_undecided" in options_of(cls)}
    assert flags <= {"--allow-undecided"} and having == {"gate", "compare", "locate", "plan fault-tests"}
