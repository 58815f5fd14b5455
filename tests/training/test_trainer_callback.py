"""Noise in Hugging Face's Trainer and TRL's: on while training, off while evaluating, right after resuming."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from noisescope.errors import InvalidInput
from noisescope.probe.forward_wrapper import ForwardWrapper
from noisescope.reports.saved_report import Report
from noisescope.testing import tiny_model
from noisescope.training import AQN, Constant, Linear, NormNoise, OperatorNoise, TrainingNoiseCallback

ROWS = [{"input_ids": torch.arange(i, i + 6) % 60 + 1, "labels": torch.arange(i, i + 6) % 60 + 1} for i in range(16)]
AQN_FALLING = AQN(OperatorNoise(), Linear(0.2, 0.05, 4))


def trainer(folder: Path, callbacks: list[Any], model: Any = None, rows: Any = ROWS, **arguments: Any) -> Trainer:
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
                "save_strategy": "no", **arguments}  # fmt: skip
    return Trainer(
        model=model or tiny_model("llama").train(),
        args=TrainingArguments(
            output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=0, dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=rows,
        eval_dataset=ROWS[:4],
        callbacks=callbacks,
    )  # fmt: skip


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def stand_ins(model: Any) -> int:
    return sum(isinstance(module.__dict__.get("forward"), ForwardWrapper) for module in model.modules())


def test_training_is_noisy_and_says_how(tmp_path: Path) -> None:
    """Weights differ from a clean run's, the history has scale and counts, and nothing is left on the model."""
    clean, noisy = trainer(tmp_path, []), trainer(tmp_path, [TrainingNoiseCallback(AQN_FALLING)])
    clean.train()
    noisy.train()
    assert not same(weights(clean), weights(noisy)) and stand_ins(noisy.model) == 0
    steps = [row for row in noisy.state.log_history if "loss" in row]
    assert [row["noise_scale"] for row in steps] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert [row["noise_forward"] for row in steps] == [19, 38, 57, 76] == [row["noise_backward"] for row in steps]


def test_evaluation_inside_training_is_clean(tmp_path: Path) -> None:
    """The loss that the Trainer evaluates between steps is the bare model's, unless noise is asked for."""
    for asked in (False, True):
        callback = TrainingNoiseCallback(AQN(NormNoise(), Constant(0.3)), without_gradients=asked)
        run = trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=4)
        run.train()
        inside = next(row["eval_loss"] for row in run.state.log_history if "eval_loss" in row)
        assert (inside == pytest.approx(run.evaluate()["eval_loss"], rel=1e-6)) != asked


@pytest.mark.parametrize("aqn", [AQN_FALLING, AQN(NormNoise(), Linear(0.2, 0.05, 4))], ids=["operators", "norm"])
def test_resuming_ends_in_the_same_weights(tmp_path: Path, aqn: AQN) -> None:
    """From the checkpoint of step 2 the run goes on at the scale of step 2 and ends as the unbroken one."""
    whole = trainer(tmp_path, [TrainingNoiseCallback(aqn)], save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer(tmp_path, [TrainingNoiseCallback(aqn)])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(whole), weights(again))
    last, resumed = whole.state.log_history[-2], again.state.log_history[-2]
    assert resumed["noise_scale"] == pytest.approx(0.05)
    assert resumed["noise_forward"] == last["noise_forward"] > 0 and resumed["noise_backward"] == last["noise_backward"]


def test_a_checkpoint_of_a_run_without_learning_is_the_first_model(tmp_path: Path) -> None:
    """At a learning rate of 0 the saved model is bit-equal to the model before training: noise is in no file."""
    model = tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    callback = TrainingNoiseCallback(AQN(NormNoise(additive=True), Constant(0.3)))
    run = trainer(tmp_path, [callback], model, learning_rate=0.0, save_strategy="steps", save_steps=2)
    run.train()
    saved = type(model).from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert same(before, saved)


def test_checks_run_without_noise_and_enter_the_history(tmp_path: Path) -> None:
    """Every second step the callable sees a model without wrappers, and its answer is kept with the step."""
    callback = TrainingNoiseCallback(AQN_FALLING, check=stand_ins, check_every=2)
    run = trainer(tmp_path, [callback])
    run.train()
    found = [(row["step"], row["noise_check"]) for row in run.state.log_history if "noise_check" in row]
    assert found == [(2, 0), (4, 0)]
    with pytest.raises(InvalidInput, match="give both check and check_every"):
        TrainingNoiseCallback(AQN_FALLING, check_every=2)


@pytest.mark.parametrize("kind", [OperatorNoise(), NormNoise()], ids=["operators", "norm"])
def test_micro_batches_draw_different_noise(tmp_path: Path, kind: Any) -> None:
    """Equal batches and no learning: operators' noise is new in each micro-batch, norms' in each optimizer step."""
    logits: list[torch.Tensor] = []
    model = tiny_model("llama").train()
    model.lm_head.register_forward_hook(lambda module, args, y: logits.append(y.detach()))
    callback = TrainingNoiseCallback(AQN(kind, Constant(0.1)))
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
    run = trainer(tmp_path, [callback], model, rows=ROWS[:1] * 16, **settings)
    run.train()
    equal = [torch.equal(logits[i], logits[j]) for i, j in ((0, 1), (2, 3), (0, 2), (1, 2), (1, 3))]
    assert equal == [isinstance(kind, NormNoise)] * 2 + [False] * 3
    counts = [row["noise_forward"] for row in run.state.log_history if "loss" in row]
    assert counts == ([10, 20] if isinstance(kind, NormNoise) else [38, 76])


def test_two_callbacks_go_their_own_ways(tmp_path: Path) -> None:
    """Each follows its schedule, also to 0, and has names of its own in the history."""
    both = [TrainingNoiseCallback(AQN(kind, Linear(0.2, 0.0, 3))) for kind in (OperatorNoise(), NormNoise())]
    run = trainer(tmp_path, both)
    run.train()
    rows = [row for row in run.state.log_history if "loss" in row]
    assert [row["noise_forward"] for row in rows] == [19, 38, 38, 38]
    assert [row["noise_2_forward"] for row in rows] == [5, 10, 10, 10]
    assert stand_ins(run.model) == 0


def test_a_check_leaves_training_as_it_was(tmp_path: Path) -> None:
    """A check that calls backward, draws random numbers and gives a report changes no weight, and can be saved."""
    modes: list[bool] = []

    def check(model: Any) -> Report:
        modes.append(model.training)
        model(ROWS[0]["input_ids"][None], labels=ROWS[0]["labels"][None]).loss.backward()
        np.random.rand(random.randint(1, 3) + int(torch.randint(3, ())))
        return Report({"run": {"n": 3}, "could_not_see": []})

    ends = []
    for settings in ({}, {"check": check, "check_every": 1}):
        run = trainer(tmp_path, [TrainingNoiseCallback(AQN_FALLING, **settings)], save_strategy="steps", save_steps=2)
        run.train()
        ends.append(weights(run))
    assert same(*ends) and modes == [False] * 4 and run.model.training
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    answers = [row["noise_check"] for row in history if "noise_check" in row]
    assert answers == [{"run": {"n": 3}, "could_not_see": []}] * 2


def test_an_answer_that_no_checkpoint_could_hold_is_refused_at_once(tmp_path: Path) -> None:
    """A tensor as a check's answer ends the training with the reason, not the next save."""
    callback = TrainingNoiseCallback(AQN_FALLING, check=lambda model: torch.ones(2), check_every=1)
    with pytest.raises(InvalidInput, match="check returned a Tensor"):
        trainer(tmp_path, [callback]).train()
    callback.close()


def test_a_training_that_breaks_off_can_be_cleaned(tmp_path: Path) -> None:
    """After an error close() takes the wrappers off; after a training that ended it does nothing."""

    class Breaks(TrainingNoiseCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

    callback = Breaks(AQN_FALLING)
    run = trainer(tmp_path, [callback], gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="broken"):
        run.train()
    assert stand_ins(run.model) > 0
    callback.close()
    assert stand_ins(run.model) == 0
    callback.close()


def test_lora_merges_have_no_noise(tokens: torch.Tensor) -> None:
    """Adapters merged inside the scope give the weights that they give without it."""
    peft = pytest.importorskip("peft")
    from noisescope.training import noise

    merged = []
    for noisy in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
        if not noisy:
            merged.append(model.merge_and_unload().state_dict())
            continue
        with noise(model, AQN(NormNoise(), Constant(0.3))):
            model(tokens, labels=tokens).loss.backward()
            model.merge_adapter()
            merged.append({k.replace("base_model.model.", "").replace(".base_layer", ""): v.clone()
                           for k, v in model.state_dict().items() if "lora" not in k})  # fmt: skip
    assert same(*merged)
