"""Noise in Hugging Face's Trainer, and in TRL's SFT and GRPO trainers, which are Trainers.

    trainer = Trainer(model=model, ..., callbacks=[TrainingNoiseCallback(aqn)])

A step is the Trainer's own (an optimizer step; its micro-batches draw different noise), so a resumed run continues at
the right scale. Noise is injected while gradient mode is on: the Trainer evaluates, and TRL generates and computes
reference and
old log-probabilities, under `torch.no_grad()`, so these are clean. In GRPO the ratio of new to old log-probabilities
then holds the noise, wherever TRL computes the old ones apart.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from noisescope.errors import InvalidInput
from noisescope.model.forwards import evaluating
from noisescope.training.aqn import AQN, TrainingNoise, noise

Check = Callable[[nn.Module], Any]  # what it returns goes into the run history: numbers, text, dictionaries, reports


class TrainingNoiseCallback(TrainerCallback):  # type: ignore[misc]
    """Trains under an AQN; scale and counts appear in the Trainer's log history next to the loss.

    check is called with the model every `check_every` steps, this noise off and in evaluation mode: a gate, a
    diagnosis, anything; its answer goes into the history as "noise_check", and gradients and random states are
    afterwards what they were. If `train()` raises, callbacks are not called: call `close()`, or the model stays noisy.

    Of several such callbacks in one Trainer the second logs as "noise_2_scale" and so on. After resuming, counts go on
    from the last that was logged before the checkpoint.
    """

    def __init__(
        self, aqn: AQN, *, without_gradients: bool = False, check: Check | None = None, check_every: int = 0
    ) -> None:
        if (check is None) != (check_every < 1):
            raise InvalidInput("give both check and check_every (at least 1), or neither")
        self.aqn = aqn
        self.scope: TrainingNoise | None = None
        self._without_gradients = without_gradients
        self._check, self._every = check, check_every
        self._earlier: dict[str, Any] = {}  # what a resumed run logged last, by name

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        self._earlier = {name: value for row in state.log_history for name, value in row.items()}
        scope = noise(model, self.aqn, without_gradients=self._without_gradients, step=state.global_step)
        self.scope = scope.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.at(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.scope is not None and self._check is not None and state.global_step % self._every == 0:
            with self.scope.off(), _as_it_was(model):
                answer = _plain(self._check(model))
            state.log_history.append({"step": state.global_step, "noise_check": answer})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.scope is not None:
            row, tally = state.log_history[-1], self.scope.tally
            names = itertools.chain(["noise"], (f"noise_{number}" for number in itertools.count(2)))
            name = next(name for name in names if f"{name}_scale" not in row)  # callbacks before this one have theirs
            numbers = {f"{name}_scale": self.scope.scale}
            for phase, count in (("forward", tally.forward), ("backward", tally.backward)):
                numbers[f"{name}_{phase}"] = self._earlier.get(f"{name}_{phase}", 0) + count
            row.update(numbers)
            if logs is not None:
                logs.update(numbers)  # for the callbacks behind this one: printing, trackers

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave(None)

    def close(self) -> None:
        """Remove the noise after an interrupted training. Has no effect after a completed one."""
        self._leave(RuntimeError)  # as on the way of an error: no complaint about missing noise

    def _leave(self, kind: type[BaseException] | None) -> None:
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(kind, None, None)


@contextlib.contextmanager
def random_state_kept(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (on `devices`, or all) afterwards."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, gradients and random states are restored afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with evaluating(model), random_state_kept(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _plain(answer: Any) -> Any:
    """The answer as the Trainer writes it into a checkpoint: JSON, with sorted names."""
    if hasattr(answer, "to_dict"):
        answer = answer.to_dict()
    try:
        return json.loads(json.dumps(dict(answer) if isinstance(answer, Mapping) else answer, sort_keys=True))
    except TypeError as error:
        raise InvalidInput(
            f"check returned a {type(answer).__name__} that can't be written into the run history as JSON ({error}): "
            "return numbers, text, lists, dictionaries of these, or a report"
        ) from None
