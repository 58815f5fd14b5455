"""Adaptive quantisation noise (AQN): what noise, how strong at which step, with which seed; and its scope.

    from noisescope import training

    aqn = training.AQN(training.OperatorNoise(), training.Staged(0.05, 0.0005, steps=1000), seed=0)
    with training.noise(model, aqn) as noise:
        for step, batch in enumerate(batches):
            noise.at(step)
            model(**batch).loss.backward()
            ...

One rule decides when noise is on: **a forward has noise where gradients are recorded, and none else**. So evaluation,
generation (also inside the training step, as in GRPO) and reference log-probabilities are clean without being told, and
gradient checkpointing recomputes what it had. What a step draws is a function of (seed, rank, step, number of the
forward in the step), so a resumed run goes on as an unbroken one would.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from torch import nn

from noisescope.anatomy import Anatomy, dissect
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.injection import Injection
from noisescope.probe.door import unwrap
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Gaussian
from noisescope.probe.tally import Tally
from noisescope.sites import PHASES, Place
from noisescope.training.norm_noise import NormNoise
from noisescope.training.ranks import data_rank
from noisescope.training.schedules import Schedule

STRIDE = 1 << 16  # forwards a step may have (gradient accumulation, several losses)


@dataclass(frozen=True)
class OperatorNoise:
    """Noise on what operators compute: on activations (forward), on their gradients (backward), or on both.

    relative_to is that of `Gaussian`: "element", "rms" or "absolute". backward_ratio is the scale of backward noise
    over that of forward noise.
    """

    operators: frozenset[str] = frozenset({"gemm"})
    phases: frozenset[str] = frozenset(PHASES)
    layers: frozenset[int] | None = None
    relative_to: str = "element"
    backward_ratio: float = 1.0

    renewed = False  # rows are keyed by the forward's number, which at() sets: the seed stays

    def __post_init__(self) -> None:
        self.injection(0.0, 0, {})  # refuses bad values where they are written

    def injection(self, scale: float, seed: int, layer_multipliers: dict[Place, float]) -> Injection:
        """The injection of one step."""
        return Injection(
            Gaussian(scale, self.relative_to),
            operators=self.operators,
            layers=self.layers,
            phases=self.phases,
            phase_scales={"backward": scale * self.backward_ratio} if self.backward_ratio != 1 else {},
            layer_multipliers=layer_multipliers,
            seed=seed,
        )


@dataclass(frozen=True)
class AQN:
    """A kind of noise under a schedule. layer_multipliers (block or outer place: factor) come from `adaptive`."""

    noise: OperatorNoise | NormNoise
    schedule: Schedule
    seed: int = 0
    layer_multipliers: Mapping[Place, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            raise InvalidInput(
                f"schedule is a function of the step, such as training.Constant(0.05); got {self.schedule!r}"
            )

    def injection(self, step: int, rank: int = 0) -> Injection | None:
        """What falls on the model at a step; None where the schedule says 0."""
        scale = self.schedule(step)
        if scale == 0:
            return None
        seed = derived(self.seed, rank, step if self.noise.renewed else 0)
        return self.noise.injection(scale, seed, dict(self.layer_multipliers))


def derived(*parts: int) -> int:
    """A seed from several numbers, unlike any other's."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def noise(
    model: nn.Module, aqn: AQN, *, rank: int | None = None, without_gradients: bool = False, step: int = 0
) -> TrainingNoise:
    """A scope in which `model` trains under `aqn`; `at(step)` on what it gives moves along the schedule.

    rank tells data-parallel processes apart; None asks torch.distributed (`ranks`). With `without_gradients` noise
    falls also where no gradients are recorded: evaluation and generation.
    """
    return TrainingNoise(model, aqn, rank=rank, without_gradients=without_gradients, step=step)


class TrainingNoise:
    """The scope of a training run. `tally` counts what was injected, `scale` is that of the step it is at."""

    def __init__(self, model: nn.Module, aqn: AQN, *, rank: int | None, without_gradients: bool, step: int) -> None:
        self.model, self.aqn, self.step = model, aqn, step
        self.rank = data_rank(model) if rank is None else rank
        self.tally = Tally()
        self.scale = 0.0
        self._without_gradients = without_gradients
        self._anatomy: Anatomy = dissect(unwrap(model))
        self._probe: _TrainingProbe | None = None
        self._open = False
        self._asked = False  # whether any step so far wanted noise
        self._warned = False

    def __enter__(self) -> TrainingNoise:
        self._open = True
        self.at(self.step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._shut()
        if kind is None and self._asked and not (self.tally.forward or self.tally.backward):
            raise NothingInjected(
                "no noise fell on the model in this scope although its schedule asked for some: no forward recorded "
                "gradients (frozen model, torch.no_grad), or what is aimed at never ran"
            )

    def at(self, step: int) -> None:
        """Move to a step of the schedule: call it before the step's first forward."""
        if not self._open:
            raise InvalidInput("at() moves an open scope: use it inside `with training.noise(model, aqn) as noise:`")
        self._warn_of_rounding()
        injection = self.aqn.injection(step, self.rank)
        before, self.step, self.scale = self.scale, step, self.aqn.schedule(step)
        if injection is None:
            self._shut()
            return
        self._asked = True
        if self._probe is None:
            self._probe = _TrainingProbe(self.model, injection, self._anatomy, self.tally, self._without_gradients)
            self._probe.__enter__()
        elif self.scale != before or self.aqn.noise.renewed:
            self._probe.update(injection)
        self._probe.number_from(step * STRIDE)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is as if there were no scope."""
        self._shut()
        self._open = False
        try:
            yield
        finally:
            self._open = True
            self.at(self.step)

    def _shut(self) -> None:
        self._warn_of_rounding()
        if self._probe is not None:
            probe, self._probe = self._probe, None
            probe.__exit__(None, None, None)

    def _warn_of_rounding(self) -> None:
        """A schedule that falls below what the dtype resolves goes on without noise: say so once."""
        rounded = [site for site in self.tally.sites if site.rounded_away]
        if rounded and not self._warned:
            self._warned = True
            scale, floor, dtype = next(iter(rounded[0].rounded_away.values()))
            warnings.warn(
                f"at step {self.step} noise of scale {scale:g} rounds away in {dtype} (first at {rounded[0].module}): "
                f"the smallest that survives there is {floor:.4g}. End the schedule above it, or at 0",
                stacklevel=3,
            )


class _TrainingProbe(Probe):
    """A probe that wakes where gradients are recorded, and whose counts outlive it."""

    def __init__(
        self, model: nn.Module, injection: Injection, anatomy: Anatomy, tally: Tally, without_gradients: bool
    ) -> None:
        super().__init__(model, injection, anatomy=anatomy, check=False, gradients_only=not without_gradients)
        self.tally = tally
        self._counts = {(site.operator, site.place, site.module): site for site in tally.sites}
