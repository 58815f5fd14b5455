"""`noisescope demo` and `noisescope report`: the first five minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.reports.schema import schema

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
    for words in ("risk:", "1. [", "next:", "was it right?", "the report warns of", "the report calls robust"):
        assert words in output
    for form in ("json", "md", "html", "pdf"):
        assert str(folder / f"report.{form}") in output and (folder / f"report.{form}").stat().st_size > 5_000


def test_the_findings_are_true(demo: tuple[Path, str]) -> None:
    """On problems the diagnosis has not seen, the same fault hurts where it warns, and not where it calls robust."""
    report = json.loads((demo[0] / "report.json").read_text())
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(report)) == []
    points = report["executive_summary"]["avalanche_points"]
    warned, robust = report["check"]["windows"]
    assert [point["layer_range"] for point in points] == [f"L{warned['start_layer']}-{warned['end_layer']}"]
    assert report["check"]["samples"] == 200
    assert warned["degradation"]["low"] > 0.3 and warned["p_corrected"] < 0.001
    assert robust["degradation"]["high"] < 0.1
    held_out = {"samples": report["run"]["data"]["samples"], "checked on": report["check"]["samples"]}
    assert held_out == {"samples": 64, "checked on": 200}


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
