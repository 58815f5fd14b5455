"""A report is for sharing: no host name and no absolute path in it, unless they are asked for."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

import noisescope as ns
from noisescope.testing import tiny_model

DATA = "".join(json.dumps({"text": f"The cat number {n} sat on the mat and looked."}) + "\n" for n in range(4))
FORMATS = ("json", "md", "html")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the demo's tokenizer, and data, in a folder with a name that is found anywhere."""
    folder = tmp_path_factory.mktemp("secret-place")
    subject = ns.load("demo")
    tiny_model("llama", vocab_size=subject.model.config.vocab_size).save_pretrained(folder / "model")
    subject.tokenizer.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text(DATA)
    return folder


def texts(place: Path, output: str, *, relative: bool = False, full_paths: bool = False) -> str:
    """All that is written about a small run."""
    model, data = place / "model", place / "data.jsonl"
    subject = ns.load(os.path.relpath(model) if relative else model)
    report = ns.diagnose(
        subject, data=os.path.relpath(data) if relative else data, samples=4, effort="screen", level="operator",
        calibration_samples=0, output=place / output, full_paths=full_paths,
    )  # fmt: skip
    return "".join(path.read_text() for path in report.save(place / output, formats=FORMATS))


def test_no_absolute_path_and_no_host(place: Path) -> None:
    """Only the last part of a path is left, and the report says so."""
    found = texts(place, "out")
    host = platform.node()
    assert "secret-place" not in found and (len(host) < 4 or host not in found)
    assert '"host": ""' in found and '"source": "data.jsonl"' in found and '"store": "out"' in found
    assert "absolute paths are cut to their last part" in found


def test_paths_stay_as_they_were_typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative one is the user's own word."""
    monkeypatch.chdir(place.parent)
    found = texts(place, "typed", relative=True)
    assert f'"source": "{place.name}/data.jsonl"' in found and str(place.parent) not in found
    assert "absolute paths are cut" not in found


def test_all_of_it_when_asked(place: Path) -> None:
    """For use in house."""
    found = texts(place, "whole", full_paths=True)
    assert str(place / "data.jsonl") in found and str(place / "model") in found
    assert json.dumps(platform.node()) in found


def test_records_and_comparisons_neither(place: Path) -> None:
    """They travel between machines."""
    subject = ns.load(place / "model")
    for name in ("a", "b"):
        ns.record(subject, place / "data.jsonl", place / f"{name}.record", samples=1, max_tokens=8)
    assert "secret-place" not in (place / "a.record" / "record.json").read_text()
    assert "secret-place" not in ns.compare(place / "a.record", place / "b.record").to_json()
