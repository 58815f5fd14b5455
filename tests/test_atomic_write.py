"""Files are written whole or not at all, and never through a link."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noisescope.atomic_write import folder_inside, read_sealed, replacing, write_file, write_sealed
from noisescope.cli import app
from noisescope.errors import InvalidInput


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    """An error in between leaves the file of before, and no part file."""
    file = write_file(tmp_path / "new" / "x.txt", "before")
    with pytest.raises(ZeroDivisionError), replacing(file) as part:
        part.write(b"half")
        assert len(list(file.parent.iterdir())) == 2 and file.read_text() == "before"
        raise ZeroDivisionError
    assert file.read_text() == "before" and list(file.parent.iterdir()) == [file]
    assert write_file(file, b"\r\nafter") == file and file.read_bytes() == b"\r\nafter"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """A run's folder from elsewhere may hold report.md -> ~/.bashrc."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.md").symlink_to(tmp_path / "precious")
    write_file(tmp_path / "report.md", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "report.md").read_text() == "new" and not (tmp_path / "report.md").is_symlink()


def test_part_files_are_exclusive_and_unpredictable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a name was guessed, what is there is neither followed nor overwritten."""
    names = set()
    for _ in range(20):
        with replacing(tmp_path / "x") as part:
            names.add(part.name)
    assert len(names) == 20
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".x.guessed.part").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", "new")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_device_is_written_as_it_is() -> None:
    """-o /dev/stdout: there is nothing to replace. A folder in /dev/shm is a folder like others."""
    write_file(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    if os.access("/dev/shm", os.W_OK):
        file = Path("/dev/shm") / f"noisescope-{secrets.token_hex(4)}"
        file.symlink_to("/dev/null")
        assert not write_file(file, "text").is_symlink() and file.read_text() == "text"
        file.unlink()


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A run's folder from elsewhere may hold figures -> ~/somewhere."""
    (tmp_path / "mine").mkdir()
    out = tmp_path / "out"
    assert folder_inside(out, "figures") == folder_inside(out, "figures") == out / "figures"
    for name in ("trend", "work", "figures"):
        shutil.rmtree(out)
        out.mkdir()
        (out / name).symlink_to(tmp_path / "mine")
        with pytest.raises(InvalidInput, match=f"{name} is a symbolic link: remove it, or use another folder"):
            folder_inside(out, name)
    corpus = Path(__file__).parent / "fuzz" / "corpus" / "report" / "robustness.json"
    said = CliRunner().invoke(app, ["report", str(corpus), "-o", str(out), "--format", "json", "--figures"])
    assert said.exit_code == 2 and "is a symbolic link" in said.output and not list((tmp_path / "mine").iterdir())


def test_a_sealed_file_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    """Any flipped bit, any cut, no file, no plain file."""
    file = write_sealed(tmp_path / "x", b"content")
    assert read_sealed(file) == b"content"
    raw = file.read_bytes()
    for at in range(len(raw)):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert read_sealed(file) is None
        file.write_bytes(raw[:at])
        assert read_sealed(file) is None
    assert read_sealed(tmp_path) is None and read_sealed(tmp_path / "y") is None
