"""First stage: do both systems compute the same quantity? Token ids, and how reported log-probabilities are made.

Each engine's report is compared with its own logits, so that a temperature in the report can be distinguished from a
scaled weight. b is corrected step by step: it gets a's token ids, missing values are left out, shifted ones moved, then
other processing, truncation and temperature are undone. What both sides have in common is not a cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisescope.comparison.system_comparison import Cause, corresponding, input_difference
from noisescope.engines.gaps import Gap, gap_of, removed
from noisescope.engines.logprob_processing import (
    CLOSE,
    Processing,
    TokenValues,
    find_misplaced,
    find_processing,
    mend_tokens,
    reported_rows,
)
from noisescope.engines.protocol import Engine, Ids, Reported

_LOOKED_AT = 4  # prompts from which an engine's processing is read


@dataclass(frozen=True)
class Semantics:
    """Causes, the gap before and after correcting them, and the temperature at which the rest is measured."""

    causes: tuple[Cause, ...]
    before: Gap
    after: Gap
    temperature: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    """One engine's reports on all prompts, how they are made from its logits, and how the tokens' values are placed."""

    reports: tuple[Reported, ...]
    logits: tuple[Tensor, ...]
    following: tuple[Tensor, ...]
    processing: Processing
    values: TokenValues

    @classmethod
    def of(cls, engine: Engine, prompts: Sequence[Ids]) -> _Side:
        reports = tuple(_on_host(engine.reported(ids)) for ids in prompts)
        logits = tuple(engine.logits(ids)[:-1].float().cpu() for ids in prompts)
        following = tuple(torch.tensor(ids[1:]) for ids in prompts)
        some = slice(0, _LOOKED_AT)
        rows = torch.cat([report.rows for report in reports[some]])
        processing = find_processing(rows, torch.cat(logits[some]))
        found = cls(reports, logits, following, processing, TokenValues())
        placed = [
            find_misplaced(report.tokens, _tokens(found.given(number), following[number]))
            for number, report in enumerate(reports)
        ]
        shifts = sorted(one.shift for one in placed)
        missing = sum(one.missing for one in placed)
        values = TokenValues(shifts[len(shifts) // 2], missing, any(one.zeros for one in placed))
        return replace(found, values=values)

    def rows(self, number: int) -> Tensor:
        """Log-probabilities of one prompt as reported; NaN where the rows are none."""
        rows = self.given(number)
        none = self.processing.unnormalised or self.processing.base is not None
        return torch.full_like(rows, torch.nan) if none else rows

    def given(self, number: int) -> Tensor:
        """As reported; where only some tokens were given, all of them by the engine's own processing."""
        rows = self.reports[number].rows.double()
        whole = bool(rows.isnan().any()) and self.processing.off <= CLOSE
        return reported_rows(self.logits[number], self.processing.sampling) if whole else rows


def find_semantics(a: Engine, b: Engine, prompts: tuple[Sequence[Ids], Sequence[Ids]], *, chat: bool) -> Semantics:
    """What differs before any weight or operator; `prompts` are the encodings of the same texts by a and by b."""
    mine, its = prompts
    left = _Side.of(a, mine)
    causes: list[Cause] = []
    before = gap = None
    difference = input_difference(mine, its, chat=chat)
    if difference is not None:
        before = gap_of(_corresponding(left, _Side.of(b, its), mine, its))
    right = _Side.of(b, mine)
    gap = _gap(left, right, _as_reported, _as_reported)
    if difference is not None and before is not None:
        causes.append(Cause("semantics", difference.name, difference.words, *removed(before, gap)))
    first = before or gap
    for name, words, view in _steps(left, right):
        after = _gap(left, right, *view)
        causes.append(Cause("semantics", name, words, *removed(gap, after)))
        gap = after
    temperature = left.processing.temperature
    after = _gap(left, right, *_plain(left, right, temperature))
    notes = []
    if left.processing.truncates and right.processing.truncates:
        notes.append(
            "both sides truncate the distribution (top-k or top-p): the comparison uses the full distributions"
        )
    if left.processing.temperature != 1:
        notes.append(f"both are compared at a's temperature of {temperature:.3g}")
    return Semantics(tuple(causes), first, after, temperature, tuple(notes))


View = Callable[[_Side, int], tuple[Tensor, Tensor]]  # rows and token values of one prompt


def _gap(left: _Side, right: _Side, mine: View, its: View) -> Gap:
    def prompts() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for number in range(len(left.reports)):
            (rows_a, values_a), (rows_b, values_b) = mine(left, number), its(right, number)
            yield rows_a, rows_b, values_a, values_b

    return gap_of(prompts())


def _corresponding(
    left: _Side, right: _Side, mine: Sequence[Ids], its: Sequence[Ids]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Rows of the tokens that both sides have."""
    for number, (a, b) in enumerate(zip(mine, its, strict=True)):
        pairs = corresponding(a, b)
        if pairs:
            at = [torch.tensor([pair[side] - 1 for pair in pairs]) for side in (0, 1)]
            views = (_as_reported(left, number), _as_reported(right, number))
            (rows_a, values_a), (rows_b, values_b) = views
            yield rows_a[at[0]], rows_b[at[1]], values_a[at[0]], values_b[at[1]]


def _as_reported(side: _Side, number: int) -> tuple[Tensor, Tensor]:
    rows = side.rows(number)
    values = side.reports[number].tokens.double()
    return rows, torch.where(values.isinf(), torch.nan, values)


def _steps(left: _Side, right: _Side) -> Iterator[tuple[str, str, tuple[View, View]]]:
    """(name, description, both sides after correcting it), in the order of correction."""
    mine, its = left.processing, right.processing
    there, here = right.values, left.values
    if there.missing or here.missing:
        kind = "given as 0" if there.zeros or here.zeros else "not given"
        which = "b" if there.missing else "a"
        words = f"{max(there.missing, here.missing)} token log-probabilities of {which} are {kind}"
        views = tuple(_moved(replace(side.values, shift=0)) for side in (left, right))
        yield "missing values", words, (views[0], views[1])
    if there.shift != here.shift:
        words = f"b's token log-probabilities belong {_places(there.shift)} (a's {_places(here.shift)})"
        yield "alignment", words, (_moved(here), _moved(there))
    if mine.base != its.base:
        words = " and ".join(f"{side} to base {one.base or 'e'}" for side, one in (("a", mine), ("b", its)))
        yield "logarithm base", f"log-probabilities are logarithms of different bases: {words}", (_by(mine), _by(its))
    if mine.unnormalised != its.unnormalised or max(mine.off, its.off) > CLOSE:
        yield "other processing", _other(mine, its), (_by(mine), _by(its))
    if (mine.top_k, mine.top_p) != (its.top_k, its.top_p):
        words = f"a reports {_kept(mine)}, b {_kept(its)}"
        yield "truncation", words, (_by(_whole(mine)), _by(_whole(its)))
    if abs(mine.temperature / its.temperature - 1) > CLOSE:
        yield "temperature", _temperatures(mine.temperature, its.temperature), _plain(left, right, mine.temperature)


def _plain(left: _Side, right: _Side, temperature: float) -> tuple[View, View]:
    view = _by(Processing(temperature))
    return view, view


def _by(processing: Processing) -> View:
    """Rows made from the side's own logits by these settings."""

    def view(side: _Side, number: int) -> tuple[Tensor, Tensor]:
        rows = reported_rows(side.logits[number], processing.sampling)
        values = _tokens(rows, side.following[number])
        return rows, torch.where(values.isinf(), torch.nan, values)

    return view


def _moved(values: TokenValues) -> View:
    def view(side: _Side, number: int) -> tuple[Tensor, Tensor]:
        rows, _ = _as_reported(side, number)
        return rows, mend_tokens(side.reports[number].tokens, values)

    return view


def _whole(processing: Processing) -> Processing:
    return Processing(processing.temperature)


def _tokens(rows: Tensor, following: Tensor) -> Tensor:
    return rows.gather(1, following[:, None])[:, 0]


def _on_host(report: Reported) -> Reported:
    return Reported(report.tokens.double().cpu(), report.rows.cpu())


# -- words


def _places(shift: int) -> str:
    if not shift:
        return "to their own tokens"
    return f"to tokens {abs(shift)} {'earlier' if shift > 0 else 'later'}"


def _other(mine: Processing, its: Processing) -> str:
    if mine.unnormalised != its.unnormalised:
        return (
            f"{'b' if its.unnormalised else 'a'} reports logits, not log-probabilities: its probabilities do not "
            f"sum to 1"
        )
    return (
        f"reported values are {max(mine.off, its.off):.2g} nats away from what "
        f"{'a' if mine.off > its.off else 'b'}'s own logits give at any temperature: a penalty, bias or other "
        f"processor is applied before they are reported"
    )


def _kept(processing: Processing) -> str:
    parts = [f"the {processing.top_k} likeliest tokens"] if processing.top_k else []
    parts += [f"a share of {processing.top_p:g} (top-p)"] if processing.top_p < 1 else []
    return f"{' and '.join(parts)}, renormalised" if parts else "the whole distribution"


def _temperatures(mine: float, its: float) -> str:
    words = f"a reports at temperature {mine:.4g}, b at {its:.4g}"
    if mine != 1 and abs(mine * mine / its - 1) < CLOSE:
        return f"{words}: b applies it twice"
    if mine == 1:
        return f"{words}: b's values are after the sampling temperature, a's are the model's own"
    return words
