"""What a command line leaves open is chosen, with a reason, and kept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noisescope import demo
from noisescope.api import defaults
from noisescope.api.defaults import slowdown, stored_dtype
from noisescope.api.reports import stored_command
from noisescope.model.loading import load, wrap
from noisescope.options.device_commands import LocateOptions
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions
from noisescope.runs.store import Store
from noisescope.testing import tiny_model

DATA = demo.test_file()
OPEN = ("device", "dtype", "effort", "samples")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model stored in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("times", "dtype", "words"),
    [
        (1.1, torch.bfloat16, "dtype bfloat16, as stored"),
        (5.2, torch.float32, "dtype float32 (stored bfloat16 is 5.2 x slower than float32 on this CPU; --dtype bf"),
    ],
)
def test_a_slow_dtype_is_not_taken_in_silence(
    times: float, dtype: torch.dtype, words: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a measurement: float32 where 16 bits are slow. One line says device and dtype, and why."""
    monkeypatch.setattr(defaults, "slowdown", lambda name: times)
    lines: list[str] = []
    asked = DiagnoseOptions.from_command_line({"model": half})
    assert asked.left_open == OPEN
    subject, chosen = defaults.load_chosen(asked, lines.append)
    assert {p.dtype for p in subject.model.parameters()} == {dtype} and len(lines) == 1
    assert lines[0].startswith("device cpu (torch sees no CUDA device here), ") and words in lines[0]
    assert chosen.device == "cpu" and chosen.plain()["dtype"] == (None if times < 1.5 else "float32")


def test_what_is_given_wins(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line, no measurement; and locate keeps the dtype that is under test."""
    monkeypatch.setattr(defaults, "slowdown", lambda name: 9.0)
    lines: list[str] = []
    given = {"model": half, "device": "cpu", "dtype": "bfloat16"}
    subject, _ = defaults.load_chosen(DiagnoseOptions.from_command_line(given), lines.append)
    assert not lines and next(subject.model.parameters()).dtype == torch.bfloat16
    subject, _ = defaults.load_chosen(LocateOptions.from_command_line({"model": half}), lines.append)
    assert next(subject.model.parameters()).dtype == torch.bfloat16
    assert "--dtype float32 is quicker, and another arithmetic" in lines[0]


def test_python_callers_choose_for_themselves() -> None:
    """Only a command line leaves things open."""
    assert DiagnoseOptions().left_open == () and DiagnoseOptions().samples == 100


def test_stored_dtypes(half: str, tmp_path: Path) -> None:
    """By the config, else by the first tensor; the speed is measured here and now."""
    assert stored_dtype(half) == "bfloat16" and stored_dtype("tiny:llama") is None
    tiny_model("llama").save_pretrained(tmp_path)
    assert stored_dtype(str(tmp_path)) is None
    assert 0.01 < slowdown("bfloat16") < 1000


@pytest.fixture(scope="module")
def subject() -> Any:
    """The first blocks of the demo, under another name: of the bundled model the size is known."""
    found = load("demo")
    found.model.model.layers = found.model.model.layers[:2]
    found.model.config.num_hidden_layers = 2
    return replace(wrap(found.model, found.tokenizer), source="somebody's")


@pytest.mark.parametrize(
    ("limit", "left", "effort", "samples", "words"),
    [
        (1e9, OPEN, "standard", 100, "--effort full takes about"),
        (1e-9, OPEN, "screen", 16, "--samples 100 takes about .* and detects losses 2.5 x smaller"),
        (1e-9, ("samples",), "standard", 16, "--samples 100 takes about"),
        (1e-9, ("effort",), "screen", 100, "--effort standard takes about .* and confirms predictions by injection"),
    ],
)
def test_size_by_the_time_it_takes(
    limit: float, left: tuple[str, ...], effort: str, samples: int, words: str, subject: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One timed sample decides between efforts and numbers of samples; the line says what more would buy."""
    monkeypatch.setattr(defaults, "MOST_SECONDS", limit)
    lines: list[str] = []
    chosen = defaults.choose_size(subject, DiagnoseOptions(left_open=left, data=DATA), lines.append)
    assert (chosen.effort, chosen.samples) == (effort, samples)
    assert len(lines) == 1 and f"effort {effort}, {samples} samples: about " in lines[0]
    assert re.search(words, lines[0]), lines[0]


def test_nothing_is_sized_where_all_was_said(subject: Any) -> None:
    """Nor for the bundled model. Of noise levels samples alone are open, and the line names no effort."""
    options = DiagnoseOptions()
    assert defaults.choose_size(subject, options, pytest.fail) is options
    lines: list[str] = []
    assert defaults.choose_size(load("demo"), replace(options, left_open=OPEN), pytest.fail).samples == 100
    levels = RobustnessOptions(left_open=("samples",), generate=False, data=DATA, seeds=1, noise_levels=(0.05,))
    assert defaults.choose_size(subject, levels, lines.append).samples == 100
    assert lines[0].startswith("100 samples: about ")


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    """The same command into the same folder takes what was chosen then, whatever one timed sample says today."""
    asked = DiagnoseOptions.from_command_line({"model": "demo", "output": tmp_path})
    began = replace(asked, device="cpu", dtype="float32", effort="screen", samples=24)
    with Store(tmp_path) as store:
        store.note(command={"name": "diagnose", "options": began.plain(), "again": []})
    assert stored_command(tmp_path)[0] is not None
    again = defaults._as_begun(asked)
    assert (again.effort, again.samples, again.dtype, again.left_open) == ("screen", 24, "float32", ())
    other = DiagnoseOptions.from_command_line({"model": "demo", "output": tmp_path, "metric": "agreement"})
    assert defaults._as_begun(other) is other
