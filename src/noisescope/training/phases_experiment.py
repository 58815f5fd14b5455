"""The phases experiment: the same training with no, forward, backward or both kinds of noise, tested under noise.

An arm is a kind of training noise; arm x seed is one trial, kept when it ends, and resumed from a checkpoint where it
was interrupted. All arms of a seed start from the same weights and see the same data in the same order, and every
trained model is tested on the same problems under the same draws of noise. `gradient_pretest` measures in seconds what
noise does to the gradients, phase by phase, before anything is trained.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from noisescope import stats
from noisescope.atomic_write import read_sealed, write_sealed
from noisescope.errors import InvalidInput, NoiseRoundsAway, unknown
from noisescope.findings import band
from noisescope.injection import Injection, checked_scale
from noisescope.jsonform import to_json
from noisescope.model.forwards import evaluating
from noisescope.probe.draws import ENGINE_VERSION
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.sites import PHASES, Place, canonical_operator
from noisescope.training import schedules
from noisescope.training.aqn import AQN, NormNoise, OperatorNoise, TrainingNoise, derive_seed, noise
from noisescope.training.schedules import Constant
from noisescope.trials import Conditions, Result, Slice, Trial

KINDS = ("none", "both", "forward", "backward", "adaptive", "norm")
NORM_SCALE = 0.01  # QeRL's start
CURVE_POINTS = 40  # times that loss and gradient norm are recorded in a run
CHECKPOINTS = 4  # in a run, so that a killed process loses at most a quarter of it
_TEST_SEED = 0xA5C  # apart from the training's seeds


class TrainingLoop(Protocol):
    """A model in training, a step at a time."""

    model: nn.Module
    step: int

    def advance(self) -> Mapping[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def resume(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """What is learned and tested, as a value that can be sent to other processes."""

    method: ClassVar[
        str
    ]  # "supervised": step by step here; "grpo": by TRL, for which a task has more (demo.task.Practice)

    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    def prepare(self, cache: Path, *, workers: int) -> None: ...
    def begin(self, seed: int, *, device: str, cache: Path) -> Any: ...
    def held_out_loss(self, loop: Any) -> float: ...
    def right(self, model: nn.Module, name_rows: Callable[[Iterable[int]], None] = ...) -> list[bool]: ...
    def data_name(self) -> str: ...
    def dtype(self, device: str) -> torch.dtype: ...  # of what operators compute in training


@dataclass(frozen=True)
class Arm:
    """The noise of one training arm, by name: KIND[@SCALE][:SCHEDULE], such as "forward" or "norm@0.01:staged"."""

    kind: str
    scale: float
    schedule: str = "constant"

    @classmethod
    def of(cls, text: str, scale: float) -> Arm:
        """From its name; `scale` is that of arms that name none."""
        body, _, schedule = text.strip().partition(":")
        kind, at, number = body.partition("@")
        if kind not in KINDS:
            raise unknown("arm", kind, KINDS)
        try:
            own = float(number) if at else NORM_SCALE if kind == "norm" else scale
        except ValueError:
            raise InvalidInput(f"arm {text!r}: the scale after @ must be a number, such as forward@0.025") from None
        if schedule and schedule not in schedules.KINDS:
            raise unknown("schedule", schedule, schedules.KINDS)
        if kind == "none":
            return cls(kind, 0.0)
        if checked_scale(own, f"scale of arm {text!r}") == 0:
            raise InvalidInput(
                f"arm {text!r} has a scale of 0, which means no noise: give a scale above 0, or use the arm none"
            )
        return cls(kind, float(own), schedule or "constant")

    def __str__(self) -> str:
        falls = "" if self.schedule == "constant" else f":{self.schedule}"
        return self.kind if self.kind == "none" else f"{self.kind}@{self.scale:g}{falls}"

    def aqn(self, steps: int, seed: int, operators: frozenset[str], factors: Mapping[Place, float]) -> AQN | None:
        """The arm's noise for a run; `factors` are those of adaptive arms."""
        if self.kind == "none":
            return None
        falling = schedules.named(self.schedule, self.scale, steps)
        if self.kind == "norm":
            return AQN(NormNoise(), falling, seed)
        phases = frozenset(PHASES) if self.kind in ("both", "adaptive") else frozenset({self.kind})
        return AQN(OperatorNoise(operators, phases), falling, seed, factors if self.kind == "adaptive" else {})


@dataclass(frozen=True)
class Design:
    """Which arms are trained, how often, and how they are tested."""

    task: Task
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    levels: tuple[float, ...]
    noise_seeds: int = 2
    operators: frozenset[str] = frozenset({"gemm"})
    factors: Mapping[Place, float] = field(default_factory=dict)  # of adaptive arms
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", frozenset(canonical_operator(name) for name in self.operators))
        levels = (checked_scale(level, "noise level") for level in self.levels)
        object.__setattr__(self, "levels", tuple(sorted({0.0, *levels})))  # retention needs the clean one
        if len({f"{level:g}" for level in self.levels}) < len(self.levels):
            raise InvalidInput(f"noise levels must differ in their first six digits, got {self.levels}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise InvalidInput(f"unknown device {self.device!r}: give cpu, cuda, cuda:1 ...") from error
        if len(set(map(str, self.arms))) < len(self.arms) or not self.arms or not self.seeds:
            raise InvalidInput(
                f"give at least one arm and one seed, and each arm only once; got {', '.join(map(str, self.arms))}"
            )
        if any(arm.kind == "adaptive" for arm in self.arms) and not self.factors:
            raise InvalidInput("an adaptive arm needs per-layer factors: training.from_report(report)")

    def trial(self, arm: Arm, seed: int) -> Trial:
        """What arm x seed is, as a value: its id finds it in a store, whichever machine trained it."""
        device = torch.device(self.device).type
        settings = {
            "arm": str(arm),
            "aqn": arm.aqn(self.task.steps, seed, self.operators, self.factors),
            "task": self.task,
            "seed": seed,
            "levels": self.levels,
            "noise_seeds": self.noise_seeds,
            "operators": self.operators,
        }
        conditions = Conditions(type(self.task).__name__, "float32", device, "as trained", ENGINE_VERSION)
        return Trial(conditions, "train", Slice(self.task.data_name(), 0, self.task.samples), None, settings)

    def trials(self) -> list[tuple[Trial, Arm, int]]:
        """All trials, seed by seed, so that an interrupted run has complete comparisons."""
        return [(self.trial(arm, seed), arm, seed) for seed in self.seeds for arm in self.arms]


@dataclass(frozen=True)
class Job:
    """One trial as sent to a process."""

    design: Design
    arm: Arm
    seed: int
    cache: Path  # the task's data
    checkpoint: Path
    deadline: float = math.inf  # by time.time()


class Trained(NamedTuple):
    """The result of a training run."""

    model: nn.Module
    curve: list[dict[str, float]]
    injections: dict[str, int]  # by phase


def run(job: Job) -> Result | None:
    """Train and test; None if time ran out first, with the progress in the checkpoint."""
    if time.time() >= job.deadline:
        return None
    train_by = train
    if job.design.task.method == "grpo":
        from noisescope.training.grpo import train as train_by
    trained = train_by(job)
    if trained is None:
        return None
    result = evaluate(job.design, *trained)
    job.checkpoint.unlink(missing_ok=True)
    return result


def train(job: Job) -> Trained | None:
    """Train step by step, from the checkpoint if there is one; None if time ran out."""
    design, task = job.design, job.design.task
    loop: TrainingLoop = task.begin(job.seed, device=design.device, cache=job.cache)
    curve: list[dict[str, float]] = []
    before = dict.fromkeys(PHASES, 0)  # injections up to the checkpoint
    started = time.perf_counter()
    kept = _read_checkpoint(job.checkpoint, design.device)
    if kept is not None:
        loop.resume(kept["fitting"])
        curve, before = kept["curve"], kept["injections"]
        started -= kept["seconds"]
    aqn = job.arm.aqn(task.steps, job.seed, design.operators, design.factors)
    scope = contextlib.nullcontext() if aqn is None else noise(loop.model, aqn, rank=0, step=loop.step)
    # Later pieces may be all below the dtype's resolution where a schedule falls; that is not a failure (see
    # `rounding`).
    forgiven = (NoiseRoundsAway,) if any(before.values()) else ()
    with contextlib.suppress(*forgiven), scope as scoped:
        while loop.step < task.steps:
            if scoped is not None:
                scoped.at(loop.step)
            parts = loop.advance()
            if due(loop.step, task.steps, CURVE_POINTS):
                numbers = {"loss": parts["answer"].item(), "gradient_norm": parts["gradient_norm"].item()}
                curve.append({"step": loop.step, **numbers, "held_out": task.held_out_loss(loop)})
            late = time.time() >= job.deadline
            if loop.step < task.steps and (late or due(loop.step, task.steps, CHECKPOINTS)):
                state = {
                    "fitting": loop.state(),
                    "curve": curve,
                    "injections": _added(before, scoped),
                    "seconds": time.perf_counter() - started,
                }
                buffer = io.BytesIO()
                torch.save(state, buffer)
                write_sealed(job.checkpoint, buffer.getvalue())
                if late:
                    break
    if loop.step < task.steps:
        return None
    return Trained(loop.model, curve, _added(before, scoped))


def seconds_before(job: Job) -> float:
    """What the pieces of a training up to its checkpoint took."""
    kept = _read_checkpoint(job.checkpoint, "cpu")
    return 0.0 if kept is None else float(kept["seconds"])


def _read_checkpoint(path: Path, device: str) -> dict[str, Any] | None:
    """None if there is none, or it is damaged: torch would not notice, and training starts again."""
    raw = read_sealed(path)
    return None if raw is None else torch.load(io.BytesIO(raw), map_location=device, weights_only=True)


def _added(before: dict[str, int], scope: TrainingNoise | None) -> dict[str, int]:
    return before if scope is None else {phase: before[phase] + getattr(scope.tally, phase) for phase in PHASES}


def evaluate(design: Design, model: nn.Module, curve: list[dict[str, float]], injections: dict[str, int]) -> Result:
    """Every test problem at every level: a column "LEVEL/NOISE SEED" of 0 and 1 each, with all digits of the level."""
    columns: dict[str, tuple[float, ...]] = {}
    fired: dict[str, int] = {}
    for level in design.levels:
        if level == 0:
            columns["0/0"] = tuple(map(float, design.task.right(model)))
            continue
        for number in range(design.noise_seeds):
            injection = Injection(
                Gaussian(level),
                operators=design.operators,
                phases=frozenset({"forward"}),
                seed=derive_seed(_TEST_SEED, number),
            )
            probe = inject(model, injection)
            with probe as tally:
                columns[f"{level!r}/{number}"] = tuple(map(float, design.task.right(model, probe.rows)))
            fired[f"{level!r}/{number}"] = tally.forward
    facts = {"curve": curve, "training_injections": injections, "asking_injections": fired}
    return Result(tuple(range(len(columns["0/0"]))), columns, facts)


def due(step: int, steps: int, times: int) -> bool:
    """Whether a step is one of `times` that are spread evenly over a run, the last among them."""
    return step * times // steps > (step - 1) * times // steps


def rounding(design: Design, arm: Arm) -> str:
    """In how many steps an arm's noise is below half the spacing of the numbers it is added to, as text."""
    aqn = arm.aqn(design.task.steps, 0, design.operators, design.factors)
    if aqn is None:
        return ""
    dtype = torch.float32 if arm.kind == "norm" else design.task.dtype(design.device)  # weights stay in float32
    smallest = torch.finfo(dtype).eps / 2
    least = min(aqn.layer_multipliers.values(), default=1.0)
    lost = sum(0 < aqn.schedule(step) * least < smallest for step in range(design.task.steps))
    if not lost:
        return ""
    where = "the scale of some layers" if aqn.layer_multipliers else "the scale"
    name = str(dtype).removeprefix("torch.")
    return (
        f"{arm}: in {lost} of {design.task.steps} steps {where} is below {smallest:.2g}, half the spacing of "
        f"{name}: most or all of that noise is lost to rounding, although it is counted"
    )


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
