"""The bundled model: a small causal LM that solves arithmetic problems in words, with its data and how it was made.

`noisescope.load("demo")` loads it. No torch here.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def folder() -> Path:
    """The Hugging Face folder of the model."""
    return _HERE / "model"


def test_file() -> Path:
    """Held-out problems, one JSON object a line with "prompt" and "answer"."""
    return _HERE / "test.jsonl"


def calibration_file() -> Path:
    """Other held-out problems of the same form, for what must not be measured on the test's."""
    return _HERE / "calibration.jsonl"
