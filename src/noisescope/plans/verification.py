"""Plans carried out on the model, all on the same samples: a plan counts only if it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisescope import stats
from noisescope.diagnosis.effects import Row, estimate, paired
from noisescope.diagnosis.frame import Frame
from noisescope.errors import NoisescopeError
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


@dataclass(frozen=True)
class Verification:
    """Plans by name as injections (None: nothing is rounded); a diagnosis of KL and accuracy under each."""

    injections: Mapping[str, Injection | None]

    def propose(self, frame: Frame, results: Results) -> list[Trial]:
        asked = dict.fromkeys([None, *self.injections.values()])
        return [trial for injection in asked for trial in frame.ask(injection, seeds=(0,))]

    def conclude(self, frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
        rows = {name: self._row(frame, results, injection) for name, injection in self.injections.items()}
        return {"schema_version": 1, "verification": rows, "could_not_see": list(notes)}

    def _row(self, frame: Frame, results: Results, injection: Injection | None) -> Row:
        clean = frame.answer(results, None)
        rounded = clean if injection is None else frame.answer(results, injection, seeds=(0,))
        assert clean is not None and rounded is not None
        for answer in (clean, rounded):
            if answer.error:
                raise NoisescopeError(f"a plan could not be carried out: {answer.error}")
        before, after = paired(frame, clean, rounded)
        kl = np.zeros(len(before)) if injection is None else rounded.mean("kl")
        return {
            "kl": estimate(kl, countable=False),
            "accuracy": stats.mean(after).to_dict(),
            "clean_accuracy": float(before.mean()),
        }
