"""The bundled model itself: it solves problems, noise costs it some, and it is small."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope import demo
from noisescope.demo.problems import Problem
from noisescope.demo.train import exact_match
from noisescope.model.loading import outline


@pytest.fixture(scope="module")
def subject() -> Any:
    return ns.load("demo", dtype="float32")  # stored as bfloat16, which many CPUs compute slowly


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    rows = [json.loads(line) for line in demo.test_file().read_text("utf-8").splitlines()[:200]]
    return [Problem(row["prompt"], row["answer"], ()) for row in rows]


def test_it_solves_problems_and_noise_costs_some(subject: Any, problems: list[Problem]) -> None:
    """At least 95 % of 200 held-out problems come out right; 5 % noise on the linears takes at least 3 points."""
    clean = sum(exact_match(subject.model, subject.tokenizer, problems, batch=100)) / len(problems)
    injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, phases={"forward"})  # type: ignore[arg-type]
    with ns.inject(subject.model, injection) as tally:
        noisy = sum(exact_match(subject.model, subject.tokenizer, problems, batch=100)) / len(problems)
    assert clean >= 0.95 and tally.forward > 0
    assert 0.5 < noisy <= clean - 0.03, (clean, noisy)


def test_it_stops_by_itself(subject: Any, problems: list[Problem]) -> None:
    """Generation with the saved settings ends at <eos>: the answer is the number and nothing else."""
    inputs = subject.tokenizer(problems[0].prompt, return_tensors="pt")
    out = subject.model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert out[-1] == subject.tokenizer.eos_token_id and len(out) <= 3
    assert subject.model.generation_config.pad_token_id == subject.tokenizer.pad_token_id


def test_it_is_small_and_deep(subject: Any) -> None:
    """Everything bundled is under 8 MB, bfloat16, with 12 to 28 blocks for windows to slide over."""
    assert sum(path.stat().st_size for path in demo.folder().parent.rglob("*") if path.is_file()) <= 8_000_000
    assert outline("demo").model.dtype == torch.bfloat16 and 12 <= len(subject.anatomy.blocks) <= 28


def test_the_record_of_its_training_belongs_to_it(subject: Any) -> None:
    """training.json has the shape of this model and the figures that its test promises."""
    record = json.loads((demo.folder().parent / "training.json").read_text("utf-8"))
    config = subject.model.config
    assert (record["settings"]["layers"], record["settings"]["width"]) == (config.num_hidden_layers, config.hidden_size)
    assert record["n"] >= 500 and record["exact_match_by_noise"]["0.0"] >= 0.95
