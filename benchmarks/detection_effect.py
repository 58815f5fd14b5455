"""What the fault-finding benchmark runs a model on, and what a fault does to its operator there."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from detection_grid import Cell
from torch import Tensor

from noisescope.data.dataset import built_in
from noisescope.faults import FaultScope, faulty
from noisescope.localization.inputs import LENGTH, ROWS
from noisescope.model.loading import Subject

# Bits of the mantissa, exponent of the smallest normal number.
_FORMATS = {torch.float64: (52, -1022), torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def windows(subject: Subject, prompt: int) -> list[Tensor] | None:
    """Two batches from random places of the built-in text; every fourth prompt is what a locator takes itself."""
    if subject.tokenizer is None or prompt % 4 == 0:
        return None
    ids = [i for item in built_in().items for i in subject.tokenizer(item.text, verbose=False)["input_ids"]]
    draw = random.Random(prompt)
    starts = [draw.randrange(len(ids) - LENGTH) for _ in range(2 * ROWS)]
    tokens = torch.tensor([ids[start : start + LENGTH] for start in starts])
    return list(tokens.reshape(2, ROWS, LENGTH))


def effect_of(cell: Cell, subject: Subject, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """What the fault does to its operator's output, on the same input: ulps are those of the right value."""
    assert cell.fault is not None
    total = {"elements": 0, "changed": 0, "width": 0, "max_ulp": 0.0}
    sums = dict.fromkeys(("error", "value", "mean", "square"), 0.0)

    def note(before: Tensor, after: Tensor) -> None:
        right, given = before.double(), after.double()
        error = torch.where((right == given) | (right.isnan() & given.isnan()), 0.0, given - right)
        ulps = (error / ulp(right, before.dtype)).nan_to_num(math.inf)
        clipped = ulps.clamp(-4, 4)  # beyond that a fault counts anyway, and sums that cancel would drown the mean
        finite = error.isfinite() & right.isfinite()
        total["elements"] += error.numel()
        total["width"] = error.shape[-1]
        total["changed"] += int((error != 0).sum())
        total["max_ulp"] = max(total["max_ulp"], min(float(ulps.abs().max()), 1e30))
        sums["error"] += float(error[finite].square().sum())
        sums["value"] += float(right[finite].square().sum())
        sums["mean"] += float((clipped * right.sign()).sum())
        sums["square"] += float(clipped.square().sum())

    with faulty(subject.model, cell.fault, cell.where, anatomy=subject.anatomy) as scope, torch.no_grad():
        _listen(scope, note)
        for batch in (*batches[:2], batches[0]):  # as the audit runs them: what strikes by chance strikes alike
            subject.model(**batch)
    n = max(1, total["elements"])
    relative = math.sqrt(sums["error"] / sums["value"]) if sums["value"] else 0.0
    return total | {"rms": relative, "mean_ulp": sums["mean"] / n, "rms_ulp": math.sqrt(sums["square"] / n)}


def _listen(scope: FaultScope, note: Callable[[Tensor, Tensor], None]) -> None:
    """Hear what the scope counts as changed, before and after."""
    scope.note = note  # type: ignore[method-assign,assignment]


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The step from |x| to the next larger number; at 0 the smallest there is."""
    bits, least = _FORMATS[dtype]
    exponent = torch.where(x == 0, least, torch.frexp(x).exponent - 1)
    return torch.exp2(exponent.clamp_min(least).double() - bits)
