"""Plans carried out on the model, all on the same samples: a plan counts only if it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noisescope import stats
from noisescope.diagnosis.effects import divergence, paired, ratio
from noisescope.diagnosis.frame import Array, Frame
from noisescope.diagnosis.rows import Divergence
from noisescope.errors import NoisescopeError
from noisescope.injection import Injection
from noisescope.stats import Estimate
from noisescope.trials import Results, Trial


@dataclass(frozen=True)
class Carried:
    """One plan carried out: KL and score of each sample, beside the score of the model as it is."""

    kl: Array
    accuracy: Array
    clean_accuracy: Array

    @property
    def divergence(self) -> Divergence:
        return divergence(self.kl)

    @property
    def score(self) -> Estimate:
        return stats.mean(self.accuracy)

    @property
    def clean_score(self) -> float:
        return float(self.clean_accuracy.mean())

    def over(self, other: Carried) -> Estimate:
        """The typical ratio of this plan's KL to another's on the same sample."""
        return ratio(self.kl, other.kl)


@dataclass(frozen=True)
class Verified:
    """Plans by name as they were carried out, and what could not be seen."""

    plans: Mapping[str, Carried]
    could_not_see: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """Plans by name as injections (None: nothing is rounded); a diagnosis of KL and score under each."""

    injections: Mapping[str, Injection | None]

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        asked = dict.fromkeys([None, *self.injections.values()])
        return [trial for injection in asked for trial in frame.ask(injection, seeds=(0,))]

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> Verified:
        plans = {name: self._carried(frame, results, injection) for name, injection in self.injections.items()}
        return Verified(plans, tuple(notes))

    def _carried(self, frame: Frame, results: Results, injection: Injection | None) -> Carried:
        clean = frame.answer(results, None)
        rounded = clean if injection is None else frame.answer(results, injection, seeds=(0,))
        assert clean is not None and rounded is not None
        for answer in (clean, rounded):
            if answer.error:
                raise NoisescopeError(f"a plan could not be carried out: {answer.error}")
        before, after = paired(frame, clean, rounded)
        kl = np.zeros(len(before)) if injection is None else rounded.mean("kl")
        return Carried(kl, after.mean(axis=1), before)
