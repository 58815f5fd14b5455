"""Noise in Hugging Face's Trainer, and in TRL's SFT and GRPO trainers, which are Trainers.

    trainer = Trainer(model=model, ..., callbacks=[TrainingNoiseCallback(aqn)])

A step is the Trainer's own (an optimizer step; its micro-batches draw different noise), so a resumed run goes on at the
right scale. Noise falls where gradients are recorded: the Trainer evaluates, and TRL generates and computes reference
and old log-probabilities, under `torch.no_grad()`, so these are clean. In GRPO the ratio of new to old
log-probabilities then holds the noise, wherever TRL computes the old ones apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from noisescope.errors import InvalidInput
from noisescope.training.aqn import AQN, TrainingNoise, noise

Check = Callable[[nn.Module], Any]  # what it returns goes into the run history: numbers, text, dictionaries


class TrainingNoiseCallback(TrainerCallback):  # type: ignore[misc]
    """Trains under an AQN; scale and counts stand in the Trainer's log history beside the loss.

    check is called with the model every `check_every` steps, noise off: a gate, a diagnosis, anything; its answer goes
    into the history as "noise_check". Where `train()` raises, nobody tells a callback: call `close()`, or the model
    stays noisy.
    """

    def __init__(
        self, aqn: AQN, *, without_gradients: bool = False, check: Check | None = None, check_every: int = 0
    ) -> None:
        if (check is None) != (check_every < 1):
            raise InvalidInput("check and check_every (at least 1) belong together: give both or neither")
        self.aqn = aqn
        self.scope: TrainingNoise | None = None
        self._without_gradients = without_gradients
        self._check, self._every = check, check_every

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        self.scope = noise(model, self.aqn, without_gradients=self._without_gradients, step=state.global_step)
        self.scope.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.at(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.scope is not None and self._check is not None and state.global_step % self._every == 0:
            with self.scope.off():
                state.log_history.append({"step": state.global_step, "noise_check": self._check(model)})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.scope is not None:
            tally = self.scope.tally
            row = {"noise_scale": self.scope.scale, "noise_forward": tally.forward, "noise_backward": tally.backward}
            state.log_history[-1].update(row)
            if logs is not None:
                logs.update(row)  # for the callbacks behind this one: printing, trackers

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def close(self) -> None:
        """Take the noise off after a training that broke off. Does nothing after one that ended."""
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(RuntimeError, None, None)  # as on the way of an error: no complaint about missing noise
