"""The experiment of phases by GRPO: rewards, where noise falls, and that what is stored is not trained again."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noisescope import api
from noisescope.demo.experiment_tasks import Practice, practice
from noisescope.errors import InvalidInput, MissingExtra
from noisescope.training.phases_experiment import Arm, Design, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
    pytest.mark.filterwarnings("default"),  # TRL's own, on import and in use
]

TINY = {"steps": 2, "batch": 2, "examples": 20}
LINEARS = 16 * 7  # of the blocks: TRL computes the logits it needs from the head's weight, not by calling the head
PRODUCTS = 16 * 2  # of attention


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that is followed while training, on few problems."""
    monkeypatch.setattr("noisescope.demo.experiment_tasks.HELD_OUT", 4)


@pytest.fixture
def task() -> Practice:
    return dataclasses.replace(practice("bundled", tests=4, **TINY), completions=2)


@pytest.fixture
def job(task: Practice, tmp_path: Path) -> Callable[[str], Job]:
    cache = task.prepare(tmp_path, workers=1)

    def of(arm: str) -> Job:
        design = Design(task, (Arm.of(arm, 0.05),), (0,), (0.0,))
        return Job(design, design.arms[0], 0, cache, tmp_path / f"{arm}.checkpoint")

    return of


def test_the_reward_counts_exact_answers() -> None:
    """A completion is worth 1 where it is the answer alone, and nothing where it only holds it."""
    from noisescope.training.grpo import rewarded

    assert rewarded(Practice)([" 38", "3", "38 8", "", "7"], ["38", "38", "38", "38", "7"], prompts=[]) == [
        1,
        0,
        0,
        0,
        1,
    ]


def test_a_look_takes_means_over_steps() -> None:
    """A step whose groups all agree has no gradient, and does not make a run look diverged."""
    from noisescope.training.grpo import curve

    steps = [{"step": s, "loss": 0.0, "grad_norm": float(s % 2), "reward": s / 4} for s in (1, 2, 3, 4)]
    found = curve(steps, {2: 0.5, 4: 0.25})
    assert found == [
        {"step": 2, "loss": 0.0, "gradient_norm": 0.5, "reward": 0.375, "held_out": 0.5},
        {"step": 4, "loss": 0.0, "gradient_norm": 0.5, "reward": 0.875, "held_out": 0.25},
    ]


def test_questions_are_the_training_problems(task: Practice, job: Callable[[str], Job]) -> None:
    """Text comes back from the tokens as it was, and the answer stands apart from the prompt."""
    from noisescope.demo import training_data

    expected = training_data.training_problems(0, TINY["examples"], frozenset())
    found = task.questions(task.begin(0, device="cpu", cache=job("none").cache))
    assert found == [{"prompt": item.prompt, "answer": item.answer} for item in expected]


def test_worn_weights_are_those_of_the_seed(task: Practice, job: Callable[[str], Job]) -> None:
    """Arms of a seed start from the same worn weights, another seed from others, near the bundled ones."""
    first, again, other = (
        task.begin(seed, device="cpu", cache=job("none").cache).model.lm_head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    whole = dataclasses.replace(task, wear=0.0).begin(0, device="cpu", cache=job("none").cache).model.lm_head.weight
    assert (first / whole - 1).std().item() == pytest.approx(task.wear, rel=0.05)


def test_noise_falls_on_the_policy_and_not_on_generation(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise that no answer would survive, the first completions are those of the arm without noise."""
    from noisescope.training import grpo

    seen: dict[str, list[Any]] = {}

    def reward(completions: Any, **columns: Any) -> list[float]:
        seen[arm].append(columns["completion_ids"])
        return [float(row % 2) for row in range(len(completions))]  # there is a gradient, whatever was answered

    monkeypatch.setattr(grpo, "rewarded", lambda task: reward)
    trained = {}
    before = torch.random.get_rng_state()
    for arm in ("none", "forward@2", "backward@2"):
        seen[arm] = []
        trained[arm] = grpo.train(job(arm))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(seen["none"]) == TINY["steps"]
    assert seen["none"][0] == seen["forward@2"][0] == seen["backward@2"][0]
    per_run = TINY["steps"] * (LINEARS + PRODUCTS)  # one noisy forward a step
    assert trained["none"].injections == {"forward": 0, "backward": 0}
    assert trained["forward@2"].injections == {"forward": per_run, "backward": 0}
    assert trained["backward@2"].injections == {"forward": 0, "backward": per_run}
    folders = [job(arm).folder / "epoch-1" for arm in trained]
    weights = [job("none").design.task.load(folder, device="cpu").lm_head.weight for folder in folders]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert [point["step"] for point in trained["none"].curve] == [1, 2]
    assert all(point["gradient_norm"] > 0 and point["held_out"] > 0 for point in trained["none"].curve)


def test_a_stored_training_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], conclusions: Any
) -> None:
    """The same call trains nothing and gives the same report; nothing but the report goes to standard output."""
    from noisescope.training import grpo

    asked: dict[str, Any] = {"method": "grpo", "arms": ("none", "both"), "seeds": 1, "samples": 8, **TINY}
    first = api.phases(**asked, options=api.Options(output=tmp_path, workers=1))
    assert capfd.readouterr().out == ""
    assert first["trained"] == {"done": 2, "failed": 0, "of": 2}
    assert first["run"]["settings"]["training"]["completions"] == 8
    monkeypatch.setattr(grpo, "train", lambda job: pytest.fail("trained again"))
    again = api.phases(**asked, options=api.Options(output=tmp_path, workers=1))
    assert conclusions(again) == conclusions(first)
    assert "by GRPO (TRL), with 8 completions per problem" in again.to_markdown()


def test_only_a_model_that_knows_something_can_be_rewarded() -> None:
    """From scratch there is nothing to reward; an unknown method is refused with what there is."""
    with pytest.raises(InvalidInput, match="right some of the time: use bundled"):
        api.phases(method="grpo", start="scratch")
    with pytest.raises(InvalidInput, match="Allowed: supervised, grpo"):
        api.phases(method="ppo")


def test_without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any training and holds the line to type."""
    monkeypatch.delitem(sys.modules, "noisescope.training.grpo", raising=False)
    monkeypatch.delattr("noisescope.training.grpo", raising=False)  # the package keeps what was imported once
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtra, match=r"pip install 'noisescope\[trl\]'"):
        api.phases(method="grpo")
