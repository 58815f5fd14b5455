"""Fused attention: rows that sum to 1, the same shift of all keys, laws in V, and the error against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from noisescope.locators.passport_probes.numbers import (
    Array,
    attempt,
    format_of,
    host_product,
    item,
    nonsense,
    rounded,
    scattered,
    values,
)
from noisescope.locators.passport_probes.operations import Operation

HEADS, TOKENS, WIDTH = 2, 160, 64  # 160: more than one tile of 64 or 128, the last one not full
BOUND = 64.0  # ulps: of a result with rounded weights, a long way; beyond it the answer is wrong, not rough


@np.errstate(all="ignore")
def attention(call: Operation, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
    """All lines about one attention call. Keys and shift are multiples of 1/8, so that their sum is exact."""
    form = format_of(dtype)
    shape = (1, HEADS, TOKENS, WIDTH)
    q, k, v = (2 * scattered(shape, seed, bits) for seed, bits in ((31, form.precision), (32, 5), (33, form.precision)))
    shift = 4 * scattered((WIDTH,), 34, 6)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return values(call(*(torch.from_numpy(a).to(dtype).to(device) for a in (q, k, v))))

    plain = attempt(lambda: {"value": attend(q, k, v)})
    if "skipped" in plain:
        return {"error": plain}
    out = plain["value"]
    ulp = 2.0 ** (1 - form.precision)  # of 1
    reference = _exact(q, k, v)
    unit = ulp * float(np.abs(reference).max())

    def in_units(difference: Array, unit: float, how: str) -> dict[str, Any]:
        worst = float(np.abs(difference).max() / unit)
        if not worst <= BOUND * max(1.0, 2.0 ** (form.precision - 24)):
            return nonsense(f"off by {worst:.3g} ulp", how, worst=rounded(worst))
        return item(rounded(worst), how)

    def laws() -> dict[str, dict[str, Any]]:
        normal = np.abs(out) >= form.smallest_normal
        return {
            "zero": item(not attend(q, k, 0 * v).any(), "V = 0 gives 0"),
            "odd": item(bool(np.array_equal(attend(q, k, -v), -out)), "-V gives the negative"),
            "doubling": item(
                bool(np.array_equal(attend(q, k, 2 * v)[normal], 2 * out[normal])),
                "2 V gives the double where results are normal numbers",
            ),
            "repeat": item(bool(np.array_equal(attend(q, k, v), out)), "the same call twice"),
        }

    return {
        "error": in_units(out - reference, unit, "worst error against float64, in ulps of the largest result"),
        "rows_sum": in_units(attend(q, k, np.ones_like(v)) - 1.0, ulp, "V = 1: worst distance from 1, in ulps of 1"),
        "key_shift": in_units(
            attend(q, k + shift, v) - out,
            unit,
            "the same vector added to all keys: worst change, in ulps of the largest result",
        ),
        "single_key": in_units(
            attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]) - v[:, :, :1],
            ulp * float(np.abs(v[:, :, :1]).max()),
            "one key: worst distance from its value, in ulps of the largest (kernels that divide by a quick reciprocal "
            "miss it by one)",
        ),
        **laws(),
    }


def _exact(q: Array, k: Array, v: Array) -> Array:
    scores = host_product(q, k.swapaxes(-1, -2)) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return host_product(weights / weights.sum(axis=-1, keepdims=True), v)
