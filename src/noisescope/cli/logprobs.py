"""What `noisescope compare A.jsonl B.jsonl` prints."""

from __future__ import annotations

from noisescope import api
from noisescope.cli import output
from noisescope.cli.terminal import say


def print_logprobs(found: api.comparison.LogprobComparison) -> None:
    """Both sides, the verdict, each cause with its nats, what remains, where to look, what can't be told."""
    for name, side in (("a", found.a), ("b", found.b)):
        say(f"{name}: {side.path} ({side.field}, {side.sequences} sequences, {side.tokens} tokens)")
    say(f"matched by {found.matched_by}: {found.sequences} sequences, {found.tokens} tokens compared\n")
    say(f"{found.verdict}. {found.words}\n")
    words = api.reports.words.estimate
    rows = [("", "mean |difference|, nats per token [95 % interval]", "tokens")]
    rows.append(("all", words(found.gap).text, ""))
    rows += [(cause.name, words(cause.nats).text, str(cause.tokens)) for cause in found.causes]
    rows.append(("remains", words(found.remainder).text, str(found.tokens)))
    say(output.aligned(rows))
    for cause in found.causes:
        say(f"\n{cause.name}: {cause.statement}\n  next: {cause.next_step}")
    if found.worst:
        apart = ", ".join(f"{row.sequence} ({row.nats:.3g})" for row in found.worst)
        say(f"\nsequences that stand apart, in nats per token: {apart}")
    if found.signed.value is not None:
        say(f"\nmean of B - A after mending: {words(found.signed).text}")
    if found.max_gap is not None:
        say(f"allowed: {found.max_gap:g} nats per token: {found.outcome}")
    output.print_each((*found.notes, *found.limits), "note: ")
