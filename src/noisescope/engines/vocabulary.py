"""Engines whose heads have more rows than tokens, as padding gives: both are compared on the tokens they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from noisescope.comparison.system_comparison import Cause
from noisescope.engines.gaps import Gap
from noisescope.engines.protocol import Engine, Ids, OnCall, Reported

_SMALL = 1e-6  # of the probability: padding that no one notices
_NORMALISED = 1e-3  # |log of the sum of probabilities| of rows that are log-probabilities


class FirstTokens:
    """An engine that gives the first tokens of its vocabulary alone, renormalised."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._count = engine, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits(self, ids: Ids, on_call: OnCall | None = None, *, modules: Collection[str] | None = None) -> Tensor:
        return self._engine.logits(ids, on_call, modules=modules)[:, : self._count]

    def reported(self, ids: Ids) -> Reported:
        found = self._engine.reported(ids)
        rows = found.rows[:, : self._count]
        if bool((found.rows.double().logsumexp(-1).abs() < _NORMALISED).all()):
            share = rows.logsumexp(-1)
            return Reported(found.tokens - share.to(found.tokens), rows - share[:, None])
        return Reported(found.tokens, rows)


if TYPE_CHECKING:
    _: type[Engine] = FirstTokens


def share_vocabulary(
    a: Engine, b: Engine, prompts: Sequence[Ids]
) -> tuple[Engine, Engine, tuple[Cause, ...], tuple[str, ...]]:
    """Both engines on the tokens that both have; a cause where the others get probability, else a note."""
    widths = [engine.logits(prompts[0]).shape[-1] for engine in (a, b)]
    if widths[0] == widths[1]:
        return a, b, (), ()
    count, more = min(widths), abs(widths[0] - widths[1])
    name, wide = ("b", b) if widths[1] > widths[0] else ("a", a)
    shares = [float(wide.logits(ids).double().softmax(-1)[:-1, count:].sum(-1).mean()) for ids in prompts]
    share = sum(shares) / len(shares)
    words = f"a has {widths[0]} logits and b {widths[1]}"
    cut = (a, FirstTokens(b, count)) if wide is b else (FirstTokens(a, count), b)
    if share < _SMALL:
        note = f"{words}: {name}'s {more} more get less than {_SMALL:g} of the probability and were left out"
        return *cut, (), (note,)
    words = f"{words}: {name} gives {share:.2g} of the probability to {more} tokens that the other side does not have"
    gap = Gap(tuple(math.inf for _ in shares), tuple(-math.log1p(-one) if one < 1 else math.inf for one in shares))
    return *cut, (Cause("semantics", "vocabulary", words, gap.total, gap.total_token),), ()
