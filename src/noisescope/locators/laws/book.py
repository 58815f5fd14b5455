"""Everything the laws said, put together: suspects, what was kept, what could not be tried, what would have shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from noisescope.locators.laws.calls import FUSED
from noisescope.locators.laws.classes import place_and_class
from noisescope.locators.laws.examined import Examined, Facts
from noisescope.locators.laws.readings import Reading, period, worse
from noisescope.locators.laws.table import LAWS, NO_PROMISE, UNSEEN
from noisescope.locators.verdict import Suspect, Verdict, ranked
from noisescope.sites import Site

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
    readings: dict[str, Reading] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    @property
    def broken(self) -> dict[str, Reading]:
        return {law: reading for law, reading in self.readings.items() if reading.broken}


class Book:
    """Collects readings by site."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, ...], Entry] = {}
        self.skipped: dict[str, int] = {}
        self.notes: list[str] = []
        self.elements = 0

    def add(self, site: Site, found: Examined, *, level: int = OPERATOR, kind: str = "", width: int = 0) -> Entry:
        key = (site.operator, site.place, site.module, site.occurrence)
        entry = self.entries.setdefault(key, Entry(site, level, len(self.entries), kind, width))
        was_broken = bool(entry.broken)
        for reading in found.readings:
            known = entry.readings.get(reading.law)
            entry.readings[reading.law] = reading if known is None else worse(known, reading)
            self.elements += reading.elements
        if found.broken and not was_broken:
            entry.facts = found.facts
        for text in found.skipped:
            self.skip(text)
        return entry

    def skip(self, what: str) -> None:
        """A law that could not be tried, and why; the same text is told once, with its number."""
        self.skipped[what] = self.skipped.get(what, 0) + 1

    def entry(self, site: Site) -> Entry | None:
        return self.entries.get((site.operator, site.place, site.module, site.occurrence))

    # -- conclusions

    def forgive_the_stack(self) -> None:
        """Where half of the modules of one kind do not repeat themselves within round-off, it is the stack.

        Laws that are exact only if it does are then taken as kept there, unless they are off by more than round-off.
        """
        kinds: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if "R1" in entry.readings:
                kinds.setdefault(entry.kind, []).append(entry)
        for kind, alike in kinds.items():
            loose = [e for e in alike if e.readings["R1"].broken and e.readings["R1"].within_round_off]
            if len(loose) < max(2, _UNREPEATABLE * len(alike)):
                continue
            for entry in alike + [entry for entry in self.entries.values() if entry.level == SUBLAYER]:
                for law, reading in entry.readings.items():
                    if reading.within_round_off:
                        entry.readings[law] = replace(reading, strength=1.0)
            self.notes.append(
                f"{len(loose)} of {len(alike)} modules alike ({kind}) differ from run to run within round-off: this "
                "stack does not repeat itself, so laws that rest on that were judged within round-off"
            )

    def suspects(self) -> list[Entry]:
        """Broken entries that no inner one explains."""
        broken = [entry for entry in self.entries.values() if entry.broken]
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
        tried = sum(len(entry.readings) for entry in self.entries.values())
        heard = {entry.site.module for entry in self.entries.values() if entry.readings}
        untried = [entry.site for entry in self.entries.values() if entry.level == OPERATOR and not entry.readings]
        untried += [site for site in asked if site.module not in heard]
        unseen = tuple(dict.fromkeys(site for site in untried if site.component != "router"))
        outcome = "faulty" if suspects else ("healthy" if tried and not unseen else "undecided")
        notes = [*self.notes, *(f"{text} ({count} x)" for text, count in sorted(self.skipped.items()))]
        notes.append(
            f"{tried} laws tried at {len(self.entries)} places on {self.elements:,} numbers; limits of floored laws "
            "are 7 standard deviations for an element and 6.5 for a mean, so that many looks cost under 0.01 alarms"
        )
        return Verdict(outcome, "relations", suspects, self.smallest_visible(), forwards, tried, tuple(notes), unseen)

    def smallest_visible(self) -> dict[str, Any]:
        """By operator and class: the size of the smallest fault that would have shown at every such site.

        Sizes are relative to the output's rms; 0 means a single bit; None means not visible by the laws tried.
        """
        sizes: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in self.entries.values():
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
    for law, reading in entry.readings.items():
        operator = entry.site.operator
        if operator == FUSED:
            operator = "softmax" if law in ("R9", "R11", "R13") else "matmul"
        best = found.setdefault(operator, {})
        hidden = NO_PROMISE.get(law, frozenset()) | NO_PROMISE.get(f"{law} {operator}", frozenset())
        for name in LAWS[law].catches:
            if name not in hidden and reading.floor < best.get(name, (math.inf, ""))[0]:
                best[name] = (reading.floor, law)
    return found


def _suspect(entry: Entry) -> Suspect:
    broken, facts = entry.broken, entry.facts
    site, named = place_and_class(entry.site, broken, facts)
    kept = [law for law, reading in entry.readings.items() if not reading.broken]
    sure = any(math.isinf(reading.strength) or reading.strength > 4 for reading in broken.values())
    said = "; ".join(str(reading) for reading in sorted(broken.values(), key=lambda r: -r.strength))
    evidence = f"{said}; kept: {', '.join(kept) if kept else 'none'}"
    if named.text:
        evidence = f"{evidence}; {named.text}"
    strongest = max(min(math.log10(max(reading.strength, 1.0)), 12.0) for reading in broken.values())
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
