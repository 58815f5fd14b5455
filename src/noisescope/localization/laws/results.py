"""Calls that only a suspect pays for: they tell the class of a fault, not whether there is one.

Does it repeat itself? Noise differs from call to call, stale data are what the call before left. And of something
linear: is the fault odd, does it scale, has it an offset, does it mind the bits of its input?
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.laws import statistics
from noisescope.localization.laws.evidence import EvidenceFacts, LawEvidence
from noisescope.localization.laws.fault_classes import place_and_class
from noisescope.localization.laws.law_result import LawResult, differing, exact, host, looked_at, period, rms, worse
from noisescope.localization.laws.linear import SEED, Linear, allowed, random_half, scale_factor, split
from noisescope.localization.laws.roundoff import combination, mean_square_limit, squares_from_split
from noisescope.localization.laws.table import LAWS, NO_PROMISE, UNSEEN
from noisescope.localization.roundoff_floors import INTEGERS, number_format
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.sites import FUSED, Site

_RUNS = 4
_ODD_ULPS = 1.0  # what a directed rounding leaves of f(x) + f(-x), halved


def steadiness(
    call: Callable[[Tensor], Tensor], x: Tensor, base: Tensor, other: Tensor | None, facts: EvidenceFacts
) -> Tensor:
    """Repeated calls: is it `random`, is it `stale`, how many elements change. Gives what it settles on.

    `other` is another input (rows moved by one) that is called in between: a call after it that differs from those
    that repeat each other remembers what was computed before.
    """
    runs = [call(x) for _ in range(_RUNS)]
    if other is not None:
        call(other)
    after = None if other is None else call(x)
    with host_arithmetic():
        kept = [host(run).double() for run in runs[1:]]  # the first may still hold what an earlier call left
        y, first = kept[-1], host(base).double()
        changed = torch.stack([differing(run, y) for run in kept[:-1]]).any(0)
        facts.random = bool(changed.any())
        if not facts.random:
            remembers = after is not None and bool(differing(host(after).double(), y).any())
            facts.stale = remembers or bool(differing(first, y).any())
        count_changes(changed | differing(first, y), facts)
        return y


def count_changes(changed: Tensor, facts: EvidenceFacts) -> None:
    """How many elements [R, C] changed, of all and of the channels in which any did."""
    hit = changed.any(0)
    if bool(hit.any()):
        facts.changed_share = float(changed.double().mean())
        facts.changed_in_channels = float(changed[:, hit].double().mean())


def look_closer(linear: Linear, base: Tensor, found: LawEvidence) -> None:
    """Does the fault repeat itself, is it odd, does it scale, has it an offset, does it mind the bits of its input?"""
    x, call, facts = linear.x, linear.call, found.facts
    steady = steadiness(call, x, base, linear.turned, facts)
    again, minus, zero = call(x), call(-x), call(torch.zeros_like(x))
    factor = scale_factor(x, base)
    double = call(x * factor)
    halves = split(linear, random_half(x, SEED + 1), bits=False) if linear.additive else None
    with host_arithmetic():
        rows = looked_at(base)
        y = steady[rows]
        both = next(r for r in found.results if r.law in ("R17", "R7"))  # f(-2 x): now each law by itself
        found.results.remove(both)
        for law, out, sign in ((both.law, double, factor), ("R7", minus, -1.0)):
            result = exact(law, host(out)[rows].double() / sign, y, allowed=allowed(y, base.dtype))
            found.results.append(replace(both, law=law) if facts.random else result)
        seen, odd, null = (linear.view(t).double() for t in (again, minus, zero))
        facts.even = _even_part(seen, odd, base.dtype)
        facts.at_zero = _at_zero(null, seen, base.dtype)
        if not linear.channels:  # for the class alone
            facts.statistics = statistics.look(linear.view(again))
            facts.gap_size = facts.statistics.gap / max(rms(seen), 1e-300)
        if halves is not None:
            facts.adds_up_by_halves = _adds_up(linear, base, *halves)
        stuck = [bit for bit, value in facts.statistics.stuck if value == 0]
        if facts.additivity is not None and stuck:
            facts.coarse_sums = _summed_coarsely(*facts.additivity, max(stuck) + 1, base.dtype)


def _adds_up(linear: Linear, base: Tensor, a: Tensor, b: Tensor, where: Tensor) -> bool:
    """Additivity over halves of the inner dimension: kept where only the operands' low bits were lost."""
    keep = looked_at(a)
    outputs = [a[keep].double(), b[keep].double(), host(base)[where[keep]].double()]
    squares = squares_from_split(outputs[0] - outputs[1], host(linear.x).double(), where[keep])[where[keep]]
    floor = combination(outputs, [squares / 2, squares / 2, squares], linear.terms, base.dtype)
    error = outputs[0] + outputs[1] - outputs[2]
    usable = error.isfinite()
    square = float((error.square() / floor.variance)[usable].mean()) if bool(usable.any()) else math.inf
    return square < mean_square_limit(error.numel()) and bool((error.abs() <= floor.limit).all())


def _summed_coarsely(error: Tensor, outputs: list[Tensor], bits: int, dtype: torch.dtype) -> bool:
    """Whether results that end in `bits` zeros were summed that coarsely, and not cut there once at the end.

    A cut is toward zero, or one rounding; sums of many roundings are neither.
    """
    form = number_format(dtype)
    variance, pattern = torch.zeros_like(error), torch.zeros_like(error)
    for values, sign in zip(outputs, (1, 1, -1), strict=True):
        coarse = form.ulp(values) * 2**bits
        variance += coarse.square() / 12
        pattern -= sign * values.sign() * coarse / 2
    along = float((error * pattern / variance).sum() / (pattern.square() / variance).sum())
    return along < 0.5 and float((error.square() / variance).mean()) > 2


def _even_part(y: Tensor, minus: Tensor, dtype: torch.dtype) -> str:
    """e = (f(x) + f(-x)) / 2 is 0 for anything odd: a constant is an offset, half an ulp a directed rounding."""
    even = (y + minus) / 2
    hit = (even != 0).any(0)
    if not bool(hit.any()):
        return ""
    part = even[:, hit]
    ulps = (part.abs() / number_format(dtype).ulp(y[:, hit])).nan_to_num(math.inf)
    middle = part.median()
    if float((ulps > _ODD_ULPS).double().mean()) < 1e-3:
        return "within an ulp"
    if bool((part.sign() == part.sign()[:1]).all()) and bool((y[:, hit].abs() == part.abs()).all()):
        return "sign stuck"
    if float(middle) != 0 and float((part - middle).abs().median()) < 0.2 * abs(float(middle)):
        return "constant"
    return "other"


def _at_zero(zero: Tensor, y: Tensor, dtype: torch.dtype) -> str:
    """What f(0) is, where it is not 0: one bit of the dtype, a constant, or something else."""
    hit = zero != 0
    if not bool(hit.any()):
        return ""
    values = zero[hit]
    same = bool((values == values[0]).all())
    bits = int(values[:1].to(dtype).view(INTEGERS[dtype.itemsize])[0]) % (1 << 8 * dtype.itemsize)
    if same and bits.bit_count() == 1:
        return "one bit"
    if bool((y[:, hit.any(0)] == y[:1, hit.any(0)]).all()):
        return "constant channel"
    return "constant" if same else "varied"


# Everything the laws said, put together: suspects, what was kept, what could not be tried, what would have shown.


OPERATOR, SUBLAYER, MODEL = 0, 1, 2
# Share of alike modules (and two at least) that differ from run to run within round-off: then it is the stack. This
# forgives and can't alarm; its error is a miss. Null: a stack that repeats itself has none (0 of 1,584 modules in
# benchmarks/healthy_limits.py), and one faulty module is never half of two: a miss takes noise below round-off in half
# of all modules of one shape, which no law can tell from atomics.
_UNREPEATABLE = 0.5


@dataclass
class Entry:
    """One site with all its readings."""

    site: Site
    level: int
    order: int
    kind: str  # modules of one kind are alike: operator and shapes
    width: int = 0
    results: dict[str, LawResult] = field(default_factory=dict)
    facts: EvidenceFacts = field(default_factory=EvidenceFacts)

    @property
    def broken(self) -> dict[str, LawResult]:
        return {law: result for law, result in self.results.items() if result.broken}


class RelationResults:
    """Collects readings by site."""

    def __init__(self) -> None:
        self.alarms: dict[tuple[Any, ...], Entry] = {}
        self.skipped: dict[str, int] = {}
        self.notes: list[str] = []
        self.elements = 0

    def add(self, site: Site, found: LawEvidence, *, level: int = OPERATOR, kind: str = "", width: int = 0) -> Entry:
        key = (site.operator, site.place, site.module, site.occurrence)
        entry = self.alarms.setdefault(key, Entry(site, level, len(self.alarms), kind, width))
        was_broken = bool(entry.broken)
        for result in found.results:
            known = entry.results.get(result.law)
            entry.results[result.law] = result if known is None else worse(known, result)
            self.elements += result.elements
        if found.broken and not was_broken:
            entry.facts = found.facts
        for text in found.skipped:
            self.skip(text)
        return entry

    def skip(self, what: str) -> None:
        """A law that could not be tried, and why; the same text is told once, with its number."""
        self.skipped[what] = self.skipped.get(what, 0) + 1

    def entry(self, site: Site) -> Entry | None:
        return self.alarms.get((site.operator, site.place, site.module, site.occurrence))

    # -- conclusions

    def forgive_the_stack(self) -> None:
        """Where half of the modules of one kind do not repeat themselves within round-off, it is the stack.

        Laws that are exact only if it does are then taken as kept there, unless they are off by more than round-off.
        """
        kinds: dict[str, list[Entry]] = {}
        for entry in self.alarms.values():
            if "R1" in entry.results:
                kinds.setdefault(entry.kind, []).append(entry)
        for kind, alike in kinds.items():
            loose = [e for e in alike if e.results["R1"].broken and e.results["R1"].within_round_off]
            if len(loose) < max(2, _UNREPEATABLE * len(alike)):
                continue
            for entry in alike + [entry for entry in self.alarms.values() if entry.level == SUBLAYER]:
                for law, result in entry.results.items():
                    if result.within_round_off:
                        entry.results[law] = replace(result, strength=1.0)
            self.notes.append(
                f"{len(loose)} of {len(alike)} modules alike ({kind}) differ from run to run within round-off: this "
                "stack does not repeat itself, so laws that rest on that were judged within round-off"
            )

    def suspects(self) -> list[Entry]:
        """Broken entries that no inner one explains."""
        broken = [entry for entry in self.alarms.values() if entry.broken]
        operators = [entry for entry in broken if entry.level == OPERATOR]
        places = {entry.site.place for entry in operators}
        layers = [
            entry
            for entry in broken
            if entry.level == SUBLAYER
            and entry.site.place not in places
            and not ("rotary" in places and set(entry.broken) <= {"R14"})
        ]
        found = operators + layers
        return found or [entry for entry in broken if entry.level == MODEL]

    def verdict(self, forwards: float, asked: tuple[Site, ...] = ()) -> Verdict:
        found = self.suspects()
        suspects = ranked(_suspect(entry) for entry in sorted(found, key=lambda e: e.order))
        tried = sum(len(entry.results) for entry in self.alarms.values())
        recorded = {entry.site.module for entry in self.alarms.values() if entry.results}
        untried = [entry.site for entry in self.alarms.values() if entry.level == OPERATOR and not entry.results]
        untried += [site for site in asked if site.module not in recorded]
        unseen = tuple(dict.fromkeys(site for site in untried if site.component != "router"))
        outcome = "faulty" if suspects else ("healthy" if tried and not unseen else "undecided")
        notes = [*self.notes, *(f"{text} ({count} x)" for text, count in sorted(self.skipped.items()))]
        notes.append(
            f"{tried} laws tried at {len(self.alarms)} places on {self.elements:,} numbers; limits of floored laws "
            "are 7 standard deviations for an element and 6.5 for a mean, so that many looks cost under 0.01 alarms"
        )
        return Verdict(outcome, "relations", suspects, self.smallest_visible(), forwards, tried, tuple(notes), unseen)

    def smallest_visible(self) -> dict[str, Any]:
        """By operator and class: the size of the smallest fault that would have shown at every such site.

        Sizes are relative to the output's rms; 0 means a single bit; None means not visible by the laws tried.
        """
        sizes: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in self.alarms.values():
            if entry.level != OPERATOR:
                continue
            for operator, best in _best(entry).items():
                here = sizes.setdefault(operator, {})
                for name, (size, law) in best.items():
                    if name not in here or size > here[name]["size"]:
                        here[name] = {"size": size, "law": law, "module": entry.site.module}
        if "linear" in sizes:
            for name, why in UNSEEN.items():
                sizes["linear"].setdefault(name, {"size": None, "law": None, "why": why})
        return sizes


def _best(entry: Entry) -> dict[str, dict[str, tuple[float, str]]]:
    """The smallest floor of each class at one site, by operator: a fused call is several."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for law, result in entry.results.items():
        operator = entry.site.operator
        if operator == FUSED:
            operator = "softmax" if law in ("R9", "R11", "R13") else "matmul"
        best = found.setdefault(operator, {})
        hidden = NO_PROMISE.get(law, frozenset()) | NO_PROMISE.get(f"{law} {operator}", frozenset())
        for name in LAWS[law].catches:
            if name not in hidden and result.floor < best.get(name, (math.inf, ""))[0]:
                best[name] = (result.floor, law)
    return found


def _suspect(entry: Entry) -> Suspect:
    broken, facts = entry.broken, entry.facts
    site, named = place_and_class(entry.site, broken, facts)
    kept = [law for law, result in entry.results.items() if not result.broken]
    sure = any(math.isinf(result.strength) or result.strength > 4 for result in broken.values())
    said = "; ".join(str(result) for result in sorted(broken.values(), key=lambda r: -r.strength))
    evidence = f"{said}; kept: {', '.join(kept) if kept else 'none'}"
    if named.text:
        evidence = f"{evidence}; {named.text}"
    strongest = max(min(math.log10(max(result.strength, 1.0)), 12.0) for result in broken.values())
    return Suspect(
        site,
        named.fault_class,
        0.99 if sure else 0.8,
        f"{evidence}.",
        score=strongest + 0.1 * len(broken) - 1e-6 * entry.order,
        channels=named.channels,
        period=period(named.channels, entry.width) if entry.width else None,
        details={
            "broken": {law: {"size": r.size, "floor": r.floor, "share": r.share} for law, r in broken.items()},
            "kept": kept,
            "class_confidence": named.confidence,
            "facts": facts.told(),
        },
    )
