"""Plans with calibrated formats, given the inputs that each linear has in the clean model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisescope.injection import Injection
from noisescope.measures.format_costs import Calibrated, PerModule, WeightFormat, with_inputs
from noisescope.measures.input_squares import InputSquares
from noisescope.trials import Slice

if TYPE_CHECKING:
    from noisescope.runs.trial_runner import TrialRunner

_SAMPLES = 8  # at once


def input_squares(runner: TrialRunner, part: Slice) -> Mapping[str, Tensor]:
    """Mean squares of the inputs of each linear on a slice, by module; measured once."""
    if part not in runner.squares:
        with InputSquares(runner.model, runner.anatomy) as squares, torch.no_grad():
            for batch in runner.batches(part, size=_SAMPLES):
                squares.lengths = batch.lengths
                runner.forward(batch, batch.pieces[0])
                runner.forwards += len(batch.ids)
        runner.squares[part] = squares.means()
    return runner.squares[part]


def squares_for(runner: TrialRunner, formats: Iterable[WeightFormat], part: Slice) -> Mapping[str, Tensor]:
    """Those that these formats need."""
    return input_squares(runner, part) if any(isinstance(fmt, Calibrated) for fmt in formats) else {}


def calibrated(runner: TrialRunner, injection: Injection) -> Injection:
    """The injection, with what its calibrated formats count errors by."""
    plan = injection.perturbation
    if not isinstance(plan, PerModule):
        return injection
    parts = {fmt.samples for _, fmt in plan.perturbations if isinstance(fmt, Calibrated)}
    squares = {part: input_squares(runner, part) for part in parts}
    found = tuple(
        (name, with_inputs(fmt, squares[fmt.samples].get(name)) if isinstance(fmt, Calibrated) else fmt)
        for name, fmt in plan.perturbations
    )
    return replace(injection, perturbation=PerModule(found))
