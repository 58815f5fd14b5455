"""`--csv`: the rows of a result as a file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app

BATCHES = list(torch.randint(1, 60, (6, 10), generator=torch.Generator().manual_seed(4)).split(3))


def rows(path: Path, *arguments: Any, codes: tuple[int, ...] = (0,)) -> list[dict[str, str]]:
    """What a command writes; its path is printed."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--csv", str(path)])
    assert result.exit_code in codes, result.output
    assert str(path) in result.output
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    subject = ns.load("tiny:llama")
    ns.diagnose(subject, BATCHES, seeds=1, window=2, metric="agreement", level="layer").save(folder, formats=["json"])
    for name, fault in (("a.record", None), ("b.record", "gain:0.01@1/linear")):
        ns.record(subject, output=folder / name, simulate=fault)
    return folder


def test_tables_of_a_report(run: Path, tmp_path: Path) -> None:
    """The rows of all levels, or another table by name; nothing else is written."""
    found = rows(tmp_path / "rows.csv", "report", run)
    assert {row["level"] for row in found} == {"window", "layer", "place", "cell"}
    findings = rows(tmp_path / "findings.csv", "report", run, "--table", "findings")
    assert findings and "severity" in findings[0] and not (run / "report.html").exists()


def test_an_unknown_table_lists_those_there_are(run: Path, tmp_path: Path) -> None:
    call = ["report", str(run), "--table", "finding"]
    for more, words in ((["--csv", str(tmp_path / "x.csv")], "Allowed: effects, findings"), ([], "--csv")):
        result = CliRunner().invoke(app, [*call, *more])
        assert result.exit_code == 2 and words in result.output


def test_plans(run: Path, tmp_path: Path) -> None:
    """Modules with their formats; places with their priorities; tests."""
    formats = rows(tmp_path / "p.csv", "plan", "precision", run, "--average-bits", 6, "--formats", "int4,int8")
    assert len(formats) == 14 and {row["format"] for row in formats} <= {"int4", "int8"}
    assert {row["priority"] for row in rows(tmp_path / "m.csv", "plan", "migration", run)} <= {"1", "2", "3"}
    assert rows(tmp_path / "t.csv", "plan", "fault-tests", run)[0]["test_type"] == "layer_fault"


def test_two_records(run: Path, tmp_path: Path) -> None:
    """A row per site, in the order they run."""
    found = rows(tmp_path / "c.csv", "compare", run / "a.record", run / "b.record", codes=(1,))
    first = next(row for row in found if row["diverges"] == "true")
    assert first["place"] == "1" and float(first["relative_l2"]) == pytest.approx(0.01, rel=0.05)


def test_a_model_and_its_faults(tmp_path: Path) -> None:
    """Modules of an anatomy; suspects of a verdict."""
    modules = rows(tmp_path / "i.csv", "inspect", "tiny:llama")
    assert {"model.layers.1.mlp.down_proj", "lm_head"} <= {row["module"] for row in modules}
    arguments = ("locate", "tiny:llama", "--quick", "--no-state", "--simulate", "gain:0.01@1/linear/*down_proj")
    suspects = rows(tmp_path / "l.csv", *arguments)
    assert suspects[0]["module"] == "model.layers.1.mlp.down_proj" and suspects[0]["fault_class"] == "gain"
