"""The examples run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    """Each example runs and says that it left no trace."""
    runpy.run_path(str(path), run_name="__main__")
    assert "bit-equal to before: True" in capsys.readouterr().out
