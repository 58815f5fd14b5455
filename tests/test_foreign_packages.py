"""A command imports no optional package that it was not asked for, and prints no foreign warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import noisescope

OPTIONAL = ("torchao", "ray", "trl", "lightning", "peft", "datasets", "llmcompressor", "lm_eval", "vllm")
CODE = f"""
import sys
from noisescope.cli import main
try:
    main()
finally:
    print("imported:", [name for name in {OPTIONAL!r} if name in sys.modules])
"""


def test_a_diagnosis_imports_no_optional_package(tmp_path: Path) -> None:
    """Though all are installed here; and stderr holds the chosen settings and progress alone."""
    arguments = ["diagnose", "demo", "--effort", "screen", "--level", "operator", "--samples", "2", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
    first, *lines = done.stderr.splitlines()
    assert first.startswith("device ") or first.startswith("loading"), done.stderr
    assert not [line for line in lines if "arn" in line or "Failed" in line], done.stderr
