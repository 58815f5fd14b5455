"""The report of a diagnosis or a robustness curve: the question, the findings, and what could not be measured.

What may differ between two identical runs (times, versions, host) is under `run` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from noisescope.diagnosis.format_question import Question
from noisescope.diagnosis.rows import LevelEffect
from noisescope.diagnosis.section_types import Conclusions
from noisescope.jsonform import ADDED, Json
from noisescope.trials import Conditions

SCHEMA_VERSION = 2  # 2: rows are typed, labels are decided by intervals, KL has a median and a mean


@dataclass(frozen=True)
class ModelFacts:
    source: str
    architecture: str
    fingerprint: str
    blocks: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DataFacts:
    source: str
    kind: str
    samples: int
    scored_tokens: int
    fingerprint: str
    note: str
    measure: str
    available: int | None = field(default=None, metadata=ADDED)  # samples that the source holds, counted to a thousand


@dataclass(frozen=True)
class SettingsFacts:
    """The user's choices that may change a number.

    `question` is the number format asked about; None if noise was injected, with its scale.
    """

    perturbation: str
    noise_scale: float | None
    levels: tuple[str, ...]
    operators: tuple[str, ...]
    layer_operators: tuple[str, ...]
    window: int
    step: int
    outlier_threshold: float
    seeds: tuple[int, ...]
    effort: str
    draws: int
    target_degradation: float
    highest_scale: float
    probes: int
    question: Question | None = None


@dataclass(frozen=True)
class Asked:
    """The question of a run, its model and data, and the conditions."""

    model: ModelFacts
    data: DataFacts
    settings: SettingsFacts
    metric: str
    conditions: Conditions
    device: str
    kl_floor: float


@dataclass(frozen=True)
class Cost:
    seconds: float
    trials: int
    trials_run_now: int
    forwards: float  # of the test data


@dataclass(frozen=True)
class GivenCommand:
    """The command that asks the same: `options` are those that were chosen, as options/command_text.py writes them.

    `cut` are the paths among them that lost all but their last part.
    """

    name: str
    options: Mapping[str, Json]
    cut: tuple[str, ...]


@dataclass(frozen=True)
class Run(Asked):
    """A finished run. `command` is None where no command line can ask it: a model or data from Python."""

    cost: Cost
    notes: tuple[str, ...]
    finished: str
    versions: Mapping[str, str]
    host: str
    store: str | None
    command: GivenCommand | None = field(default=None, metadata=ADDED)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The common start of every run report."""

    schema_version: int = SCHEMA_VERSION
    run: Run


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Conclusions, RunReport):
    """Everything a diagnosis found."""

    @classmethod
    def of(cls, run: Run, found: Conclusions) -> Diagnosis:
        return cls(run=run, **vars(found))


@dataclass(frozen=True)
class RobustnessCurve:
    """Accuracy and retention at several noise levels."""

    operators: tuple[str, ...]
    levels: tuple[LevelEffect, ...]


@dataclass(frozen=True, kw_only=True)
class Robustness(RunReport):
    robustness: RobustnessCurve
    could_not_see: tuple[str, ...]
