"""Typical mistakes are answered in one line, at once, and without torch."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import noisescope

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'transformers'):
            raise AssertionError(f'{name} is imported')
sys.meta_path.insert(0, Block())
from noisescope.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("mistakes")
    (here / "run.yaml").write_text("windw: 3\n")
    (here / "a.record").mkdir()
    return here


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("diagnose demo --effort standrad", "unknown effort 'standrad'.*Did you mean 'standard'"),
        ("diagnose demo --data nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("diagnose path/to/nothing", "there is no file or folder 'path/to/nothing'"),
        ("diagnose demo --samples -3", "samples must be at least 1, got -3"),
        ("diagnose demo --noise-scale 0", "a noise scale of 0 injects nothing"),
        ("diagnose demo --noise-scale much", "noise_scale must be a number, got the text 'much'"),
        ("diagnose demo --operators sofmax", "unknown operator 'sofmax'.*Did you mean 'softmax'"),
        ("diagnose demo --mode operators", "unknown level 'operators'.*Did you mean 'operator'"),
        ("robustness demo --executor slurm", "unknown executor 'slurm'"),
        ("diagnose demo --device cudaa", "unknown device 'cudaa'.*Did you mean 'cuda'"),
        ("passport --device cuda:one", "a device is a name such as cuda, or with a number cuda:1; got 'cuda:one'"),
        ("diagnose --config run.yaml", "unknown option 'windw'.*Did you mean 'window'"),
        ("report . --format docx", "unknown report format 'docx'"),
        ("diagnose", "MODEL is missing"),
        ("gate demo", "--baseline is missing"),
        ("gate demo --baseline none.json", "there is no report at none.json"),
        ("compare a.record b.record", "there is no folder b.record"),
        ("locate demo --method audti", "unknown method 'audti'.*Did you mean 'audit'"),
        ("plan precision none --average-bits 5", "there is no report at none"),
        ("experiment phases --noise-levels 0 five", "extra argument"),
    ],
)
def test_a_mistake_is_answered_at_once(arguments: str, words: str, folder: Path) -> None:
    """Exit code 2, one line, under a second of processor time, torch never imported."""
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments.split()], cwd=folder, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and not result.stdout
    assert re.search(words, " ".join(result.stderr.split())), result.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
