"""All law results by site: suspects, laws satisfied, laws not tested, and detection limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from noisescope.localization.laws.call_results import EvidenceFacts, LawEvidence, LawResult, worse
from noisescope.localization.laws.fault_classes import place_and_class
from noisescope.localization.laws.table import NO_PROMISE, UNSEEN, Law
from noisescope.localization.tensors import lane_period
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.sites import FUSED, Site

OPERATOR, SUBLAYER, MODEL = 0, 1, 2
# Share of alike modules (and two at least) that differ from run to run within round-off: then it is the stack. This
# forgives and can't alarm; its error is a miss. Null: a stack that repeats itself has none (0 of 1,584 modules in
# benchmarks/healthy_limits.py), and one faulty module is never half of two: a miss takes noise below round-off in half
# of all modules of one shape, which no law can tell from atomics.
_UNREPEATABLE = 0.5


@dataclass
class SiteResults:
    """One site with the results of all its laws."""

    site: Site
    level: int
    order: int
    kind: str  # modules of one kind are alike: operator and shapes
    width: int = 0
    results: dict[Law, LawResult] = field(default_factory=dict)
    facts: EvidenceFacts = field(default_factory=EvidenceFacts)

    @property
    def broken(self) -> dict[Law, LawResult]:
        return {law: result for law, result in self.results.items() if result.broken}


class RelationResults:
    """Collects results by site."""

    def __init__(self) -> None:
        self.sites: dict[tuple[Any, ...], SiteResults] = {}
        self.skipped: dict[str, int] = {}
        self.notes: list[str] = []
        self.elements = 0
        self.forgiven = False  # modules that differ from run to run within round-off
        self.unexplained = False  # other answers each time, from modules that repeat themselves

    def add(self, site: Site, found: LawEvidence, *, level: int = OPERATOR, kind: str = "", width: int = 0) -> None:
        key = (site.operator, site.place, site.module, site.occurrence)
        entry = self.sites.setdefault(key, SiteResults(site, level, len(self.sites), kind, width))
        was_broken = bool(entry.broken)
        for result in found.results:
            known = entry.results.get(result.law)
            entry.results[result.law] = result if known is None else worse(known, result)
            self.elements += result.elements
        if found.broken and not was_broken:
            entry.facts = found.facts
        for text in found.skipped:
            self.skip(text)

    def skip(self, what: str) -> None:
        """Note a law that could not be tested, and why; identical texts are reported once, with a count."""
        self.skipped[what] = self.skipped.get(what, 0) + 1

    def entry(self, site: Site) -> SiteResults | None:
        return self.sites.get((site.operator, site.place, site.module, site.occurrence))

    # -- conclusions

    def forgive_the_stack(self) -> None:
        """If half of the modules of one kind are not repeatable within round-off, the software stack is the cause.

        Laws that are exact only on a repeatable stack then count as satisfied there, unless they fail by more than
        round-off.
        """
        kinds: dict[str, list[SiteResults]] = {}
        for entry in self.sites.values():
            if Law.REPEAT in entry.results:
                kinds.setdefault(entry.kind, []).append(entry)
        for kind, alike in kinds.items():
            loose = [e for e in alike if e.results[Law.REPEAT].broken and e.results[Law.REPEAT].within_round_off]
            if len(loose) < max(2, _UNREPEATABLE * len(alike)):
                continue
            for entry in alike + [entry for entry in self.sites.values() if entry.level == SUBLAYER]:
                for law, result in entry.results.items():
                    if result.within_round_off:
                        entry.results[law] = replace(result, strength=1.0)
            self.forgiven = True
            self.notes.append(
                f"{len(loose)} of {len(alike)} similar modules ({kind}) differ from run to run within round-off: "
                f"results on this system are not bit-for-bit repeatable, so laws that need that were checked within "
                f"round-off"
            )

    def suspects(self) -> list[SiteResults]:
        """Broken entries that no inner one explains."""
        broken = [entry for entry in self.sites.values() if entry.broken]
        operators = [entry for entry in broken if entry.level == OPERATOR]
        places = {entry.site.place for entry in operators}
        layers = [
            entry
            for entry in broken
            if entry.level == SUBLAYER
            and entry.site.place not in places
            and not ("rotary" in places and set(entry.broken) <= {Law.POSITION_SHIFT})
        ]
        return operators + layers or [entry for entry in broken if entry.level == MODEL]

    def verdict(self, forwards: float, asked: tuple[Site, ...] = ()) -> Verdict:
        suspects = ranked(_suspect(entry) for entry in sorted(self.suspects(), key=lambda e: e.order))
        tried = sum(len(entry.results) for entry in self.sites.values())
        # That something repeats itself says little: an operator of which no other law is known was not judged.
        judged = {entry.site.module for entry in self.sites.values() if entry.results.keys() - {Law.REPEAT}}
        operators = [entry for entry in self.sites.values() if entry.level == OPERATOR]
        untried = [entry.site for entry in operators if not entry.results.keys() - {Law.REPEAT}]
        untried += [site for site in asked if site.module not in judged]
        unseen = tuple(dict.fromkeys(site for site in untried if site.component != "router"))
        complete = tried and not unseen and not self.unexplained
        outcome = "faulty" if suspects else ("healthy" if complete else "undecided")
        if self.unexplained:
            self.notes.append(
                "the model's output differs from run to run, but no single module's does: run again, "
                "or use --method audit"
            )
        notes = [*self.notes, *(f"{text} ({count} x)" for text, count in sorted(self.skipped.items()))]
        notes.append(
            f"{tried} laws tried at {len(self.sites)} places on {self.elements:,} values; laws with a round-off "
            f"tolerance use limits of 7 standard deviations per element and 6.5 per mean, so all of these tests "
            f"together raise fewer than 0.01 false alarms"
        )
        return Verdict(outcome, "relations", suspects, self.smallest_visible(), forwards, tried, tuple(notes), unseen)

    def smallest_visible(self) -> dict[str, Any]:
        """By operator and class: the smallest fault that would have been detected at every such site.

        Sizes are relative to the output's rms; 0 means a single bit; None means undetectable by the laws tested.
        """
        sizes: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in self.sites.values():
            if entry.level != OPERATOR:
                continue
            for operator, best in _best(entry).items():
                here = sizes.setdefault(operator, {})
                for name, (size, law) in best.items():
                    if name not in here or size > here[name]["size"]:
                        here[name] = {"size": size, "law": str(law), "module": entry.site.module}
        if "linear" in sizes:
            for name, why in UNSEEN.items():
                sizes["linear"].setdefault(name, {"size": None, "law": None, "why": why})
        return sizes


def _best(entry: SiteResults) -> dict[str, dict[str, tuple[float, Law]]]:
    """The smallest tolerance of each class at one site, by operator: a fused call covers several."""
    found: dict[str, dict[str, tuple[float, Law]]] = {}
    for law, result in entry.results.items():
        operator = entry.site.operator
        if operator == FUSED:
            operator = "softmax" if law in (Law.SINGLE_KEY, Law.PROBABILITIES_SUM_TO_ONE, Law.LOG_ODDS) else "matmul"
        best = found.setdefault(operator, {})
        for name in law.catches:
            before = best[name][0] if name in best else math.inf
            if name not in NO_PROMISE.get(law, ()) and result.floor < before:
                best[name] = (result.floor, law)
    return found


def _suspect(entry: SiteResults) -> Suspect:
    broken, facts = entry.broken, entry.facts
    site, pattern = place_and_class(entry.site, broken, facts)
    kept = [str(law) for law, result in entry.results.items() if not result.broken]
    sure = any(math.isinf(result.strength) or result.strength > 4 for result in broken.values())
    evidence = "; ".join(str(result) for result in sorted(broken.values(), key=lambda r: -r.strength))
    evidence += f"; laws that hold: {', '.join(kept) or 'none'}" + (f"; {pattern.text}" if pattern.text else "")
    strongest = max(min(math.log10(max(result.strength, 1.0)), 12.0) for result in broken.values())
    return Suspect(
        site,
        pattern.fault_class,
        0.99 if sure else 0.8,
        f"{evidence}.",
        score=strongest + 0.1 * len(broken) - 1e-6 * entry.order,
        channels=pattern.channels,
        period=lane_period(pattern.channels, entry.width, least=1.0) if entry.width else None,
        details={
            "broken": {str(law): {"size": r.size, "floor": r.floor, "share": r.share} for law, r in broken.items()},
            "kept": kept,
            "facts": facts.to_dict(),
        },
        class_confidence=pattern.confidence,
    )
