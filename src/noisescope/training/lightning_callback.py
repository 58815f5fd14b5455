"""Noise in Lightning's Trainer: `Trainer(callbacks=[LightningNoiseCallback(aqn)])`.

Noise is injected into the LightningModule's transformer blocks while gradient mode is on; Lightning validates and
predicts with
it off. A step is an optimizer step (`trainer.global_step`), so a resumed run continues at the right scale.
"""

from __future__ import annotations

from typing import Any

from noisescope.errors import MissingExtra
from noisescope.training.aqn import AQN, TrainingNoise, noise

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingExtra("LightningNoiseCallback needs lightning: pip install 'noisescope[lightning]'") from error


class LightningNoiseCallback(Callback):  # type: ignore[misc]
    """Trains under an AQN; scale and counts are logged with each batch."""

    def __init__(self, aqn: AQN, *, without_gradients: bool = False) -> None:
        self.aqn = aqn
        self.scope: TrainingNoise | None = None
        self._without_gradients = without_gradients

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        self.scope = noise(pl_module, self.aqn, without_gradients=self._without_gradients, step=step).__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.scope is not None and trainer.global_step != self.scope.step:  # micro-batches of a step go on counting
            self.scope.at(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.scope is not None:
            tally = self.scope.tally
            numbers = {"noise_scale": self.scope.scale, "noise_injections": float(tally.forward + tally.backward)}
            pl_module.log_dict(numbers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(None if error is None else type(error), error, None)
