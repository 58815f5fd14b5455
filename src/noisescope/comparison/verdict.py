"""The verdict of a comparison, and the sentences that say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from noisescope.comparison.rows import Logits, SiteRow
from noisescope.comparison.site_divergence import round_off
from noisescope.findings import percent

Verdict = Literal["identical", "round-off", "diverged", "undecided"]


def verdict_of(rows: Sequence[SiteRow], logits: Logits | None) -> Verdict:
    """By the rows that decide; "undecided" where none does, since nothing finite is left on either side."""
    if any(row.diverges for row in rows):
        return "diverged"
    decided = [row for row in rows if row.decided]
    if not decided:
        return "undecided"
    same = all(row.size == 0 for row in decided) and (logits is None or not logits.max_error)
    return "identical" if same else "round-off"


def describe(rows: Sequence[SiteRow], logits: Logits | None, dtype: str, sites: int) -> str:
    """What the rows and logits show; of so many `sites` on either side, those of the rows were compared."""
    verdict = verdict_of(rows, logits)
    if verdict == "diverged":
        text = _divergence(next(row for row in rows if row.diverges), dtype)
    elif verdict == "identical":
        text = _identical(rows, sites)
    elif verdict == "round-off":
        worst = max((row for row in rows if row.relative_l2 is not None), key=lambda row: row.relative_l2 or 0.0)
        text = (
            f"The difference looks like round-off: in {dtype} it grows from layer to layer without a jump. The largest "
            f"relative L2 is {worst.relative_l2:.2g}, at {worst.site}. {_power(rows)}"
        )
    else:
        text = f"At none of the {len(rows)} sites is a finite number left on both sides, so nothing could be compared."
    if len(rows) < sites:
        text += f" {len(rows)} of {sites} sites could be compared: one side lacks the others, or has another shape."
    return text + _undecided(rows) + _left_out(rows) + ("" if verdict == "identical" else _next_token(logits))


def _identical(rows: Sequence[SiteRow], sites: int) -> str:
    which = "The records are" if len(rows) == sites else "What could be compared is"
    sketched = sum(row.detail == "sketch" for row in rows)
    if not sketched:
        return f"{which} identical in every element."
    where = "all sites" if sketched == len(rows) else f"{sketched} of {len(rows)} sites"
    return f"{which} identical; {where} were compared by sketch, which does not show relative L2 below 2e-7."


def _divergence(first: SiteRow, dtype: str) -> str:
    gain = first.gain or 0.0
    least_size, least_gain = round_off(dtype)
    if first.nonfinite:
        what = f"{first.nonfinite} {first.counted} are NaN or infinite on one side only, which is critical"
    elif first.relative_l2 is None:
        what = "the reference is all zeros there, the other side is not"
    elif first.too_far:
        what = f"relative L2 {first.relative_l2:.2g}, {_times(first.relative_l2, first.expected, least_size)}"
        what += f", most of it a gain of {100 * gain:+.2f} %" if gain else ""
    else:
        what = (
            f"a gain of {100 * gain:+.2f} %, {_times(abs(gain), first.expected_gain, least_gain)}, in a relative L2 of "
            f"{first.relative_l2:.2g} that may be round-off"
        )
    return f"The devices diverge at {first.site}: {what}. Later sites inherit this difference."


def _times(size: float, expected: float, least: float) -> str:
    """How many times the error of the inputs, or round-off where theirs is no larger."""
    return f"{size / expected:.0f} times {'the error of its inputs' if expected > least else 'round-off'}"


def _power(rows: Sequence[SiteRow]) -> str:
    """What a fault must reach to be called a divergence."""
    sizes = [row.smallest_detectable for row in rows]
    gains = [row.smallest_detectable_gain for row in rows if row.smallest_detectable_gain is not None]
    text = f"A fault of one operator is detected if it adds a relative L2 above {_range(sizes)}"
    return f"{text}; a common gain if it is above {_range([100 * gain for gain in gains])} %." if gains else f"{text}."


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}, depending on the site"


def _undecided(rows: Sequence[SiteRow]) -> str:
    """Rows that say nothing, where others decide."""
    lost = [row for row in rows if not row.decided]
    if not lost or len(lost) == len(rows):
        return ""
    which = f"{len(lost)} of {len(rows)} sites are undecided, {lost[0].site} first"
    return f" {which}: nothing finite is left on either side."


def _left_out(rows: Sequence[SiteRow]) -> str:
    """What both sides have as NaN or infinite."""
    there = [row for row in rows if row.nonfinite_both]
    if not there:
        return ""
    first = there[0]
    return (
        f" NaN or infinite numbers that are the same on both sides are left out at {len(there)} of {len(rows)} sites: "
        f"{first.nonfinite_both} {first.counted} at {first.site}, the first."
    )


def _next_token(logits: Logits | None) -> str:
    if logits is None:
        return ""
    if logits.kl is None or logits.agreement is None:
        return f" The next token can't be compared: the logits of all {logits.nonfinite} prompts are NaN or infinite."
    left_out = f" ({logits.nonfinite} more have NaN or infinite logits)" if logits.nonfinite else ""
    return (
        f" The next token's distribution differs by {logits.kl:.2g} nats on average, and the likeliest token is the "
        f"same in {percent(logits.agreement)} of {logits.n} prompts{left_out}."
    )
