"""Noise in Lightning's Trainer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from noisescope.probe.forward_wrapper import ForwardWrapper
from noisescope.testing import tiny_model
from noisescope.training import AQN, Linear, OperatorNoise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
    pytest.mark.filterwarnings("default"),  # Lightning's advice on loaders and devices
]


def module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.validated = tiny_model("llama"), []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch, labels=batch).loss
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(self.model(batch, labels=batch).loss.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Module()


def fit(module: Any, callbacks: list[Any], folder: Any, **settings: Any) -> Any:
    import lightning.pytorch as pl

    batches = DataLoader(torch.arange(48).reshape(8, 6) + 1, batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=callbacks, default_root_dir=folder, **settings,
    )  # fmt: skip
    trainer.fit(module, batches, batches)
    return trainer


def test_noise_in_training_and_none_in_validation(tmp_path: Any) -> None:
    """Steps follow the schedule, micro-batches are counted, validation is clean, and nothing stays behind."""
    from noisescope.training import LightningNoiseCallback

    plain, noisy = module(), module()
    callback = LightningNoiseCallback(AQN(OperatorNoise(), Linear(0.2, 0.1, 2)))
    fit(plain, [], tmp_path)
    trainer = fit(noisy, [callback], tmp_path, accumulate_grad_batches=2)
    assert trainer.callback_metrics["noise_scale"] == pytest.approx(0.1)
    assert trainer.callback_metrics["noise_injections"] == 4 * 2 * 19
    assert noisy.validated[2:4] == plain.validated[:2]  # before that, both were tried out
    assert not any(isinstance(part.__dict__.get("forward"), ForwardWrapper) for part in noisy.modules())


def test_an_exception_takes_the_noise_off(tmp_path: Any) -> None:
    """Where a step raises, the module is given back clean."""
    from noisescope.training import LightningNoiseCallback

    broken = module()
    broken.training_step = lambda batch, batch_idx: (_ for _ in ()).throw(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        fit(broken, [LightningNoiseCallback(AQN(OperatorNoise(), Linear(0.2, 0.1, 2)))], tmp_path)
    assert not any(isinstance(part.__dict__.get("forward"), ForwardWrapper) for part in broken.modules())
