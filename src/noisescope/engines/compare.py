"""Compares two systems: finds causes and corrects them one after another, each with what correcting it removes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from noisescope import progress
from noisescope.comparison.roundoff import FEWEST_TOKENS, RoundoffBand
from noisescope.comparison.system_comparison import (
    ORDER,
    SCHEMA_VERSION,
    Cause,
    LayerCost,
    RoundOffSource,
    SystemComparison,
    Verdict,
)
from noisescope.engines.gaps import Gap, divergence, gap_of, removed
from noisescope.engines.operator_replay import (
    Role,
    SiteError,
    coarser,
    explain,
    explain_size,
    mended_logits,
    own_errors,
    replay,
    roles,
    rounded_logits,
)
from noisescope.engines.protocol import Engine, Ids
from noisescope.engines.semantics import find_semantics
from noisescope.engines.state import (
    WHOLE_CHECKPOINT,
    Mended,
    StateCause,
    by_layer,
    find_state,
    lacking_layers,
    relative_l2,
)
from noisescope.engines.vocabulary import share_vocabulary
from noisescope.estimate import Estimate

_SOURCES = 6  # roles whose share of the round-off is measured
_SOURCE_PROMPTS = 4


@dataclass
class _Run:
    """The state of a comparison: causes, the remaining gap, and corrected modules of b."""

    a: Engine
    b: Engine
    prompts: Sequence[Ids]
    temperature: float
    gap: Gap
    causes: list[Cause] = field(default_factory=list)
    weight_costs: tuple[LayerCost, ...] = ()
    modules: set[str] = field(default_factory=set)
    reordered: bool = False  # weights, without effect

    def measure(
        self, modules: set[str] | None = None, prompts: Sequence[Ids] | None = None, *, stored: bool = False
    ) -> Gap:
        """The gap with these modules mended, by default with those that are.

        `stored`: to a with what those modules give rounded to b's dtype, as b must keep it.
        """
        chosen = self.modules if modules is None else modules

        def rows() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
            for ids in progress.track("prompts compared", self.prompts if prompts is None else prompts):
                pair = mended_logits(self.a, self.b, ids, chosen)
                if stored:
                    pair = rounded_logits(self.a, ids, chosen, pair[1].dtype), pair[1]
                sides = [self.rows(logits) for logits in pair]
                following = torch.tensor(ids[1:])[:, None]
                mine, its = (side.gather(1, following)[:, 0] for side in sides)
                yield sides[0], sides[1], mine, its

        return gap_of(rows())

    def rows(self, logits: Tensor) -> Tensor:
        return (logits[:-1].cpu().double() / self.temperature).log_softmax(-1)


def compare_systems(
    a: Engine,
    b: Engine,
    prompts: tuple[Sequence[Ids], Sequence[Ids]],
    *,
    chat: bool = False,
    band: RoundoffBand | None = None,
) -> SystemComparison:
    """Find what b's divergence from a consists of; `prompts` are token ids of the same texts, by a and by b.

    `band` is the mean |difference| of log-probabilities that two healthy systems show on a's prompts. Without it the
    verdict "round-off" rests on each operator alone.
    """
    a, b, more_tokens, left_out = share_vocabulary(a, b, prompts[0])
    meant = find_semantics(a, b, prompts, chat=chat)
    run = _Run(a, b, prompts[0], meant.temperature, meant.after, [*more_tokens, *meant.causes])
    mended = Mended()
    try:
        hints, found = _mend_state(run, mended, band)
        notes = (*left_out, *meant.notes, *found)
        left, allowed = _mend_operators(run, hints)
        notes += allowed
        sources = _sources(run, left)
        before = run.gap
        judged = before.total_token if run.temperature == 1 else replace(run, temperature=1.0).measure().total_token
        run.modules |= {module for role in left for module in role.mend}
        everything = run.measure(stored=a.facts.dtype != b.facts.dtype)
    finally:
        mended.restore()
    round_off, round_off_gap = removed(before, everything)
    verdict = _verdict(run, meant.before, judged, band)
    return SystemComparison(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        words=_words(run, verdict, judged, band),
        a=a.facts,
        b=b.facts,
        prompts=len(prompts[0]),
        tokens=sum(len(ids) - 1 for ids in prompts[0]),
        total=meant.before.total,
        token_gap=meant.before.total_token,
        causes=tuple(run.causes),
        weight_costs=run.weight_costs,
        round_off=round_off,
        round_off_gap=round_off_gap,
        sources=sources,
        unexplained_gap=judged,
        band=band,
        remainder=everything.total,
        order=ORDER,
        notes=notes,
    )


def _mend_state(run: _Run, mended: Mended, band: RoundoffBand | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Config values that differ without effect on a loaded model, which may explain an operator; and notes."""
    progress.begin("weights and settings")
    causes, found = find_state(run.a, run.b)
    notes, hints = list(found), []
    together: StateCause | None = None  # settings that only work with those that follow
    for one in causes:
        cause = one if together is None or not one.settings else together.with_settings(one)
        if cause.name in WHOLE_CHECKPOINT:
            run.weight_costs = _weight_costs(run, cause)
        after = _mend(run, mended, cause)
        if after is None:
            together = cause
            continue
        together = None
        where = (*cause.tensors, *cause.settings)
        if (cause.settings or cause.name == "cast") and _unchanged(run.gap, after):
            built_in = bool(cause.settings) and all(name.startswith("config.") for name in cause.settings)
            notes.append(f"{cause.words}: no effect {'once a model is loaded' if built_in else 'here'}")
            hints += [cause.words] if built_in else []
            continue
        if cause.may_cancel and band is not None and _within(run.gap, band):
            notes.append(f"{cause.words}: no effect here beyond round-off")
            run.reordered = True
        else:
            run.causes.append(Cause("state", cause.name, cause.words, *removed(run.gap, after), where, cause.layers))
        run.gap = after
    if together is not None:
        notes.append(f"{together.words}: b can't run with a's values, so their share is that of later causes")
    for words in lacking_layers(run.a, run.b):
        nothing = removed(run.gap, run.gap)
        run.causes.append(Cause("state", "missing layers", f"{words}; their share is part of the remainder", *nothing))
    return tuple(hints), tuple(notes)


def _mend(run: _Run, mended: Mended, cause: StateCause) -> Gap | None:
    """What is left; None, with everything as before, for settings with which b can't run."""
    mended.mend(run.a, run.b, cause)
    try:
        return run.measure()
    except (RuntimeError, ValueError, IndexError):
        if not cause.settings:
            raise
        mended.undo_settings(len(cause.settings))
        return None


def _within(gap: Gap, band: RoundoffBand) -> bool:
    return gap.total_token.value is not None and gap.total_token.value <= band.high


def _weight_costs(run: _Run, cause: StateCause) -> tuple[LayerCost, ...]:
    """What b's tensors cost layer by layer: each layer's alone are put into a, and taken out again."""
    its = {name: tensor for name, tensor in run.b.tensors() if name in cause.tensors}
    mine = {name: tensor.clone() for name, tensor in run.a.tensors() if name in its}
    layers = by_layer(cause.tensors)
    nats: dict[int | None, list[float]] = {layer: [] for layer in layers}
    for ids in progress.track("layers replaced", run.prompts):
        clean = run.rows(run.a.logits(ids))
        for layer, names in layers.items():
            try:
                for name in names:
                    run.a.write(name, its[name])
                nats[layer].append(divergence(clean, run.rows(run.a.logits(ids))))
            finally:
                for name in names:
                    run.a.write(name, mine[name])
    moved = {layer: relative_l2([(mine[name], its[name]) for name in names]) for layer, names in layers.items()}
    return tuple(
        LayerCost(layer, len(names), moved[layer], Gap(tuple(nats[layer]), ()).total) for layer, names in layers.items()
    )


def _mend_operators(run: _Run, hints: Sequence[str] = ()) -> tuple[list[Role], tuple[str, ...]]:
    """Roles beyond round-off become causes; those within it are returned, with notes on those that lose more digits
    than usual on a's side as well."""
    errors, _ = replay(run.a, run.b, run.prompts)
    round_off = coarser(run.a.facts.dtype, run.b.facts.dtype)
    large = [error for error in errors if error.beyond(round_off)]
    own = own_errors(run.a, run.prompts) if large else {}
    wrong = [error for error in large if error.beyond(round_off, own.get((error.site.module, error.between)))]
    spared = [error for error in large if error not in wrong]
    notes = tuple(
        f"{explain_size(role)}: allowed for, since a is {_own_size(role, own):.2g} from its own result in float64 there"
        for role in roles(spared, run.a.sites)
    )
    weights = dict(run.a.tensors()) if wrong else {}
    for role in roles(wrong, run.a.sites):
        run.modules |= set(role.mend)
        after = run.measure()
        first = role.errors[0]
        operator = first.site.operator if not first.between else "between"
        name = f"{operator} {role.name}"
        words = explain(role, weights) + (f"; the configs differ: {'; '.join(hints)}" if hints else "")
        hints = ()
        if _unchanged(run.gap, after):
            words += "; a can't run it on b's inputs, so its share is part of the remainder"
        run.causes.append(Cause("operators", name, words, *removed(run.gap, after), role.mend, role.layers))
        run.gap = after
    rest = [error for error in errors if error.error and error not in wrong]
    return [role for role in roles(rest, run.a.sites) if not set(role.mend) <= run.modules], notes


def _own_size(role: Role, own: Mapping[tuple[str, bool], SiteError]) -> float:
    return max(own[error.site.module, error.between].relative_l2 for error in role.errors)


def _unchanged(before: Gap, after: Gap) -> bool:
    pairs = zip((*before.nats, *before.token), (*after.nats, *after.token), strict=True)
    return all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-15) or (math.isnan(x) and math.isnan(y)) for x, y in pairs)


def _sources(run: _Run, left: Sequence[Role]) -> tuple[RoundOffSource, ...]:
    """The contribution of the largest roles within round-off, each corrected alone, on a few prompts."""
    prompts = run.prompts[:_SOURCE_PROMPTS]
    if not left:
        return ()
    before = run.measure(prompts=prompts)
    found = []
    for role in sorted(left, key=lambda role: -role.relative_l2)[:_SOURCES]:
        after = run.measure(run.modules | set(role.mend), prompts)
        nats = removed(before, after)[0]
        found.append(RoundOffSource(role.name, len(role.errors), role.relative_l2, role.changed, nats))
    return tuple(sorted(found, key=lambda source: -(source.nats.value or 0.0)))


def _verdict(run: _Run, total: Gap, left: Estimate, band: RoundoffBand | None) -> Verdict:
    if run.causes:
        return "different"
    if not any(total.nats) and not any(total.token):
        return "identical"
    if run.a.facts.dtype != run.b.facts.dtype:
        return "different"
    if left.value is None or run.gap.total.value is None:
        return "undecided"
    found = "round-off" if band is None else band.judge(left)
    if found == "more than round-off":
        return "different"
    return "undecided" if found == "undecided" else "round-off"


def _words(run: _Run, verdict: Verdict, left: Estimate, band: RoundoffBand | None) -> str:
    causes = sorted(run.causes, key=lambda cause: -_size(cause))
    dtypes = (run.a.facts.dtype, run.b.facts.dtype)
    if verdict == "identical":
        return "Both systems give identical distributions."
    if verdict == "undecided":
        if band is not None and left.value is not None and run.gap.total.value is not None:
            return (
                f"Every operator is within round-off, but {band.tokens} tokens are too few to check their "
                f"log-probabilities: give {FEWEST_TOKENS} or more."
            )
        return "The divergence between the distributions is not finite, and no cause was found."
    if causes:
        named = "; ".join(f"{cause.stage}: {cause.words}" for cause in causes[:2])
        more = f" {len(causes) - 2} more causes are listed." if len(causes) > 2 else ""
        return f"The largest of {len(causes)} causes: {named}.{more}" if len(causes) > 1 else f"One cause: {named}."
    if dtypes[0] != dtypes[1]:
        return (
            f"a computes in {dtypes[0]} and b in {dtypes[1]}: every operator is within the round-off of the coarser "
            f"dtype. The difference is the cost of that dtype, not a fault."
        )
    judged = "" if band is None else _judged(left, band)
    if verdict == "different":
        return f"Every operator is within round-off, but {judged}."
    same = "Weights differ in their order only" if run.reordered else "Weights and settings are identical"
    return f"{same}, every operator is within {dtypes[0]} round-off on the same inputs" + (
        f", and {judged}." if judged else "; no round-off band was measured, because a is not transformers."
    )


def _judged(gap: Estimate, band: RoundoffBand) -> str:
    side = "within" if (gap.value or 0.0) <= band.high else "above"
    return (
        f"the tokens' log-probabilities differ by {gap.value or 0:.2g} nats on average: {side} the {band.high:.2g} "
        f"that {100 * (1 - band.false_alarm):g} % of healthy pairs stay below ({band.expected.value or 0:.2g} is "
        f"expected{_METHODS[band.method]})"
    )


_METHODS = {"rounding": "", "float64": ", from a's own distance to its result in float64"}


def _size(cause: Cause) -> float:
    return cause.nats.value if cause.nats.value is not None else (cause.token_gap.value or 0.0)
