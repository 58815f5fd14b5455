"""Sums and casts element by element: the way they round, and their special numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from noisescope.locators.passport_probes.numbers import attempt, format_of, item, values
from noisescope.locators.passport_probes.operations import Operation
from noisescope.locators.passport_probes.rounding import BIG_SIGN, SMALL, name_rounding
from noisescope.locators.passport_probes.specials import elementwise_specials

REPEATS = 32  # of each sum, to see rounding that is drawn by lot


@np.errstate(all="ignore")
def elementwise(table: Mapping[str, Operation], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """All lines about single sums, products and casts in one dtype."""
    form = format_of(dtype)
    quarter = 2.0 ** (-form.precision - 1)
    big = np.repeat(1.5 * BIG_SIGN, REPEATS)  # [24 x REPEATS]
    small = np.repeat(SMALL * quarter, REPEATS)

    def named(result: torch.Tensor) -> str:
        return name_rounding(((values(result) - big) / quarter).reshape(len(SMALL), REPEATS))

    def add() -> dict[str, Any]:
        a, b = (torch.from_numpy(numbers).to(dtype).to(device) for numbers in (big, small))
        return item(named(table["add"](a, b)), "1.5 + s with s in quarters of an ulp, both signs")

    def cast() -> dict[str, Any]:
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        exact = torch.from_numpy(big + small).to(wide).to(device)
        return item(named(table["cast"](exact, dtype)), f"1.5 + s in {str(wide).removeprefix('torch.')}, cast")

    lines = {"add_rounding": attempt(add)}
    if dtype != torch.float64:
        lines["cast_rounding"] = attempt(cast)
    return {**lines, **elementwise_specials(table, dtype, device)}
