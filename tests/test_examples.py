"""The examples run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SAYS = {  # what each must have printed: an example that does nothing would run, too
    "first_injection": ["bit-equal to before: True"],
    "number_formats": ["linears in     bf16: 32 of 32", "linears in     int4: "],
    "own_metric": ["linear: ", "softmax: ", "n = 32"],
}


def test_every_example_is_tested() -> None:
    """A new example must say here what it prints."""
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example runs and prints what it is for."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for words in SAYS[name]:
        assert words in printed
