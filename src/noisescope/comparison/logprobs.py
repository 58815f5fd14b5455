"""Compares two files of log-probabilities: corrects causes one after another, each in nats, and reports what remains.

The order is fixed: units, rows, alignment, lengths, missing values, tokens, logit processors, storage, first tokens,
position, step. A cause's share is how much correcting it reduces the gap that the previous ones left. The remainder is
reported and never distributed over causes; deciding whether it is round-off needs a band (`noisescope robustness MODEL
--rounding`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from noisescope import stats
from noisescope.comparison import logprob_causes as causes
from noisescope.comparison.logprob_files import Array, LogprobFile, LogprobRow
from noisescope.comparison.logprob_pairs import (
    SENTINEL,
    Found,
    Matched,
    Pair,
    Pairs,
    best_shift,
    copies,
    gap,
    match_rows,
    overlapping,
    removed,
    reorder,
)
from noisescope.comparison.roundoff import RoundoffBand, RoundoffVerdict
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, at_most
from noisescope.findings.pass_fail import Verdict as CheckVerdict
from noisescope.jsonform import to_json
from noisescope.tables import Sheet, Table, Tabular

SCHEMA_VERSION = 1
Verdict = Literal["identical", "round-off", "diverged", "undecided"]
TEMPERATURE_LIMIT = (
    "Without the whole distribution a temperature can be recognised but not undone: the whole gap is attributed to "
    "it, and the lower end of its interval is the part its curve explains."
)
HIDDEN = "other differences can't be separated from the temperature"
LIMITS = (
    "Log-probabilities alone can't distinguish a wrong weight from a wrong operator, a different dtype or a stale "
    "layer: all of these are in the remainder. To locate them, compare records, or run both engines on the same "
    "prompts.",
    "A cause that changes all tokens of all sequences equally at every step shows only in the size of the difference.",
)


@dataclass(frozen=True)
class LogprobSide:
    path: str
    field: str
    sequences: int
    tokens: int


@dataclass(frozen=True)
class LogprobCause:
    """`nats`: mean |difference| per token that correcting it removes, in the order of correction."""

    name: str
    nats: Estimate
    statement: str
    next_step: str
    tokens: int


@dataclass(frozen=True)
class WorstRow:
    sequence: str
    nats: float


@dataclass(frozen=True, kw_only=True)
class LogprobComparison(Tabular):
    """How two files of log-probabilities differ. Gaps are means of |difference|, in nats per token."""

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    words: str
    a: LogprobSide
    b: LogprobSide
    matched_by: str
    sequences: int
    tokens: int
    gap: Estimate
    causes: tuple[LogprobCause, ...]
    remainder: Estimate
    signed: Estimate  # mean of B - A after mending: positive where B finds its tokens likelier
    band: RoundoffBand | None
    roundoff: RoundoffVerdict
    worst: tuple[WorstRow, ...]
    max_gap: float | None
    notes: tuple[str, ...]
    limits: tuple[str, ...]

    @property
    def outcome(self) -> CheckVerdict:
        """ "fail" if a cause was found or more remains than allowed, "undecided" if no limit is known."""
        if self.max_gap is not None and not self.causes:
            return FAIL if self.gap.value is None else at_most(self.gap, self.max_gap)
        if self.verdict in ("identical", "round-off"):
            return PASS
        return FAIL if self.verdict == "diverged" else UNDECIDED

    def sheet(self) -> Sheet:
        tables = {"causes": Table.of(LogprobCause, self.causes), "sequences": Table.of(WorstRow, self.worst)}
        heads = {"name": "cause", "nats": "nats per token", "statement": "", "next_step": "what to do"}
        tone = {"identical": "low", "round-off": "low", "diverged": "critical", "undecided": "moderate"}[self.verdict]
        lines = (self.words, f"{self.sequences} sequences, {self.tokens} tokens.", *self.notes)
        return Sheet(self.verdict, tables, heads, lines, tone=tone)

    def to_json(self) -> str:
        return json.dumps(to_json(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_json(), encoding="utf-8")
        return target


def compare_logprobs(
    a: LogprobFile, b: LogprobFile, *, band: RoundoffBand | None = None, max_gap: float | None = None
) -> LogprobComparison:
    """Compare two files; `band` says what round-off explains, `max_gap` what is allowed, in nats per token."""
    matched = match_rows(a, b)
    pairs: Pairs = tuple(_pair(a.rows[left], b.rows[right]) for left, right in matched.pairs)
    if not any(one.usable.any() for one in pairs):
        raise InvalidInput(
            f"{a.path} and {b.path} have no token with a value on both sides, so nothing can be compared"
        )
    first = gap(pairs)
    found: list[LogprobCause] = []
    hidden = False
    for look in (causes.scale, _copied, _reordered, _misaligned, _truncated, *causes.CAUSES):
        cause = look(pairs) if any(one.usable.any() for one in pairs) else None
        if cause is not None:
            found.append(_cause(cause, pairs))
            pairs, hidden = cause.mended, hidden or cause.whole
    remainder = Estimate(None, None, None, len(pairs), note=HIDDEN) if hidden else gap(pairs)
    own = (
        None
        if band is None or not any(one.usable.any() for one in pairs)
        else band.for_tokens([one.a[one.usable] for one in pairs])
    )
    judged: RoundoffVerdict = "undecided"
    tokens = int(sum(one.usable.sum() for one in pairs))
    if remainder.value == 0:
        judged = "identical"
    elif own is not None:
        judged = own.judge(remainder, tokens=tokens)
    verdict = _verdict(found, judged)
    return LogprobComparison(
        verdict=verdict,
        words=_words(verdict, found, remainder, own, judged),
        a=_side(a),
        b=_side(b),
        matched_by=matched.how,
        sequences=len(pairs),
        tokens=tokens,
        gap=first,
        causes=tuple(found),
        remainder=remainder,
        signed=_signed(pairs),
        band=own,
        roundoff=judged,
        worst=_worst(pairs),
        max_gap=max_gap,
        limits=(*LIMITS, *((TEMPERATURE_LIMIT,) if hidden else ())),
        notes=(*a.notes, *b.notes, *_unmatched(a, b, matched)),
    )


def _cause(found: Found, before: Pairs) -> LogprobCause:
    effect = removed(before, found.mended)
    if found.whole:
        whole = gap(before)
        effect = replace(whole, low=None if effect.low is None else max(effect.low, 0.0), note=HIDDEN)
    return LogprobCause(found.name, effect, found.statement, found.next_step, found.tokens)


def _pair(row_a: LogprobRow, row_b: LogprobRow) -> Pair:
    """Both to the length of the longer one, NaN where one side has ended."""
    x, y = row_a.values, row_b.values
    length = max(len(x), len(y))
    x, y = (np.concatenate([v, np.full(length - len(v), np.nan)]) for v in (x, y))
    return Pair(x, y, row_a, row_b)


# -- rows


def _copied(pairs: Pairs) -> Found | None:
    """Rows of one file whose values another row duplicates, although the other file has two different rows."""
    doubled = {side: copies([row_of(one) for one in pairs]) for side, row_of in _SIDES.items()}
    sizes = np.array([one.size for one in pairs])
    usual = float(np.nanmedian(sizes)) if np.isfinite(sizes).any() else 0.0
    wrong = {
        at
        for at, one in enumerate(pairs)
        if (one.row_a.number in doubled["A"]) != (one.row_b.number in doubled["B"]) and not one.size <= 5 * usual
    }
    if not wrong:
        return None
    side = "A" if doubled["A"] else "B"
    return Found(
        "duplicated rows",
        f"{len(wrong)} sequences of {side} duplicate other sequences in the same file.",
        "Check how batches are gathered: the last batch padded with earlier samples, a retry appended to the "
        "results, an index that does not advance.",
        tuple(one for at, one in enumerate(pairs) if at not in wrong),
        int(sum(len(pairs[at].a) for at in wrong)),
    )


_SIDES: dict[str, Callable[[Pair], LogprobRow]] = {"A": lambda one: one.row_a, "B": lambda one: one.row_b}


def _reordered(pairs: Pairs) -> Found | None:
    left, right = ({row_of(one).number: one for one in pairs} for row_of in _SIDES.values())
    other = reorder([one.row_a for one in pairs], [one.row_b for one in pairs])
    if other is None:
        return None
    mended = [_pair(*_current(left[x].row_a, left[x].a, right[y].row_b, right[y].b)) for x, y in other]
    before, after = gap(pairs).value, gap(mended).value
    if before is None or after is None or after > 0.5 * before:
        return None
    moved = sum(left[x].row_b.number != y for x, y in other)
    return Found(
        "reordered rows",
        f"{moved} of {len(pairs)} sequences of B match other sequences of A than their names or order indicate.",
        "Match sequences by their tokens: load balancing between ranks, shuffling or sorting changed the order.",
        tuple(mended),
        int(sum(len(one.a) for one in mended)),
    )


def _current(row_a: LogprobRow, a: Array, row_b: LogprobRow, b: Array) -> tuple[LogprobRow, LogprobRow]:
    """Rows with their current values: earlier causes may have corrected them."""
    return replace(row_a, values=_ended(a)), replace(row_b, values=_ended(b))


# -- alignment and lengths


def _misaligned(pairs: Pairs) -> Found | None:
    raw = [(_ended(one.a), _ended(one.b)) for one in pairs]
    shift = best_shift(raw)
    if not shift:
        return None
    mended = []
    for one, (x, y) in zip(pairs, raw, strict=True):
        left, right = overlapping(x, y, shift)
        plain = replace(one.row_a, tokens=None), replace(one.row_b, tokens=None)
        mended.append(Pair(left, right, *plain, first=max(0, -shift)))
    ahead = "later" if shift > 0 else "earlier"
    return Found(
        "misaligned",
        f"B holds each token's value {abs(shift)} {'position' if abs(shift) == 1 else 'positions'} {ahead} than A.",
        "Check the shift between logits and the tokens they predict (logits at t predict token t + 1), and whether "
        "one side includes prompt tokens or the first token.",
        tuple(mended),
        int(sum(len(one.a) for one in mended)),
    )


def _ended(values: Array) -> Array:
    """Without the NaN at the end that made both sides equally long."""
    known = np.flatnonzero(~np.isnan(values))
    return values[: known[-1] + 1] if len(known) else values[:0]


def _truncated(pairs: Pairs) -> Found | None:
    """One side ends before the other, or has zeros to the end."""
    mended, lost, cut = [], {"A": 0, "B": 0}, 0
    lengths: dict[str, list[int]] = {"A": [], "B": []}
    for one in pairs:
        ends = {"A": _end(one.a, one.b), "B": _end(one.b, one.a)}
        shared = min(ends.values())
        for side, end in ends.items():
            lost[side] += max(ends.values()) - end
            lengths[side].append(end)
        cut += ends["A"] != ends["B"]
        mended.append(replace(one, a=one.a[:shared], b=one.b[:shared]))
    side = "A" if lost["A"] > lost["B"] else "B"
    whole = sum(len(one.a) for one in pairs)
    if lost[side] < 3 or lost[side] < 0.002 * whole:
        return None
    longest = max(lengths[side])
    at_limit = sum(length == longest for length in lengths[side])
    limit = (
        (f"; {at_limit} of its sequences stop at exactly {longest} tokens")
        if at_limit > max(2, len(pairs) // 4)
        else ""
    )
    return Found(
        "truncated",
        f"{side} lacks the last {lost[side]} of {whole} tokens, in {cut} of {len(pairs)} sequences{limit}.",
        "Compare the length limits (max_tokens, max_model_len, max_response_length) and how batches are padded.",
        tuple(mended),
        lost[side],
    )


def _end(mine: Array, other: Array) -> int:
    """Where values end: NaN from there on, or at least 3 zeros or placeholders where the other side has values."""
    empty = np.isnan(mine) | (mine <= SENTINEL) | ((mine == 0) & (np.isnan(other) | (other < -1e-3)))
    # likely tokens round to 0 here and there: zeros end a sequence only where the other side is not sure, too
    last = np.flatnonzero(~empty & ~((mine == 0) & (other > -1e-3)))
    end = int(last[-1]) + 1 if len(last) else 0
    nan_end = len(_ended(mine))
    return end if nan_end - end >= 3 else nan_end


# -- words


def _verdict(found: list[LogprobCause], judged: RoundoffVerdict) -> Verdict:
    if found or judged == "more than round-off":
        return "diverged"
    if judged == "identical":
        return "identical"
    return "round-off" if judged == "round-off" else "undecided"


def _words(
    verdict: Verdict, found: list[LogprobCause], remainder: Estimate, band: RoundoffBand | None, judged: RoundoffVerdict
) -> str:
    if verdict == "identical":
        return "All log-probabilities present in both files are identical."
    left = "nothing" if not remainder.value else f"{remainder.value:.3g} nats per token"
    left = "an unknown part" if remainder.value is None else left
    start = ""
    if found:
        names = ", ".join(cause.name for cause in found)
        start = f"{'Cause' if len(found) == 1 else 'Causes'} found: {names}. After correction, {left} remains. "
    elif verdict != "round-off":
        start = f"No known cause was found; the files differ by {left}. "
    if band is None:
        return start + (
            "Whether that is round-off can't be decided without a measured round-off band: measure one with "
            "`noisescope robustness MODEL "
            "--rounding -o DIR` and pass --roundoff DIR."
        )
    limit = (
        f"{band.expected.value:.3g} nats per token is expected between healthy systems in {band.dtype}, and at most "
        f"{band.high:.3g}"
    )
    alarm = f"false-alarm rate {100 * band.false_alarm:g} %"
    if judged == "round-off":
        return f"{start}The difference ({left}) is explained by round-off: {limit} ({alarm})."
    if judged == "more than round-off":
        return f"{start}That is more than round-off: {limit} ({alarm})."
    return f"{start}There are too few tokens to decide whether it is round-off."


def _signed(pairs: Pairs) -> Estimate:
    means = [float(one.differences[one.usable].mean()) for one in pairs if one.usable.any()]
    if not means:
        return Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE)
    return stats.mean(means, countable=False)


def _worst(pairs: Pairs) -> tuple[WorstRow, ...]:
    """Sequences with an unusual gap: five times the typical one."""
    sizes = [(one.size, one) for one in pairs if np.isfinite(one.size)]
    usual = float(np.median([size for size, _ in sizes])) if sizes else 0.0
    apart = sorted(((size, one) for size, one in sizes if size > 5 * usual > 0), key=lambda item: -item[0])
    return tuple(WorstRow(one.row_a.key or str(one.row_a.number), size) for size, one in apart[:5])


def _side(file: LogprobFile) -> LogprobSide:
    return LogprobSide(file.path, file.field, len(file.rows), file.tokens)


def _unmatched(a: LogprobFile, b: LogprobFile, matched: Matched) -> list[str]:
    rest = [len(file.rows) - len(matched.pairs) for file in (a, b)]
    return [
        f"{count} sequences of {file.path} have no counterpart and were ignored"
        for count, file in zip(rest, (a, b), strict=True)
        if count
    ]
