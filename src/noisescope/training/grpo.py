"""One training run of the phases experiment with TRL's GRPO.

The policy answers each problem several times, a right answer is worth 1, and answers above their group's mean become
likelier. Noise is injected while gradient mode is on (trainer_callback.py): on the policy's forward and backward, not
on the generation that is rewarded. An interrupted training starts again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from huggingface_hub import constants
from transformers import PrinterCallback, TrainerCallback

from noisescope.errors import MissingExtra
from noisescope.sites import PHASES
from noisescope.training.phases_experiment import Job, Trained, due, keep_epoch
from noisescope.training.trainer_callback import TrainingNoiseCallback, random_state_kept

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise MissingExtra("training by GRPO needs TRL: pip install 'noisescope[trl]'") from error


def train(job: Job) -> Trained:
    """Train the arm's model. All arms of a seed have the same problems and random numbers for sampling."""
    design = job.design
    task: Any = design.task
    loop = task.begin(job.seed, device=design.device, cache=job.cache)
    aqn = job.arm.aqn(task.steps, job.seed, design.operators, design.factors)
    points, loss = task.curve_points, lambda: task.held_out_loss(loop)
    recorder = _HeldOutLoss(points, loss, lambda step: keep_epoch(job, loop.model, step))
    # the Trainer seeds Python, NumPy and torch for the whole process
    with random_state_kept(), _no_telemetry(), tempfile.TemporaryDirectory(prefix="noisescope-") as folder:
        trainer = GRPOTrainer(
            model=loop.model,
            processing_class=task.tokenizer(),
            reward_funcs=rewarded(task),
            args=_config(task, folder, job.seed, on_cpu=torch.device(design.device).type == "cpu"),
            train_dataset=Dataset.from_list(task.questions(loop)),
            callbacks=[recorder] if aqn is None else [TrainingNoiseCallback(aqn), recorder],
        )
        trainer.remove_callback(PrinterCallback)  # standard output is for the report
        trainer.train()
    steps = [row for row in trainer.state.log_history if "grad_norm" in row]
    injections = {phase: steps[-1].get(f"noise_{phase}", 0) for phase in PHASES}
    return Trained(curve(steps, recorder.held_out), injections)


def rewarded(task: Any) -> Callable[..., list[float]]:
    """The reward, by the task's own rule: 1 for a right answer."""

    def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
        return [float(task.reward(text, right)) for text, right in zip(completions, answer, strict=True)]

    return reward


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """TRL trainers report their creation to the hub; noisescope never uses the network."""
    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before


def _config(task: Any, folder: str, seed: int, *, on_cpu: bool) -> GRPOConfig:
    about = task.about()
    return GRPOConfig(
        output_dir=folder,
        max_steps=about["steps"],
        per_device_train_batch_size=about["batch"] * task.completions,
        num_generations=task.completions,
        max_completion_length=task.longest_answer,
        temperature=task.temperature,
        learning_rate=about["rate"],
        warmup_steps=about["warm_up"],
        seed=seed,
        use_cpu=on_cpu,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=not on_cpu,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def curve(steps: Sequence[Mapping[str, float]], held_out: Mapping[int, float]) -> list[dict[str, float]]:
    """A point for each recorded loss, with means over the steps since the one before.

    A single step won't do: where every answer of every group is right, or none, its gradient is 0.
    """
    points, before = [], 0
    for step, loss in held_out.items():
        part = [row for row in steps if before < row["step"] <= step]
        names = {"loss": "loss", "gradient_norm": "grad_norm", "reward": "reward"}
        means = {name: fmean(row[theirs] for row in part) for name, theirs in names.items()}
        points.append({"step": step, **means, "held_out": loss})
        before = step
    return points


class _HeldOutLoss(TrainerCallback):  # type: ignore[misc]
    """Records the held-out loss, by step, and keeps the weights of each epoch."""

    def __init__(self, points: int, loss: Callable[[], float], keep: Callable[[int], None]) -> None:
        self.points, self.loss, self.keep = points, loss, keep
        self.held_out: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.keep(state.global_step)
        if due(state.global_step, state.max_steps, self.points):
            self.held_out[state.global_step] = self.loss()
