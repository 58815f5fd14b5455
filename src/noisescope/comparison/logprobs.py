"""Compares two files of log-probabilities: corrects causes one after another, each in nats, and reports what remains.

The order is fixed: units, rows, alignment, lengths, missing values, tokens, logit processors, storage, first tokens,
position, step. A cause's share is how much correcting it reduces the gap that the previous ones left. The remainder is
reported and never distributed over causes; deciding whether it is round-off needs a band (`noisescope robustness MODEL
--rounding`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from noisescope import stats
from noisescope.comparison import logprob_causes as causes
from noisescope.comparison.logprob_files import LogprobFile
from noisescope.comparison.logprob_pairs import Found, Matched, Pairs, gap, match_rows, removed
from noisescope.comparison.logprob_rows import duplicated, misaligned, pair_rows, reordered, repeated, truncated
from noisescope.comparison.roundoff import RoundoffBand, RoundoffVerdict
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, at_most
from noisescope.findings.pass_fail import Verdict as CheckVerdict
from noisescope.jsonform import to_json
from noisescope.tables import Sheet, Table, Tabular

SCHEMA_VERSION = 1
NEVER_ROUND_OFF = 0.5  # nats per token: ten times the largest gap of a healthy pair that was measured (bfloat16, 0.045)
_STORED = 1e-12  # nats per token: undoing a factor leaves the rounding of float64
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
    pairs: Pairs = tuple(pair_rows(a.rows[left], b.rows[right]) for left, right in matched.pairs)
    if not any(one.usable.any() for one in pairs):
        raise InvalidInput(
            f"{a.path} and {b.path} have no token with a value on both sides, so nothing can be compared"
        )
    first = gap(pairs)
    found: list[LogprobCause] = []
    hidden = False
    looks = (lambda now: repeated(a, b, matched, now), causes.scale, duplicated, reordered, misaligned, truncated)
    for look in (*looks, *causes.CAUSES):
        left = gap(pairs).value
        if look in causes.OF_SIZES and left is not None and left <= _STORED:
            continue
        if look in causes.BY_POSITION and hidden:  # what a temperature leaves depends on the text
            continue
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
    if remainder.value is not None and remainder.value <= _STORED:
        judged = "identical"
    elif remainder.value is not None and remainder.value > NEVER_ROUND_OFF:
        judged = "more than round-off"
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
        notes=(*a.notes, *b.notes, *_unmatched(a, b, matched), *_order(matched)),
    )


def _cause(found: Found, before: Pairs) -> LogprobCause:
    effect = removed(before, found.mended)
    if found.whole:
        whole = gap(before)
        effect = replace(whole, low=None if effect.low is None else max(effect.low, 0.0), note=HIDDEN)
    return LogprobCause(found.name, effect, found.statement, found.next_step, found.tokens)


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
    left = "nothing" if (remainder.value or 0.0) <= _STORED else f"{remainder.value:.3g} nats per token"
    left = "an unknown part" if remainder.value is None else left
    start = ""
    if found:
        names = ", ".join(cause.name for cause in found)
        start = f"{'Cause' if len(found) == 1 else 'Causes'} found: {names}. After correction, {left} remains. "
    elif verdict != "round-off":
        start = f"No known cause was found; the files differ by {left}. "
    if judged == "identical":
        return start.rstrip()
    if band is None and judged == "more than round-off":
        return f"{start}That is far above round-off in 16 or 32 bits (the limit is {NEVER_ROUND_OFF:g} nats per token)."
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


def _order(matched: Matched) -> list[str]:
    rows = [right for _, right in sorted(matched.pairs)]
    moved = sum(row != expected for row, expected in zip(rows, sorted(rows), strict=True))
    return [f"{moved} sequences of B are in another order than in A; they were matched by {matched.how}"] * bool(moved)
