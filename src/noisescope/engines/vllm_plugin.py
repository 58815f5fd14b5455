"""Noise in vLLM's workers, enabled by environment variables: the entry point of its general plugins.

    variables = launch.environment(0.02, operators=["linear"], tally="tally", phases="forward", without_gradients=True)

vLLM calls `register` in every process that it starts. It runs all prompts as one row of tokens; here each token is
named by its prompt (a hash of the prompt's ids) and its position, so that what it draws depends neither on the batch
nor on chunks. All samples of one prompt draw the same numbers at a position, as noise on weights would.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisescope.engines.vllm_modules import ModuleMap
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Gaussian
from noisescope.training import schedules
from noisescope.training.launch import STEP_FILE, flag, keep_tally, read
from noisescope.untrusted_files import FileKind, read_foreign

STEP = FileKind("step file", "training.launch.set_step writes it", max_bytes=64)
_STEP_BITS = 32  # of the seed, above those of the seed itself
_MOST_PROMPTS = 1 << 16  # whose names are remembered
_PUT: list[Callable[..., Any]] = []  # forwards that have noise already: vLLM may load a plugin more than once


@dataclass(frozen=True)
class RolloutNoise:
    """The noise that the environment requests."""

    schedule: schedules.Schedule
    operators: frozenset[str]
    seed: int = 0
    tally: Path | None = None

    @classmethod
    def from_environment(cls) -> RolloutNoise | None:
        """None if noise is off, or for training only."""
        if not read("ENABLED", flag) or read("TRAINING_ONLY", flag) or read("BACKWARD_ONLY", flag):
            return None
        scale = read("SCALE", float)
        kind, steps = read("SCHEDULE", str) or "constant", read("STEPS", int) or 1
        schedule = schedules.named(kind, 0.05 if scale is None else scale, steps)
        operators = read("OPERATORS", lambda text: frozenset(text.split(","))) or frozenset({"gemm"})
        return cls(schedule, operators, read("SEED", int) or 0, read("TALLY", Path))

    def step(self) -> int:
        """The trainer's step: what `training.launch.set_step` wrote last."""
        file = None if self.tally is None else self.tally / STEP_FILE
        return read_foreign(file, int, STEP) if file is not None and file.is_file() else 0

    def injection(self, step: int) -> Injection:
        return Injection(
            Gaussian(self.schedule(step)),
            operators=self.operators,
            phases=frozenset({"forward"}),
            seed=self.seed + (step << _STEP_BITS),
        )


class FlatProbe(Probe):
    """A probe for a model that receives one row of tokens: each token is its own sample of length 1."""

    def _name_tokens(
        self, samples: Tensor, positions: Tensor | int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(positions, Tensor) or len(samples) != len(positions):
            raise InvalidInput(f"{len(samples)} tokens are named, but their positions are {positions!r}")
        return samples, positions[:, None]


@dataclass
class _Worker:
    """The probe in one worker's model, open for the lifetime of the process."""

    noise: RolloutNoise
    probe: FlatProbe
    step: int = 0
    names: dict[str, int] = field(default_factory=dict)  # by request

    @classmethod
    def of(cls, model: Any, noise: RolloutNoise) -> _Worker:
        found = cls(noise, FlatProbe(model, noise.injection(0), anatomy=ModuleMap.of(model).anatomy, check=False))
        tally = found.probe.__enter__()
        if noise.tally is not None:
            keep_tally(noise.tally, lambda: {"forward": tally.forward, "backward": 0})
        return found

    def prepare(
        self, requests: Sequence[str], prompts: Callable[[str], Sequence[int] | None], rows: Tensor, at: Tensor
    ) -> None:
        """Name the tokens of the next forward: the request each belongs to, and its position."""
        step = self.noise.step()
        if step != self.step:
            self.probe.update(self.noise.injection(step))
            self.step = step
        if len(self.names) > _MOST_PROMPTS:
            self.names.clear()
        for request in requests:
            if request not in self.names:
                self.names[request] = prompt_name(prompts(request))
        names = torch.tensor([self.names[request] for request in requests])
        self.probe.rows(names[rows], at if at.dim() == 1 else at[0])


def prompt_name(ids: Sequence[int] | None) -> int:
    """A 63-bit name for a prompt's token ids, the same in every process."""
    if ids is None:
        raise InvalidInput("noise in vLLM is keyed by the prompt's token ids, but this prompt consists of embeddings")
    digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def register() -> None:
    """Inject noise into this process's forwards, if the environment requests it; a second call has no effect."""
    noise = RolloutNoise.from_environment()
    if noise is None:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner._model_forward
    if inner not in _PUT:
        GPUModelRunner._model_forward = noisy_forward(inner, noise)
        _PUT.append(GPUModelRunner._model_forward)


def noisy_forward(inner: Callable[..., Any], noise: RolloutNoise) -> Callable[..., Any]:
    """vLLM's forward of real tokens (not those of its warm-up), with noise."""
    workers: dict[int, _Worker] = {}

    @functools.wraps(inner)
    def forward(runner: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        model = runner.get_model()
        if id(model) not in workers:
            check_supported(runner.vllm_config)
            workers[id(model)] = _Worker.of(model, noise)
        count = len(positions) if positions.dim() == 1 else positions.shape[1]
        rows = torch.from_numpy(runner.req_indices.np[:count]).long()
        workers[id(model)].prepare(
            runner.input_batch.req_ids, lambda request: runner.requests[request].prompt_token_ids, rows, positions
        )
        return inner(runner, input_ids, positions, *args, **kwargs)

    return forward


def check_supported(config: Any) -> None:
    """Reject configurations in which noise would silently be lost."""
    if int(config.compilation_config.mode or 0) != 0:
        raise InvalidInput("noise in vLLM needs eager mode, because compiled graphs bypass it: pass enforce_eager=True")
    if config.parallel_config.tensor_parallel_size > 1:
        raise InvalidInput(
            f"noise in vLLM supports only tensor_parallel_size=1, got "
            f"{config.parallel_config.tensor_parallel_size}: with more, each rank would draw the same numbers for "
            f"its part of the channels"
        )
