"""The rows of the experiment of phases: arms, criteria, the theory, and the report they make up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noisescope.diagnosis.report import SCHEMA_VERSION
from noisescope.jsonform import Json
from noisescope.stats import Estimate

LOGS = ("gradient_norm", "held_out")  # quantities that are compared as logs


@dataclass(frozen=True)
class ArmAccuracy(Estimate):
    """The accuracy of an arm at one noise level, and that of each of its seeds."""

    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class InjectionCounts:
    forward: int
    backward: int


@dataclass(frozen=True)
class ArmTraining:
    """How an arm trained: geometric means over the second half; None where a run diverged."""

    diverged: int
    gradient_norm: float | None
    held_out_loss: float | None
    injections: InjectionCounts


@dataclass(frozen=True)
class ArmRow:
    """An arm in numbers; accuracy and retention by noise level."""

    name: str
    seeds: tuple[int, ...]
    accuracy: Mapping[str, ArmAccuracy]
    retention: Mapping[str, Estimate]
    training: ArmTraining


@dataclass(frozen=True)
class Needed:
    """The cheapest numbers of seeds and problems that would decide a criterion with this power."""

    seeds: int
    n: int
    power: float


@dataclass(frozen=True)
class JudgedCriterion:
    """A criterion with its verdict. `falsifies`: refuted, it falsifies the theory."""

    name: str
    statement: str
    quantity: str
    arms: tuple[str, str]
    noise_level: float
    region: tuple[float | None, float | None]
    estimate: Estimate
    seeds: int
    verdict: str
    would_decide: Needed | None
    falsifies: bool = False

    @property
    def as_log(self) -> bool:
        return self.quantity in LOGS


@dataclass(frozen=True)
class Theory:
    """The theory's verdict, and those of the criteria it follows from."""

    verdict: str
    because: Mapping[str, str]


@dataclass(frozen=True)
class Trained:
    """How many models were trained, failed, and were asked for."""

    done: int
    failed: int
    of: int


@dataclass(frozen=True)
class TaskSource:
    source: str


@dataclass(frozen=True)
class ProblemSource:
    source: str
    samples: int


@dataclass(frozen=True)
class TrainingSettings:
    """`completions` and `wear` are of training by rewards alone; `others` depend on the task."""

    method: str
    start: str
    steps: int
    batch: int
    rate: float
    completions: int | None
    wear: float | None
    others: Mapping[str, Json]


@dataclass(frozen=True)
class PhasesSettings:
    arms: tuple[str, ...]
    seeds: int
    noise_scale: float
    noise_levels: tuple[float, ...]
    noise_seeds: int
    operators: tuple[str, ...]
    factors: Mapping[str, float]
    training: TrainingSettings


@dataclass(frozen=True)
class PhasesAsked:
    """What an experiment was asked."""

    model: TaskSource
    data: ProblemSource
    settings: PhasesSettings
    device: str


@dataclass(frozen=True)
class PhasesCost:
    seconds: float
    training_seconds: float
    trials: int


@dataclass(frozen=True)
class PhasesRun(PhasesAsked):
    """An experiment that has ended, or was drawn from what is done."""

    cost: PhasesCost
    notes: tuple[str, ...]
    finished: str
    versions: Mapping[str, str]
    host: str


@dataclass(frozen=True, kw_only=True)
class PhasesFound:
    """Everything the experiment shows."""

    schema_version: int = SCHEMA_VERSION
    run: PhasesRun
    arms: tuple[ArmRow, ...]
    seeds: tuple[int, ...]
    n: int
    levels: tuple[float, ...]
    trained: Trained
    hypotheses: tuple[JudgedCriterion, ...]
    theory: Theory
    could_not_see: tuple[str, ...]
