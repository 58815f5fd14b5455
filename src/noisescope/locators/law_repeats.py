"""Does a suspect repeat itself? Noise differs from call to call, stale data are what the call before left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisescope.locators.law_readings import differing, host
from noisescope.locators.recompute import host_arithmetic

_RUNS = 4


def steadiness(call: Callable[[Tensor], Tensor], x: Tensor, base: Tensor, other: Tensor | None) -> dict[str, Any]:
    """Facts about repeated calls: `random`, `stale`, and how many elements changed.

    `other` is another input (rows moved by one) that is called in between: a call after it that differs from those
    that repeat each other remembers what was computed before.
    """
    runs = [call(x) for _ in range(_RUNS)]
    if other is not None:
        call(other)
    after = None if other is None else call(x)
    with host_arithmetic():
        kept = [host(run).double() for run in runs[1:]]  # the first may still hold what an earlier call left
        y, first = kept[-1], host(base).double()
        changed = torch.stack([differing(run, y) for run in kept[:-1]]).any(0)
        facts: dict[str, Any] = {"random": bool(changed.any()), "steady": y}
        if after is not None and not facts["random"]:
            facts["stale"] = bool(differing(host(after).double(), y).any())
        if not facts["random"] and bool(differing(first, y).any()):
            facts["stale"] = True
        changed |= differing(first, y)
        if bool(changed.any()):
            hit = changed.any(0)
            facts["changed share"] = float(changed.double().mean())
            facts["changed within channels"] = float(changed[:, hit].double().mean())
        return facts
