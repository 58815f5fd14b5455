"""`noisescope passport`: the table, the file, the differences in words, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from noisescope.cli import Commands
from noisescope.cli.command_builder import add_command
from noisescope.cli.passport import passport_of_device
from noisescope.passports.measure import take_passport

app = typer.Typer(cls=Commands, rich_markup_mode=None)
app.callback()(lambda debug=False: None)
add_command(app, passport_of_device)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["passport", *map(str, arguments)])


@pytest.fixture(scope="module")
def taken() -> dict[str, Any]:
    return take_passport("cpu", quick=True)


@pytest.fixture
def stored(taken: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(taken))
    return path


def test_a_passport_is_taken_written_and_read_again(tmp_path: Path) -> None:
    """The file holds what is printed, and compared with itself it is the same."""
    path = tmp_path / "passport.json"
    first = run("--quick", "-o", path)
    assert first.exit_code == 0, first.output
    assert str(path) in first.output and json.loads(path.read_text())["schema_version"] == 2
    again = run("--from", path, "--diff", path)
    assert again.exit_code == 0 and "same: the two passports agree" in again.output
    assert again.stdout.splitlines()[:8] == first.stdout.splitlines()[:8]


def test_the_table_shows_the_arithmetic_by_dtype(stored: Path) -> None:
    """Bits, rounding and ulps stand in columns of dtypes."""
    rows = [line.split() for line in run("--from", stored).output.splitlines()]
    header = next(row for row in rows if row[:1] == ["Products"])
    assert header[1:5] == ["float64", "float32", "bfloat16", "float16"]
    bits = next(row for row in rows if row[:4] == ["bits", "kept", "in", "sums"])
    assert bits[4:8] == ["53", "24", "24", "24"]
    assert any(row[:1] == ["exp"] for row in rows) and ["Fused", "attention"] in [row[:2] for row in rows]
    assert not any("NONSENSE" in row for row in rows)


def test_differences_are_said_in_words_and_are_no_error(stored: Path, taken: dict[str, Any], tmp_path: Path) -> None:
    """Exit code 0, a sentence with both devices, and the same in JSON."""
    other = copy.deepcopy(taken)
    other["facts"] |= {"name": "X1", "device": "npu"}
    for op in ("matmul", "linear"):
        other["dtypes"]["float32"]["products"][op]["sum_bits"]["value"] = 14
        other["dtypes"]["float32"]["products"][op]["error"] |= {"value": None, "nonsense": "all is wrong"}
    path = tmp_path / "npu.json"
    path.write_text(json.dumps(other))
    found = run("--from", stored, "--diff", path)
    assert found.exit_code == 0 and "24 bits on" in found.output and "14 on X1 (npu)" in found.output
    assert "X1 (npu) gives wrong results for the error against float64: all is wrong" in found.output
    machine = json.loads(run("--from", stored, "--diff", path, "--json").output)
    assert [difference["kind"] for difference in machine["differences"]] == ["health", "arithmetic"]
    shown = run("--from", path).output
    assert "Not as it should be\n- float32 (matmul, error): all is wrong" in shown and "NONSENSE" not in shown


def test_json_prints_the_passport_alone(stored: Path, taken: dict[str, Any]) -> None:
    """The machine form is the passport itself."""
    assert json.loads(run("--from", stored, "--json").output) == json.loads(json.dumps(taken))


def test_quick_against_whole_is_said(stored: Path, taken: dict[str, Any], tmp_path: Path) -> None:
    """Grids differ then, so functions are compared roughly only."""
    path = tmp_path / "whole.json"
    path.write_text(json.dumps({**taken, "quick": False}))
    assert "One of the two is quick" in run("--from", stored, "--diff", path).output


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"schema_version": 2, "executive_summary": {}}', "is not a passport"),
        ("[1, 2]", "is not a passport"),
        ("not json", "is not a valid passport: Expecting value"),
        ("", "is not a valid passport: Expecting value"),
        (b"\xff\xfe\x00", "is not a valid passport: byte 0xff at 0 is not UTF-8"),
        ('{"kind": "noisescope passport", "schema_version": 99}', "has schema version 99; this noisescope reads 2"),
        ('{"kind": "noisescope passport", "schema_version": 2}', "Create it with"),
        (
            '{"kind": "noisescope passport", "schema_version": 2, "facts": {}, "dtypes": {"float32": 3}}',
            "Create it with",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--diff", "--from"])
def test_bad_files_are_refused_with_the_reason(option: str, content: str | bytes, reason: str, tmp_path: Path) -> None:
    """One line on stderr, exit code 2, before anything is measured."""
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = run(option, path)
    assert found.exit_code == 2 and reason in found.output and len(found.output.splitlines()) == 1


def test_truncated_and_missing_files_are_refused(stored: Path, tmp_path: Path) -> None:
    """A file cut off in the middle, or not there, or a place that can't be written."""
    cut = tmp_path / "cut.json"
    cut.write_text(stored.read_text()[:5000])
    assert "Create it with" in run("--from", cut).output
    gone = run("--diff", tmp_path / "gone.json")
    assert gone.exit_code == 2 and "there is no passport at" in gone.output
    unwritable = run("--from", stored, "-o", cut / "below" / "a-file.json")
    assert unwritable.exit_code == 2 and "can't write" in unwritable.output


def test_a_file_damaged_inside_is_refused(taken: dict[str, Any], tmp_path: Path) -> None:
    """Right on the outside, without a table within: one line, no traceback."""
    other = copy.deepcopy(taken)
    del other["dtypes"]["float32"]["products"]
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(other))
    found = run("--from", path)
    assert found.exit_code == 2 and "is damaged" in found.output.splitlines()[-1]


def test_an_unknown_device_is_refused() -> None:
    """The reason and the names that work."""
    found = run("--device", "cuda:99")
    assert found.exit_code == 2 and "cuda:99" in found.output


def test_comparing_files_needs_no_torch(stored: Path) -> None:
    """Two stored passports are compared with torch and numpy blocked."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from noisescope.passports.diff import diff\n"
        "from noisescope.passports.diff import read_passport\n"
        f"one = read_passport({str(stored)!r}); assert diff(one, one) == []"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folders_on_the_way_are_made(stored: Path, tmp_path: Path) -> None:
    """As every command that writes makes them."""
    target = tmp_path / "a" / "b" / "copy.json"
    assert run("--from", stored, "-o", target).exit_code == 0
    assert json.loads(target.read_text()) == json.loads(stored.read_text())
