"""`noisescope demo` and `noisescope report`: the first five minutes."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from noisescope.api import diagnosis
from noisescope.cli import app
from noisescope.reports.saved_report import schema
from noisescope.stats import correlation

pytestmark = pytest.mark.slow


def call(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, call("demo", "-o", folder).output


def test_the_first_screen(demo: tuple[Path, str]) -> None:
    """Risk, findings, the next step, whether it was right, and where the files are."""
    folder, output = demo
    for words in ("risk:", "1. [", "next:", "was it right?", "the report warns of", "diverge least", "stuck bit"):
        assert words in output
    for form in ("json", "md", "html", "pdf"):
        assert str(folder / f"report.{form}") in output and (folder / f"report.{form}").stat().st_size > 5_000


def test_the_findings_are_true(demo: tuple[Path, str]) -> None:
    """On problems the diagnosis has not seen, a fault of another kind hurts most where it warns, and ranks alike."""
    report = json.loads((demo[0] / "report.json").read_text())
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(report)) == []
    (point,) = report["layer_analysis"]["avalanche_points"]  # decided or borderline, by 64 samples
    windows = report["check"]["windows"]
    (warned,) = [row for row in windows if row["role"] == "warned"]
    (least,) = [row for row in windows if row["role"] == "least"]
    assert point["layer_range"] == f"L{warned['start_layer']}-{warned['end_layer']}" and len(windows) == 5
    assert warned["degradation"]["low"] > 0.3 and warned["p_corrected"] < 0.001
    assert least["degradation"]["high"] < 0.1
    others = [row["degradation"]["value"] for row in windows if row["role"] != "warned"]
    assert warned["degradation"]["low"] > max(others)
    ranks = correlation(
        [row["reported_kl"] for row in windows], [row["degradation"]["value"] for row in windows], method="spearman"
    )
    assert ranks.value is not None and ranks.value >= 0.7
    assert report["check"]["samples"] == 100 and report["run"]["data"]["samples"] == 64


def test_the_fault_put_in_is_found(demo: tuple[Path, str]) -> None:
    """The layer, the module and the kind of the fault that the demo simulates."""
    found = json.loads((demo[0] / "report.json").read_text())["locate"]
    first = found["suspects"][0]
    assert found["verdict"] == "faulty" and found["elements_changed"] > 100
    assert (first["place"], first["module"], first["fault_class"]) == (6, "model.layers.6.mlp.down_proj", "stuck bit")


def test_the_report_is_drawn_again_without_torch(demo: tuple[Path, str], tmp_path: Path) -> None:
    """From the store alone: the same JSON, figures too; torch and transformers are not imported."""
    (stored,) = [demo[0] / "run.sqlite"]
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "run.sqlite").write_bytes(stored.read_bytes())
    script = f"""
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        from noisescope.cli import app
        app(["report", {str(tmp_path / "moved")!r}, "--figures", "-o", {str(tmp_path / "drawn")!r}])
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "drawn" / "report.json").read_text() == (demo[0] / "report.json").read_text()
    assert (tmp_path / "drawn" / "report.html").read_text() == (demo[0] / "report.html").read_text()
    assert {path.suffix for path in (tmp_path / "drawn" / "figures").iterdir()} == {".png", ".svg"}


def test_what_report_refuses(tmp_path: Path) -> None:
    """No run, an unfinished run, an unknown form: each says what to do."""
    assert "RUN is missing" in call("report", code=2).output
    assert "no report at" in call("report", tmp_path, code=2).output
    from noisescope.runs.store import Store

    with Store(tmp_path / "begun"):
        pass
    assert "not finished" in call("report", tmp_path / "begun", code=2).output
    assert json.loads(call("report", "--schema").stdout)["title"] == "noisescope report"


def test_reports_from_elsewhere(demo: tuple[Path, str], tmp_path: Path) -> None:
    """Another version, a part missing, a wrong type, a folder that can't be: one line each, no traceback."""
    whole = json.loads((demo[0] / "report.json").read_text())
    file = tmp_path / "report.json"
    for change, words in (
        ({"schema_version": 99}, "report version 99"),
        ({"executive_summary": None}, "not a whole report"),
        ({"operator_analysis": {"linear": 3}}, "not a whole report"),
    ):
        file.write_text(json.dumps({**whole, **change}))
        assert words in call("report", file, code=2).output
    file.write_text(json.dumps({key: value for key, value in whole.items() if key != "executive_summary"}))
    assert "it has no 'executive_summary'" in call("report", file, code=2).output
    assert "can't write into" in call("report", demo[0], "-o", file, code=2).output
    assert "format is empty" in call("report", demo[0], "--format", "", code=2).output


def test_an_interrupted_demo_resumes(demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs resume` knows the demo, and runs no stored trial again; the steps that store no trial are left out."""
    (tmp_path / "run.sqlite").write_bytes((demo[0] / "run.sqlite").read_bytes())
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:  # a damaged trial that nobody asks for
        db.execute("INSERT INTO trials VALUES ('x', '{}', 'score', '{}', NULL, '', 1.0, '', 'y')")
        db.commit()
    assert "1 damaged" in call("runs", "check", tmp_path, code=1).output
    for step in ("check_findings", "add_precision_plan", "add_located_fault"):
        monkeypatch.setattr(diagnosis, step, lambda subject, report, *rest, **settings: report)
    monkeypatch.setattr("noisescope.cli.diagnose.print_check", lambda report: None)  # the words on those steps
    assert "0 trials run now" in call("runs", "resume", tmp_path).output
    assert " 0 damaged" in call("runs", "check", tmp_path).output


def test_one_bad_store_does_not_hide_the_others(demo: tuple[Path, str]) -> None:
    """`runs list` names it and lists the rest."""
    bad = demo[0].parent / "bad"
    bad.mkdir()
    (bad / "run.sqlite").write_bytes(b"no database")
    output = call("runs", "list", demo[0].parent).output
    assert "can't be read" in output and "demo of demo" in output
