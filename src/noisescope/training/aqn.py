"""Adaptive quantisation noise (AQN): the kind of noise, its scale at each step, its seed; and its scope.

    from noisescope import training

    aqn = training.AQN(training.OperatorNoise(), training.Staged(0.05, 0.0005, steps=1000), seed=0)
    with training.noise(model, aqn) as noise:
        for step, batch in enumerate(batches):
            noise.at(step)
            model(**batch).loss.backward()
            ...

One rule decides when noise is on: **a forward has noise if it starts with gradient mode on, and otherwise none**. So
evaluation, generation (also inside the training step, as in GRPO) and reference log-probabilities, which run under
`torch.no_grad()`, are clean by themselves, and gradient checkpointing recomputes what it had. What a step draws is a
function of (seed, rank, step, number of the forward in the step), so a resumed run continues exactly as an
uninterrupted one would. `gradient_pretest` says, before anything is trained, what noise does to gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import stats
from noisescope.errors import InvalidInput, NoiseRoundsAway, NothingInjected
from noisescope.findings import band
from noisescope.injection import Injection
from noisescope.jsonform import to_json
from noisescope.model.forwards import evaluating
from noisescope.names_in_trial_ids import registered
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Gaussian
from noisescope.probe.tally import Tally
from noisescope.sites import PHASES, Place
from noisescope.training.launch import data_rank
from noisescope.training.schedules import Constant, Schedule

STRIDE = 1 << 16  # forwards a step may have (gradient accumulation, several losses)


@registered("noisescope.training.OperatorNoise")
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


@registered("noisescope.training.NormNoise")
@dataclass(frozen=True)
class NormNoise:
    """Noise on the norms' weights: w (1 + s z) for each channel, z ~ N(0, 1); `additive` gives QeRL's w + s z.

    One number per channel, the same for all tokens, is drawn again at each step. QeRL adds it to the parameter in
    place,
    where it stays: later steps add to it, and checkpoints and LoRA merges hold it. Here the norm computes with a noisy
    copy of its weight, made where the forward uses it, and the parameter never changes. The gradient reaches the
    parameter as if the copy were the parameter itself (straight through).

    modules narrows to some norms by glob patterns on dotted names, such as ("*.post_attention_layernorm",).
    """

    additive: bool = False
    modules: tuple[str, ...] | None = None

    renewed = True  # a weight's noise is the same in every forward of a seed, so each step has a seed of its own

    def injection(self, scale: float, seed: int, layer_multipliers: dict[Place, float]) -> Injection:
        """The injection of one step."""
        return Injection(
            Gaussian(scale, "absolute" if self.additive else "element"),
            operators=frozenset({"norm"}),
            modules=self.modules,
            tensor="weight",
            phases=frozenset({"forward"}),
            layer_multipliers=layer_multipliers,
            seed=seed,
        )


@registered("noisescope.training.AQN")
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
                f"schedule must be a function of the step, such as training.Constant(0.05); got {self.schedule!r}"
            )
        if not isinstance(self.noise, OperatorNoise | NormNoise):
            raise InvalidInput(
                "noise must be training.OperatorNoise(...) or training.NormNoise(...), without a scale (the "
                "schedule sets it); "
                f"got {self.noise!r}"
            )
        self.noise.injection(0.0, self.seed, dict(self.layer_multipliers))  # refuses bad seeds and multipliers

    def injection(self, step: int, rank: int = 0) -> Injection:
        """The injection at a step."""
        seed = derive_seed(self.seed, rank, step if self.noise.renewed else 0)
        return self.noise.injection(self.schedule(step), seed, dict(self.layer_multipliers))


def derive_seed(*parts: int) -> int:
    """A seed derived from several numbers, distinct from any other."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def noise(
    model: nn.Module, aqn: AQN, *, rank: int | None = None, without_gradients: bool = False, step: int = 0
) -> TrainingNoise:
    """A scope in which `model` trains under `aqn`; call `at(step)` on it to move along the schedule.

    rank is the process's number among data-parallel ones; None asks torch.distributed (`data_rank`). With
    `without_gradients` noise falls also where gradient mode is off: evaluation and generation.
    """
    return TrainingNoise(model, aqn, rank=rank, without_gradients=without_gradients, step=step)


class TrainingNoise:
    """The scope of a training run. `tally` counts injections, `scale` is that of the current step.

    The model stays open from entering to leaving, and where the schedule is 0 the probe sleeps: so a scope opened
    inside this one stays inside.
    """

    def __init__(self, model: nn.Module, aqn: AQN, *, rank: int | None, without_gradients: bool, step: int) -> None:
        self.aqn, self.step = aqn, step
        self.rank = data_rank(model) if rank is None else rank
        self.tally = Tally()
        self.scale = 0.0
        self._probe = _TrainingProbe(model, aqn.injection(step, self.rank), self.tally, without_gradients)
        self._open = False
        self._offs = 0  # how many off() we are inside
        self._asked = False  # whether any step so far wanted noise
        self._changed: bool | None = None  # whether noise changed an element; None: none was sampled
        self._warned = False

    def __enter__(self) -> TrainingNoise:
        if self._open:
            raise InvalidInput("this scope is already open: create one with training.noise(model, aqn) for each `with`")
        self._probe.__enter__()
        self._open = True
        try:
            self.at(self.step)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._open = False
        self._probe.__exit__(*error)
        if error[0] is None and self._asked:
            self._check()
        self._warn_of_rounding()

    def at(self, step: int) -> None:
        """Move to a step of the schedule: call it before the step's first forward."""
        if not self._open:
            raise InvalidInput("at() needs an open scope: call it inside `with training.noise(model, aqn) as noise:`")
        if self._offs:
            raise InvalidInput("at() can't be called inside off(): leave off() first")
        self._warn_of_rounding()
        self.step, self.scale = step, self.aqn.schedule(step)
        self._probe.asleep = self.scale == 0
        if self._probe.asleep:
            return
        self._asked = True
        injection = self.aqn.injection(step, self.rank)
        if injection.perturbation == self._probe.injection.perturbation:
            self._probe.reseed(injection.seed)
        else:
            self._note_change()
            self._probe.update(injection)
        self._probe.forwards = step * STRIDE  # the draws of unnamed rows depend on that number

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is as if there were no scope; afterwards the step goes on with the draws it had ahead.

        Where another scope was opened inside this one, that one continues and this one is inactive.
        """
        lifted = not self._offs and not self._probe.covered
        if lifted:  # a model without wrappers can be copied, pickled and compiled
            self._probe.__exit__(None, None, None)
        self._offs += 1
        self._probe.asleep = True
        try:
            yield
        finally:
            if lifted:
                self._probe.__enter__()
            self._offs -= 1
            self._probe.asleep = self._offs > 0 or self.scale == 0

    def _check(self) -> None:
        """Requested noise that was never injected, or never changed a number, is an error."""
        if not (self.tally.forward or self.tally.backward):
            raise NothingInjected(
                "no noise was injected in this scope although its schedule asked for some: every forward ran under "
                "torch.no_grad, the targeted operators never ran, or (for noise on gradients only) nothing targeted "
                "requires a gradient"
            )
        self._note_change()
        if self._changed is False:
            raise NoiseRoundsAway(
                "noise was injected in this scope but changed none of the sampled elements, so training ran without "
                f"noise: {self._rounding() or 'it is too small for their dtype'}"
            )

    def _note_change(self) -> None:
        """Before the samples are cleared: note whether noise changed anything. Queries the device until it has."""
        share = None if self._changed else self.tally.changed
        if share is not None:
            self._changed = share > 0

    def _warn_of_rounding(self) -> None:
        """A schedule that falls below the dtype's resolution continues without noise: warn once."""
        words = self._rounding()
        if words and not self._warned:
            self._warned = True
            warnings.warn(f"at step {self.step} {words}. End the schedule above that scale, or at 0", stacklevel=3)

    def _rounding(self) -> str:
        """Where noise is below what its dtype resolves; "" if nowhere."""
        rounded = next((site for site in self.tally.sites if site.rounded_away), None)
        if rounded is None:
            return ""
        scale, floor, dtype = next(iter(rounded.rounded_away.values()))
        return (
            f"noise of scale {scale:g} is lost to rounding in {dtype} (first at {rounded.module}): the smallest "
            f"scale that has an effect there is {floor:.4g}"
        )


class _TrainingProbe(Probe):
    """A probe that is active while gradient mode is on, can be paused, and leaves the checks to its scope."""

    any_order = True  # trainers end callbacks in the order in which they began them

    def __init__(self, model: nn.Module, injection: Injection, tally: Tally, without_gradients: bool) -> None:
        super().__init__(model, injection, check=False, gradients_only=not without_gradients)
        self.tally = tally
        self.asleep = False

    def sleeps(self) -> bool:
        return self.asleep or super().sleeps()


def gradient_pretest(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *,
    noise_scale: float = 0.05,
    operators: frozenset[str] = frozenset({"gemm"}),
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """For noise forward, backward and both: ratio of gradient norms and relative change, over batches.

    If backward noise regularises and forward noise makes models robust, backward noise should move the gradient
    at least as much as forward noise does. The bands of the ratio are those of the original method notes.

    Each batch has draws of its own. The model runs in evaluation mode, because dropout would differ between the clean
    and the noisy gradient; its modes and its own `.grad` are not changed.
    """
    if not batches:
        raise InvalidInput("give at least one batch")
    clean = [_gradient(model, loss, batch) for batch in batches]
    found = {}
    for phases in (("forward",), ("backward",), PHASES):
        aqn = AQN(OperatorNoise(operators, frozenset(phases)), Constant(noise_scale), seed)
        ratios, changes = [], []
        with noise(model, aqn, rank=0) as scope:
            for number, (batch, before) in enumerate(zip(batches, clean, strict=True)):
                scope.at(number)
                after = _gradient(model, loss, batch)
                ratios.append(float(after.norm() / before.norm()))
                changes.append(float((after - before).norm() / before.norm()))
        ratio = stats.mean(ratios)
        found[phases[0] if len(phases) == 1 else "both"] = {
            "ratio": to_json(ratio),
            "band": band("gradient_ratio", ratio.value),
            "change": to_json(stats.mean(changes)),
        }
    return found


def _gradient(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
    """All of it, as one vector on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with evaluating(model):
        slopes = torch.autograd.grad(loss(model, batch), parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([slope.flatten().float() for slope in slopes])
