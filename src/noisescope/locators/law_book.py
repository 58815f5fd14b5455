"""Everything the laws said, put together: suspects, what was kept, what could not be tried, what would have shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from noisescope.locators.law_classes import Named, from_scores, name_fault
from noisescope.locators.law_linear import Examined
from noisescope.locators.law_readings import Reading, period, worse
from noisescope.locators.law_scope import ATTENTION_MODULE, FUSED, MLP
from noisescope.locators.laws import INVISIBLE, LAWS
from noisescope.locators.verdict import Suspect, Verdict, ranked
from noisescope.sites import Site

OPERATOR, SUBLAYER, MODEL = 0, 1, 2
_UNREPEATABLE = 0.5  # share of alike modules that differ from run to run within round-off: then it is the stack


@dataclass
class Entry:
    """One site with all its readings."""

    site: Site
    level: int
    order: int
    kind: str  # modules of one kind are alike: operator and shapes
    width: int = 0
    readings: dict[str, Reading] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

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
        if not was_broken:
            entry.facts.update(found.facts if found.broken else {})
        for text in found.skipped:
            self.skipped[text] = self.skipped.get(text, 0) + 1
        return entry

    # -- conclusions

    def forgive_the_stack(self) -> None:
        """R1 broken within round-off in half of the alike modules: the stack does not repeat itself."""
        kinds: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if "R1" in entry.readings:
                kinds.setdefault(entry.kind, []).append(entry)
        for kind, alike in kinds.items():
            loose = [e for e in alike if e.readings["R1"].broken and e.readings["R1"].within_round_off]
            if len(loose) < max(2, _UNREPEATABLE * len(alike)):
                continue
            for entry in loose:
                entry.readings["R1"] = replace(entry.readings["R1"], strength=1.0)
            self.notes.append(
                f"{len(loose)} of {len(alike)} modules alike ({kind}) differ from run to run within round-off: this "
                "stack does not repeat itself, so exact laws that rest on that were judged within round-off"
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

    def verdict(self, forwards: float) -> Verdict:
        self.forgive_the_stack()
        found = self.suspects()
        suspects = ranked(_suspect(entry) for entry in sorted(found, key=lambda e: e.order))
        tried = sum(len(entry.readings) for entry in self.entries.values())
        outcome = "faulty" if suspects else ("healthy" if tried else "undecided")
        notes = [*self.notes, *(f"{text} ({count} x)" for text, count in sorted(self.skipped.items()))]
        notes.append(
            f"{tried} laws tried at {len(self.entries)} places on {self.elements:,} numbers; limits of floored laws are "
            "7 standard deviations for an element and 6.5 for a mean, so that number of looks costs under 0.01 alarms"
        )
        return Verdict(outcome, "relations", suspects, self.smallest_visible(), forwards, tried, tuple(notes))

    def smallest_visible(self) -> dict[str, Any]:
        """By operator and class: the size of the smallest fault that would have shown at every such site.

        Sizes are relative to the output's rms; 0 means a single bit; None means not visible by the laws that were tried.
        """
        sizes: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in self.entries.values():
            if entry.level != OPERATOR:
                continue
            best: dict[str, tuple[float, str]] = {}
            for law, reading in entry.readings.items():
                for name in LAWS[law].catches:
                    if (law, entry.site.operator) in INVISIBLE and name in INVISIBLE[law, entry.site.operator]:
                        continue
                    if name not in best or reading.floor < best[name][0]:
                        best[name] = (reading.floor, law)
            here = sizes.setdefault(entry.site.operator, {})
            for name, (size, law) in best.items():
                if name not in here or size > here[name]["size"]:
                    here[name] = {"size": size, "law": law, "module": entry.site.module}
        linear = sizes.get("linear", {})
        for name in ("gain", "swapped channels", "dead input lane", "block scale"):
            if linear and name not in linear:
                linear[name] = {"size": None, "law": None, "why": "linear faults show only with weights=True"}
        return sizes


def _suspect(entry: Entry) -> Suspect:
    broken = entry.broken
    site, named = _place_and_class(entry)
    kept = [law for law, reading in entry.readings.items() if not reading.broken]
    channels = named.channels
    sure = any(math.isinf(reading.strength) or reading.strength > 4 for reading in broken.values())
    told = "; ".join(reading.words() for reading in sorted(broken.values(), key=lambda r: -r.strength))
    evidence = f"{told}; kept: {', '.join(kept) if kept else 'none'}"
    if named.text:
        evidence = f"{evidence}; {named.text}"
    strongest = max(min(math.log10(max(reading.strength, 1.0)), 12.0) for reading in broken.values())
    return Suspect(
        site,
        named.fault_class,
        0.99 if sure else 0.8,
        f"{evidence}.",
        score=strongest + 0.1 * len(broken) - 1e-6 * entry.order,
        channels=channels,
        period=period(channels, entry.width) if entry.width else None,
        details={
            "broken": {law: {"size": r.size, "floor": r.floor, "share": r.share} for law, r in broken.items()},
            "kept": kept,
            "class_confidence": named.confidence,
        },
    )


def _place_and_class(entry: Entry) -> tuple[Site, Named]:
    """A fused call or a whole sub-layer is narrowed down to an operator by its pattern."""
    site, broken, facts = entry.site, entry.broken, entry.facts
    if site.operator == MLP:
        return replace(site, operator=entry.facts.get("activation", "silu")), name_fault(MLP, broken, facts)
    if site.operator == ATTENTION_MODULE:
        operator = "matmul" if broken.keys() & {"R7", "R8", "R14"} else "softmax"
        return replace(site, operator=operator), name_fault(FUSED, broken, facts)
    if site.operator != FUSED:
        return site, name_fault(site.operator, broken, facts)
    if facts.get("ones") == "channels" or not broken.keys() & {"R4", "R11", "R12", "R13", "R2"}:
        return replace(site, operator="matmul", occurrence=1), name_fault("matmul", broken, facts)
    if "R11" in broken or "R12" not in broken:
        softmax = {law: reading for law, reading in broken.items() if law not in ("R7", "R17", "R18")}
        return replace(site, operator="softmax", occurrence=0), _softmax(softmax or broken, facts)
    named = name_fault("attention", broken, facts)
    if named.fault_class not in ("noise", "spike", "stale data") and "read" in facts:
        named = from_scores(*facts["read"])
    return replace(site, operator="matmul", occurrence=0), named


def _softmax(broken: dict[str, Reading], facts: dict[str, Any]) -> Named:
    named = name_fault("softmax", broken, facts)
    if named.fault_class in ("gain", "unknown") and abs(facts.get("ones size", 0.0)) < 4 * facts.get("ones spread", 0.0):
        return Named("accumulation", 0.5)
    return named
