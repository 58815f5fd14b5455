"""Noise in TRL's trainers, on the bundled model."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

import noisescope as ns
from noisescope.demo import problems
from noisescope.training import AQN, Constant, OperatorNoise, TrainingNoiseCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
    pytest.mark.filterwarnings("default"),  # TRL's own, on import and in use
]

LINEARS = 16 * 7  # of the blocks: TRL computes the logits it needs from the head's weight, not by calling the head
COMMON = {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
          "save_strategy": "no", "dataloader_pin_memory": False, "bf16": False}  # fmt: skip


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainers, which these tests make themselves, tell the hub of it otherwise."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def subject() -> Any:
    return ns.load("demo", dtype="float32")


def rows(**names: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
    return Dataset.from_list(
        [{column: getattr(item, name) for column, name in names.items()} for item in problems.held_out(8, 5)]
    )


def test_sft(tmp_path: Path) -> None:
    """SFTTrainer trains under noise: every forward of its two steps is counted."""
    from trl import SFTConfig, SFTTrainer

    model = subject()
    callback = TrainingNoiseCallback(AQN(OperatorNoise(frozenset({"linear"})), Constant(0.05)))
    trainer = SFTTrainer(
        model=model.model,
        processing_class=model.tokenizer,
        args=SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, max_length=64, **COMMON),
        train_dataset=rows(prompt="prompt", completion="answer"),
        callbacks=[callback],
    )
    trainer.train()
    found = [row["noise_forward"] for row in trainer.state.log_history if "loss" in row]
    assert found == [LINEARS, 2 * LINEARS]


def test_grpo_generates_without_noise(tmp_path: Path) -> None:
    """GRPO's generation inside the training step is clean: noise that no answer would survive leaves them right."""
    from trl import GRPOConfig, GRPOTrainer

    model = subject()
    answers = {item.prompt: item.answer for item in problems.held_out(8, 5)}
    right: list[float] = []
    fired: list[int] = []

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        scores = [float(text.strip() == answers[prompt]) for prompt, text in zip(prompts, completions, strict=True)]
        right.extend(scores)
        fired.append(callback.scope.tally.forward if callback.scope is not None else -1)
        return scores

    callback = TrainingNoiseCallback(AQN(OperatorNoise(frozenset({"linear"})), Constant(2.0)))
    trainer = GRPOTrainer(
        model=model.model,
        processing_class=model.tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
            temperature=0.1, learning_rate=0.0, **COMMON,
        ),
        train_dataset=rows(prompt="prompt"),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert fired[0] == 0 and callback.scope is None
    assert sum(right) / len(right) > 0.6  # the bundled model solves 98 %; under noise of scale 2 none
    assert trainer.state.log_history[1]["noise_forward"] == 2 * LINEARS
