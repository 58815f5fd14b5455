"""A study's settings, model facts and samples; the trials for a question, and their results as one answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescope.diagnosis import format_question
from noisescope.diagnosis.format_question import Question, Words
from noisescope.errors import InvalidInput, unknown
from noisescope.injection import Injection, checked_scale
from noisescope.options.fields import DEFAULT_OPERATORS, EFFORTS, LEVELS, OUTPUTS
from noisescope.options.fields import GROUP as GROUP
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.sites import GROUPS, Site, canonical_operator, matches_operator
from noisescope.trials import Conditions, Result, Results, Slice, Trial

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """The user's choices. Everything here may change a number, and all of it is in the report."""

    perturbation: Any  # with a field `scale`, or a number format
    levels: tuple[str, ...] = LEVELS
    operators: tuple[str, ...] = DEFAULT_OPERATORS
    layer_operators: tuple[str, ...] = (GROUP,)  # what is noised in a window or a layer
    window: int = DiagnoseOptions.window
    step: int = DiagnoseOptions.step
    outlier_threshold: float = DiagnoseOptions.outlier_threshold
    seeds: tuple[int, ...] = (0, 1, 2)
    effort: str = DiagnoseOptions.effort
    draws: int = 2  # of labels in the screen
    target_degradation: float = DiagnoseOptions.target_degradation  # what the critical threshold is the noise for
    highest_scale: float = DiagnoseOptions.highest_scale
    probes: int = 8  # of the Hessian trace
    on: str = OUTPUTS  # or what a number format is put on

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise unknown("effort", self.effort, EFFORTS)
        for level in self.levels:
            if level not in LEVELS:
                raise unknown("level", level, LEVELS)
        if not self.levels:
            raise InvalidInput(f"no levels selected: choose from {', '.join(LEVELS)}")
        if self.window < 1 or self.step < 1:
            raise InvalidInput(f"window and step must be at least 1, got {self.window} and {self.step}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidInput(f"give at least one seed, and each only once; got {list(self.seeds)}")
        if self.question is None:
            checked_scale(getattr(self.perturbation, "scale", None), "noise scale")
            if self.scale == 0:
                raise InvalidInput("a noise scale of 0 injects nothing; the clean model is measured anyway")
        operators = tuple(dict.fromkeys(canonical_operator(name) for name in self.operators))
        object.__setattr__(self, "operators", operators)
        object.__setattr__(self, "layer_operators", tuple(map(canonical_operator, self.layer_operators)))

    @classmethod
    def of_format(cls, fmt: Any, on: str, **chosen: Any) -> Settings:
        """A number format's settings: it draws nothing, so there is one seed."""
        operators = format_question.OPERATORS[on]
        return cls(fmt, on=on, operators=operators, layer_operators=operators[:1], seeds=(0,), **chosen)

    @property
    def scale(self) -> float | None:
        """Of the noise; None for a number format."""
        return float(self.perturbation.scale) if self.on == OUTPUTS else None

    @property
    def question(self) -> Question | None:
        """The number format that is asked about; None for noise."""
        return Question.of(self.perturbation, self.on)

    @property
    def words(self) -> Words:
        return Words.of(self.question)


@dataclass(frozen=True)
class StudyContext:
    """Settings, and what they apply to, as far as interpretation needs it."""

    settings: Settings
    conditions: Conditions
    sites: tuple[Site, ...]  # every operator of every module
    blocks: int
    test: tuple[Slice, ...]
    calibration: Slice | None = None
    curvature_slice: Slice | None = None  # the few samples on which curvature, gradients and formats are measured
    measure: str = "score"  # "score", "generate" or "custom"
    measure_settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "accuracy"  # the one that degradation and bands are taken of
    chance: float = 0.0  # the task's accuracy by guessing
    uncertain_operators: frozenset[str] = frozenset()  # the model may or may not compute them: a trial decides
    all_token_slices: tuple[Slice, ...] = ()  # the test samples again, every token scored: see gate_baseline.py
    sample_hashes: tuple[str, ...] = ()  # of each test sample's tokens, to find the same sample in another set
    tied: tuple[str, ...] = ()  # modules that share one weight with lm_head: rounded together, as they are stored

    @property
    def metric_name(self) -> str:
        """The name of the metric in rows and sentences; the caller's own metric has no name."""
        return "custom" if self.measure == "custom" else self.metric

    @cached_property
    def default_sites(self) -> tuple[Site, ...]:
        """Sites that an injection reaches unless it is restricted: all but routers and rotary tables."""
        return tuple(site for site in self.sites if site.component != "router" and site.place != "rotary")

    @cached_property
    def present(self) -> frozenset[str]:
        """Operators and groups that the model has, outside routers and rotary tables."""
        found = {site.operator for site in self.default_sites} | self.uncertain_operators
        groups = {g for g in GROUPS if any(matches_operator({g}, s.operator, s.component) for s in self.default_sites)}
        return frozenset(found | groups)

    @property
    def present_operators(self) -> list[str]:
        """Those of the settings' operators that the model computes."""
        return [name for name in self.settings.operators if name in self.present]

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """(first, last) layer of each sliding window; a model of fewer blocks has one window."""
        size = min(self.settings.window, self.blocks)
        starts = list(range(0, self.blocks - size + 1, self.settings.step))
        if starts[-1] != self.blocks - size:
            starts.append(self.blocks - size)  # whatever the step, every layer is in a window
        return tuple((start, start + size - 1) for start in starts)

    @cached_property
    def scoring_all_tokens(self) -> StudyContext:
        """The same study with every token of a sample scored."""
        return dataclasses.replace(self, test=self.all_token_slices, measure="score", measure_settings={})

    def injection(self, *, scale: float | None = None, **where: Any) -> Injection:
        """The settings' noise or format, forward only; `where` are fields of `Injection`.

        A format that is not narrowed falls on all blocks: quantisers leave embeddings and lm_head alone.
        """
        noise = self.settings.perturbation
        if scale is not None:
            noise = dataclasses.replace(noise, scale=scale)
        where.setdefault("operators", frozenset(self.settings.layer_operators))
        where["tensor"] = format_question.TENSOR[self.settings.on]
        if self.settings.question is not None and not where.keys() & {"layers", "places"}:
            where["layers"] = frozenset(range(self.blocks))
        return Injection(noise, phases=frozenset({"forward"}), **where)

    def ask(self, injection: Injection | None, *, seeds: Sequence[int] | None = None) -> list[Trial]:
        """The trials of a question: every slice, every seed. None requests the clean model."""
        chosen = tuple(self.settings.seeds if seeds is None else seeds)
        if (injection, chosen) not in self._asked:
            noise = [None] if injection is None else [dataclasses.replace(injection, seed=seed) for seed in chosen]
            self._asked[injection, chosen] = [
                Trial(self.conditions, self.measure, part, one, self.measure_settings)
                for one in noise
                for part in self.test
            ]
        return list(self._asked[injection, chosen])

    @cached_property
    def _asked(self) -> dict[Any, list[Trial]]:
        """Trials by question: their ids are hashes, and every wave asks for all of them again."""
        return {}

    def answer(
        self, results: Results, injection: Injection | None, *, seeds: Sequence[int] | None = None
    ) -> Answer | None:
        """The combined results of a question; None if one of its trials is not known yet."""
        trials = self.ask(injection, seeds=seeds)
        if any(trial.id not in results for trial in trials):
            return None
        found = [results[trial.id] for trial in trials]
        failed = next((result for result in found if result.failed), None)
        if failed is not None:
            return Answer(error=failed.error, injected_nothing=failed.injected_nothing)
        rows = [found[at : at + len(self.test)] for at in range(0, len(found), len(self.test))]
        return Answer(tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Answer:
    """The results of a question; values of a metric are [seeds, samples], NaN where one was not finite."""

    rows: tuple[tuple[Result, ...], ...] = ()  # seeds x slices
    error: str = ""
    injected_nothing: bool = False  # the error is that no noise was injected

    @property
    def metrics(self) -> list[str]:
        return list(self.rows[0][0].values) if self.rows else []

    @property
    def seeds(self) -> int:
        return len(self.rows)

    @property
    def injections(self) -> int:
        return sum(int(result.facts.get("injections", 0)) for row in self.rows for result in row)

    @property
    def nonfinite(self) -> int:
        return int(np.nansum(self.values("nonfinite"))) if "nonfinite" in self.metrics else 0

    def values(self, name: str) -> Array:
        if name == "perplexity":  # as a score, of which more is better: the inverse
            return np.asarray(np.exp(-self.values("nll")), dtype=np.float64)
        rows = [[np.nan if v is None else v for result in row for v in result.values[name]] for row in self.rows]
        return np.array(rows, dtype=np.float64)

    def mean(self, name: str) -> Array:
        """Averaged over seeds: noise is drawn independently for each sample, so the sample is the unit."""
        column = self.values(name)
        known = np.isfinite(column)
        total, count = np.where(known, column, 0.0).sum(0), known.sum(0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)
