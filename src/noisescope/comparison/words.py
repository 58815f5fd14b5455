"""The verdict of a comparison, and the sentences that say it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.comparison.parting import Row, round_off
from noisescope.findings import NOT_MEASURABLE, percent

Logits = Mapping[str, Any]


def verdict_of(rows: Sequence[Row], logits: Logits | None) -> str:
    """ "parted", "not measurable" (somewhere nothing finite is left on either side), "identical" or "round-off"."""
    if any(row.parts for row in rows):
        return "parted"
    if any(row.measures.relative_l2 is None for row in rows):
        return NOT_MEASURABLE
    same = all(row.measures.relative_l2 == 0 for row in rows) and (logits is None or logits["max_error"] in (0, None))
    return "identical" if same else "round-off"


def in_words(rows: Sequence[Row], logits: Logits | None, dtype: str, sites: int) -> str:
    """What the rows and logits come to; of so many `sites` on either side, those of the rows were compared."""
    verdict = verdict_of(rows, logits)
    if verdict == "parted":
        said = _parting(next(row for row in rows if row.parts), dtype)
    elif verdict == "identical":
        which = "The records are" if len(rows) == sites else "What could be compared is"
        said = f"{which} identical, bit for bit as far as they go."
    elif verdict == NOT_MEASURABLE:
        said = _unmeasurable(rows)
    else:
        said = (
            f"The difference looks like round-off only: in {dtype} it grows from layer to layer and jumps nowhere. "
            f"The largest relative L2 is {_largest(rows)}."
        )
    if len(rows) < sites:
        said += f" {len(rows)} of {sites} sites could be compared: one side lacks the others, or has another shape."
    return said + _alike(rows) + ("" if verdict == "identical" else _next_token(logits))


def _parting(first: Row, dtype: str) -> str:
    found, gain = first.measures, first.measures.gain or 0.0
    least_size, least_gain = round_off(dtype)
    if found.nonfinite:
        what = f"{found.nonfinite} {found.counted} are NaN or infinite on one side only, which is critical"
    elif found.relative_l2 is None or math.isinf(found.relative_l2):
        what = "the reference has zeros alone there, the other has not"
    elif first.too_far:
        what = f"relative L2 {found.relative_l2:.2g}, {_times(found.relative_l2, first.expected, least_size)}"
        what += f", most of it a gain of {100 * gain:+.2f} %" if gain else ""
    else:
        what = (
            f"a gain of {100 * gain:+.2f} %, {_times(abs(gain), first.expected_gain, least_gain)}, in a relative L2 of "
            f"{found.relative_l2:.2g} that may be round-off"
        )
    return f"The devices part at {first.site}: {what}. What comes after it inherits that."


def _times(size: float, expected: float, least: float) -> str:
    """How many times what came in, or round-off where no more than that came in."""
    return f"{size / expected:.0f} times {'what came in' if expected > least else 'round-off'}"


def _unmeasurable(rows: Sequence[Row]) -> str:
    lost = [row for row in rows if row.measures.relative_l2 is None]
    said = (
        f"At {len(lost)} of {len(rows)} sites, {lost[0].site} first, nothing finite is left on either side: nothing "
        "can be said of them."
    )
    if len(lost) == len(rows):
        return said
    return f"{said} The others don't part; their largest relative L2 is {_largest(rows)}."


def _largest(rows: Sequence[Row]) -> str:
    size, site = max(
        ((row.measures.relative_l2, row.site) for row in rows if row.measures.relative_l2 is not None),
        key=lambda pair: pair[0],
    )
    return f"{size:.2g}, at {site}"


def _alike(rows: Sequence[Row]) -> str:
    """What both sides have as NaN or infinite."""
    there = [row for row in rows if row.measures.nonfinite_both]
    if not there:
        return ""
    first = there[0]
    return (
        f" NaN or infinite numbers that both sides have alike are left out at {len(there)} of {len(rows)} sites: "
        f"{first.measures.nonfinite_both} {first.measures.counted} at {first.site}, the first."
    )


def _next_token(logits: Logits | None) -> str:
    if logits is None:
        return ""
    left_out = f" ({logits['nonfinite']} more have NaN or infinite logits)" if logits["nonfinite"] else ""
    if logits["kl"] is None:
        return (
            f" The next token can't be compared: the logits of all {logits['nonfinite']} prompts are NaN or infinite."
        )
    return (
        f" The next token's distribution differs by {logits['kl']:.2g} nats on average, and the likeliest token is the "
        f"same in {percent(logits['agreement'])} of {logits['n']} prompts{left_out}."
    )
