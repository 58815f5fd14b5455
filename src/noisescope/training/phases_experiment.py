"""The phases experiment: the same training with no, forward, backward or both kinds of noise, tested under noise.

An arm is a kind of training noise; arm x seed is one trial, kept when it ends, and resumed from a checkpoint where it
was interrupted. All arms of a seed start from the same weights and see the same data in the same order. The weights are
saved at the end of each epoch and tested from these files, on the same problems under the same draws of noise. What is
learned is a `Task`: the bundled model's problems (demo/experiment_tasks.py), or any model and data (tuning_task.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from noisescope import progress
from noisescope.atomic_write import read_sealed, write_file, write_sealed
from noisescope.errors import InvalidInput, NoiseRoundsAway, unknown
from noisescope.injection import Injection, checked_scale
from noisescope.probe.draws import ENGINE_VERSION
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.sites import PHASES, Place, canonical_operator
from noisescope.training import schedules
from noisescope.training.aqn import AQN, NormNoise, OperatorNoise, TrainingNoise, derive_seed, noise
from noisescope.trials import Conditions, Result, Slice, Trial, content_id

RULES = ("adaptive", "methodology", "summary", "sensitive")  # kinds of noise both ways, with factors by layer
KINDS = ("none", "both", "forward", "backward", *RULES, "norm")
NORM_SCALE = 0.01  # QeRL's start
CHECKPOINTS = 4  # in a run, so that a killed process loses at most a quarter of it
_TRAINING = 0.5  # of a job's progress; the tests are the rest
SAME = "same: "  # begins the names of columns under the training's own noise
_TEST_SEED = 0xA5C  # apart from the training's seeds


NameRows = Callable[[Iterable[int]], None]  # gets the problems of the next forward


class TrainingLoop(Protocol):
    """A model in training, a step at a time."""

    model: nn.Module
    step: int

    def advance(self) -> Mapping[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def resume(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """What is learned and tested, as a value that can be sent to other processes."""

    @property
    def method(self) -> str: ...  # "supervised": step by step here; "grpo": by TRL, for which a task has more
    @property
    def steps(self) -> int: ...
    @property
    def epoch_ends(self) -> tuple[int, ...]: ...  # steps after which weights are kept, the last step among them
    @property
    def curve_points(self) -> int: ...  # times that loss and gradient norm are recorded in a run
    @property
    def samples(self) -> int: ...
    def about(self) -> dict[str, Any]: ...  # fields of reports.experiment.TrainingSettings
    def model_name(self) -> str: ...
    def data_name(self) -> str: ...
    def prepare(self, folder: Path, *, workers: int) -> Path: ...  # what `begin` reads, made once for all processes
    def begin(self, seed: int, *, device: str, cache: Path) -> Any: ...
    def save(self, model: Any, folder: Path) -> None: ...
    def load(self, folder: Path, *, device: str) -> nn.Module: ...  # what `save` wrote
    def held_out_loss(self, loop: Any) -> float: ...
    def right(self, model: Any, name_rows: NameRows = ..., texts: list[str] | None = None) -> list[bool]: ...
    def dtype(self, device: str) -> torch.dtype: ...  # of what operators compute in training


Factors = Mapping[str, Mapping[Place, float]]  # by rule and layer


@dataclass(frozen=True)
class Arm:
    """The noise of one training arm, by name: KIND[@SCALE][:SCHEDULE], such as "forward" or "norm@0.01:staged"."""

    kind: str
    scale: float
    schedule: str = "constant"
    matched: bool = False  # a schedule is scaled so that its root mean square over the steps is `scale`

    @classmethod
    def of(cls, text: str, scale: float, *, matched: bool = False) -> Arm:
        """From its name; `scale` is that of arms that name none."""
        body, _, schedule = text.strip().partition(":")
        kind, at, number = body.partition("@")
        if kind not in KINDS:
            raise unknown("arm", kind, KINDS)
        try:
            own = float(number) if at else NORM_SCALE if kind == "norm" else scale
        except ValueError:
            raise InvalidInput(f"arm {text!r}: the scale after @ must be a number, such as forward@0.025") from None
        if schedule and schedule not in schedules.NAMES:
            raise unknown("schedule", schedule, schedules.NAMES)
        if kind == "none":
            return cls(kind, 0.0)
        if checked_scale(own, f"scale of arm {text!r}") == 0:
            raise InvalidInput(
                f"arm {text!r} has a scale of 0, which means no noise: give a scale above 0, or use the arm none"
            )
        return cls(kind, float(own), schedule or "constant", matched)

    def __str__(self) -> str:
        falls = "" if self.schedule == "constant" else f":{self.schedule}"
        return self.kind if self.kind == "none" else f"{self.kind}@{self.scale:g}{falls}"

    def aqn(self, steps: int, seed: int, operators: frozenset[str], factors: Factors) -> AQN | None:
        """The arm's noise for a run."""
        if self.kind == "none":
            return None
        falling = schedules.named(self.schedule, self.scale, steps)
        if self.matched:
            falling = schedules.named(self.schedule, self.scale**2 / schedules.dose(falling, steps), steps)
        if self.kind == "norm":
            return AQN(NormNoise(), falling, seed)
        phases = frozenset(PHASES) if self.kind in ("both", *RULES) else frozenset({self.kind})
        return AQN(OperatorNoise(operators, phases), falling, seed, factors.get(self.kind, {}))

    def dose(self, steps: int) -> float:
        """The root mean square of the scale over the steps of a run."""
        aqn = self.aqn(steps, 0, frozenset({"gemm"}), {})
        return 0.0 if aqn is None else schedules.dose(aqn.schedule, steps)


@dataclass(frozen=True)
class Design:
    """Which arms are trained, how often, and how they are tested."""

    task: Task
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    levels: tuple[float, ...]
    noise_seeds: int = 2
    operators: frozenset[str] = frozenset({"gemm"})
    factors: Factors = field(default_factory=dict)
    device: str = "cpu"
    same_noise: bool = False  # test under the training's own draws, too

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
        lacking = {arm.kind for arm in self.arms if arm.kind in RULES} - set(self.factors)
        if lacking:
            raise InvalidInput(f"arms with a rule need per-layer factors, training.from_report(report): {lacking}")

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
            **({"same_noise": True} if self.same_noise else {}),
        }
        conditions = Conditions(type(self.task).__name__, "float32", device, "as trained", ENGINE_VERSION)
        return Trial(conditions, "train", Slice(self.task.data_name(), 0, self.task.samples), None, settings)

    def training_id(self, arm: Arm, seed: int) -> str:
        """What the weights of arm x seed depend on; they can be tested in several ways."""
        aqn = arm.aqn(self.task.steps, seed, self.operators, self.factors)
        return content_id([aqn, self.task, seed, torch.device(self.device).type])

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
    keep: Path | None = None  # where the weights of each epoch stay; None: they are removed after testing

    @property
    def folder(self) -> Path:
        return self.keep or self.checkpoint.with_suffix(".weights")


class Trained(NamedTuple):
    """The result of a training run; the weights of its epochs are in the job's folder."""

    curve: list[dict[str, float]]
    injections: dict[str, int]  # by phase


def run(job: Job) -> Result | None:
    """Train, unless that is done, and test the files; None if time ran out first, with the progress in the checkpoint.

    Files of a training that was tested before are tested again where only the test is another.
    """
    if time.time() >= job.deadline:
        return None
    done = _read_state(job.folder / "trained", "cpu")
    trained = None if done is None else Trained(**done)
    if trained is None:
        train_by = train
        if job.design.task.method == "grpo":
            from noisescope.training.grpo import train as train_by
        trained = train_by(job)
        if trained is None:
            return None
        _write_state(job.folder / "trained", trained._asdict())
    result = evaluate(job, trained)
    job.checkpoint.unlink(missing_ok=True)
    if job.keep is None:
        shutil.rmtree(job.folder)
    return result


def keep_epoch(job: Job, model: Any, step: int) -> None:
    """Save the weights if an epoch ends with this step."""
    ends = job.design.task.epoch_ends
    if step in ends:
        job.design.task.save(model, job.folder / f"epoch-{ends.index(step) + 1}")


def train(job: Job) -> Trained | None:
    """Train step by step, from the checkpoint if there is one; None if time ran out."""
    design, task = job.design, job.design.task
    loop: TrainingLoop = task.begin(job.seed, device=design.device, cache=job.cache)
    curve: list[dict[str, float]] = []
    before = dict.fromkeys(PHASES, 0)  # injections up to the checkpoint
    started = time.perf_counter()
    kept = _read_state(job.checkpoint, design.device)
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
            progress.part(_TRAINING * loop.step / task.steps)
            if due(loop.step, task.steps, task.curve_points):
                numbers = {"loss": parts["answer"].item(), "gradient_norm": parts["gradient_norm"].item()}
                curve.append({"step": loop.step, **numbers, "held_out": task.held_out_loss(loop)})
            keep_epoch(job, loop.model, loop.step)
            late = time.time() >= job.deadline
            if loop.step < task.steps and (late or due(loop.step, task.steps, CHECKPOINTS)):
                state = {
                    "fitting": loop.state(),
                    "curve": curve,
                    "injections": _added(before, scoped),
                    "seconds": time.perf_counter() - started,
                }
                _write_state(job.checkpoint, state)
                if late:
                    break
    if loop.step < task.steps:
        return None
    return Trained(curve, _added(before, scoped))


def seconds_before(job: Job) -> float:
    """What the pieces of a training up to its checkpoint took."""
    kept = _read_state(job.checkpoint, "cpu")
    return 0.0 if kept is None else float(kept["seconds"])


def _write_state(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_sealed(path, buffer.getvalue())


def _read_state(path: Path, device: str) -> dict[str, Any] | None:
    """None if there is none, or it is damaged: torch would not notice, and training starts again."""
    raw = read_sealed(path)
    return None if raw is None else torch.load(io.BytesIO(raw), map_location=device, weights_only=True)


def _added(before: dict[str, int], scope: TrainingNoise | None) -> dict[str, int]:
    return before if scope is None else {phase: before[phase] + getattr(scope.tally, phase) for phase in PHASES}


def evaluate(job: Job, trained: Trained) -> Result:
    """Every test problem at every level, asked of the files: a column "LEVEL/NOISE SEED" of 0 and 1 each, with all
    digits of the level. Columns of epochs before the last begin with "epoch 1: " and so on, those under the training's
    own noise with "same: ". What was answered is in answers.jsonl beside the weights.
    """
    design, task = job.design, job.design.task
    columns: dict[str, tuple[float, ...]] = {}
    fired: dict[str, int] = {}
    tests = len(task.epoch_ends) * len(list(_tests(design, job.seed)))
    for epoch in range(1, len(task.epoch_ends) + 1):
        folder = job.folder / f"epoch-{epoch}"
        model = task.load(folder, device=design.device)
        before = "" if epoch == len(task.epoch_ends) else f"epoch {epoch}: "
        lines = []
        for name, injection, named in _tests(design, job.seed):
            texts: list[str] = []
            if injection is None:
                right = task.right(model, texts=texts)
            else:
                probe = inject(model, injection)
                with probe as tally:
                    right = task.right(model, probe.rows if named else lambda samples: None, texts=texts)
                fired[before + name] = tally.forward
            columns[before + name] = tuple(map(float, right))
            progress.part(_TRAINING + (1 - _TRAINING) * len(columns) / tests)
            rows = enumerate(zip(right, texts, strict=True))
            lines += [json.dumps({"test": name, "problem": at, "right": ok, "answer": text}) for at, (ok, text) in rows]
        write_file(folder / "answers.jsonl", "".join(f"{line}\n" for line in lines))
    facts = {"curve": trained.curve, "training_injections": trained.injections, "asking_injections": fired}
    return Result(tuple(range(task.samples)), columns, facts)


def _tests(design: Design, seed: int) -> Iterator[tuple[str, Injection | None, bool]]:
    """A column's name, its noise, and whether draws go by problem; else they go by forward, as in training."""
    for level in design.levels:
        if level == 0:
            yield "0/0", None, True
            continue
        draws = [(f"{level!r}/{number}", derive_seed(_TEST_SEED, number)) for number in range(design.noise_seeds)]
        if design.same_noise:
            draws.append((f"{SAME}{level!r}/0", derive_seed(seed, 0, 0)))  # of the training's first forwards
        for name, drawn in draws:
            where = {"operators": design.operators, "phases": frozenset({"forward"}), "seed": drawn}
            yield name, Injection(Gaussian(level), **where), not name.startswith(SAME)  # type: ignore[arg-type]


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
