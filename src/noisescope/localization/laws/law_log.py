"""All law results by site, and what follows from them for the audit's log: alarms, what was not judged, limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from noisescope.localization.audit_log import Alarm, AuditLog, DetectionLimit
from noisescope.localization.judge import Judgement
from noisescope.localization.laws.call_results import LawEvidence
from noisescope.localization.laws.fault_classes import place_and_class
from noisescope.localization.laws.table import NO_PROMISE, UNSEEN, Law
from noisescope.localization.tensors import lane_period
from noisescope.model.anatomy import Anatomy
from noisescope.sites import FUSED, Site

OPERATOR, SUBLAYER, MODEL = 0, 1, 2
WHOLE_MODEL = Site("linear", "lm_head", "")
# Share of alike modules (and two at least) that differ from run to run within round-off: then it is the stack. This
# forgives and can't alarm; its error is a miss. Null: a stack that repeats itself has none (0 of 1,584 modules in
# benchmarks/healthy_limits.py), and one faulty module is never half of two: a miss takes noise below round-off in half
# of all modules of one shape, which no law can tell from atomics.
_UNREPEATABLE = 0.5


@dataclass
class SiteResults(LawEvidence):
    """The results of all laws at one site, from all its calls."""

    level: int = OPERATOR
    kind: str = ""  # modules of one kind are alike: operator and shapes
    width: int = 0

    @property
    def judged(self) -> bool:
        """That something repeats itself says little: an operator of which no other law is known was not judged."""
        return bool(self.results.keys() - {Law.REPEAT})


class LawLog(AuditLog):
    """Collects results by site."""

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__(anatomy, rows=0, seed=0)
        self.sites: dict[Site, SiteResults] = {}
        self.skipped: Counter[str] = Counter()  # laws that could not be tested, and why
        self.forgiven = False  # modules that differ from run to run within round-off

    def add(self, site: Site, found: LawEvidence, *, level: int = OPERATOR, kind: str = "", width: int = 0) -> None:
        entry = self.sites.setdefault(site, SiteResults(level=level, kind=kind, width=width))
        if found.broken and not entry.broken:
            entry.facts = found.facts
        for result in found.results.values():
            entry.add(result)
        self.skipped.update(found.skipped)

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
            loose = [e for e in alike if e.results[Law.REPEAT].alarm and e.results[Law.REPEAT].within_round_off]
            if len(loose) < max(2, _UNREPEATABLE * len(alike)):
                continue
            for entry in alike + [entry for entry in self.sites.values() if entry.level == SUBLAYER]:
                for law, result in entry.results.items():
                    if result.within_round_off:
                        result.strengths = {law: 1.0}
            self.forgiven = True
            self.remarks.append(
                f"{len(loose)} of {len(alike)} similar modules ({kind}) differ from run to run within round-off: "
                f"results on this system are not bit-for-bit repeatable, so laws that need that were checked within "
                f"round-off"
            )

    def suspects(self) -> dict[Site, SiteResults]:
        """Broken entries that no inner one explains."""
        broken = {site: entry for site, entry in self.sites.items() if entry.broken}
        places = {site.place for site, entry in broken.items() if entry.level == OPERATOR}

        def explained(site: Site, entry: SiteResults) -> bool:
            shifted = "rotary" in places and set(entry.broken) <= {Law.POSITION_SHIFT}
            return entry.level == SUBLAYER and (site.place in places or shifted)

        inner = {s: e for s, e in broken.items() if e.level != MODEL and not explained(s, e)}
        return inner or {s: e for s, e in broken.items() if e.level == MODEL}

    def settle(self, asked: tuple[Site, ...]) -> None:
        """Pass on to the verdict which sites are suspect, which were not judged, and what would have been detected."""
        for order, (site, entry) in enumerate(self.suspects().items()):
            place, pattern = place_and_class(site, entry.broken, entry.facts)
            if entry.width and not pattern.period:
                pattern.period = lane_period(pattern.channels, entry.width, least=1.0)
            pattern.details |= _details(entry)
            self.alarms.setdefault(place, Alarm(place, 0, order, _together(entry), pattern))
        modules = {site.module for site, entry in self.sites.items() if entry.judged}
        operators = {site: entry for site, entry in self.sites.items() if entry.level == OPERATOR}
        untried = [site for site, entry in operators.items() if not entry.judged]
        for site in (*untried, *(site for site in asked if site.module not in modules)):
            if site.component != "router":
                self.leave_open(site, "no law but repetition could be tested")
        if not self.sites:
            self.leave_open(WHOLE_MODEL, "no law could be tested")
        for site, entry in operators.items():
            for operator, best in _best(site, entry).items():
                self.limits.setdefault(operator, LawLimit(operator=operator)).sites[site] = best
        self.tests = sum(len(entry.results) for entry in self.sites.values())
        values = sum(result.tests for entry in self.sites.values() for result in entry.results.values())
        self.remarks += [f"{text} ({count} x)" for text, count in sorted(self.skipped.items())]
        self.remarks.append(
            f"{self.tests} laws tried at {len(self.sites)} places on {values:,} values; laws with a round-off "
            f"tolerance use limits of 7 standard deviations per element and 6.5 per mean, so all of these tests "
            f"together raise fewer than 0.01 false alarms"
        )


@dataclass
class LawLimit(DetectionLimit):
    """By class of faults: the smallest that would have been detected at every site of one kind of operator.

    Sizes are relative to the output's rms; 0 means a single bit; None means undetectable by the laws tested.
    """

    operator: str = ""

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        for site, best in self.sites.items():
            for name, (size, law) in best.items():
                if name not in found or size > found[name]["size"]:
                    found[name] = {"size": size, "law": str(law), "module": site.module}
        for name, why in UNSEEN.items() if self.operator == "linear" else ():
            found.setdefault(name, {"size": None, "law": None, "why": why})
        return found


def _best(site: Site, entry: SiteResults) -> dict[str, dict[str, tuple[float, Law]]]:
    """The smallest tolerance of each class at one site, by operator: a fused call covers several."""
    found: dict[str, dict[str, tuple[float, Law]]] = {}
    for law, result in entry.results.items():
        operator = site.operator
        if operator == FUSED:
            operator = "softmax" if law in (Law.SINGLE_KEY, Law.PROBABILITIES_SUM_TO_ONE, Law.LOG_ODDS) else "matmul"
        best = found.setdefault(operator, {})
        for name in law.catches:
            if name not in NO_PROMISE.get(law, ()) and (name not in best or result.visible_share < best[name][0]):
                best[name] = (result.visible_share, law)
    return found


def _together(entry: SiteResults) -> Judgement:
    """The judgement of a suspect: that of its strongest law, in the words of all."""
    broken = sorted(entry.broken.items(), key=lambda pair: -pair[1].strength)
    said = "; ".join(result.said for _, result in broken)
    kept = ", ".join(law for law in entry.results if law not in entry.broken)
    strengths = {str(law): result.strength for law, result in broken}
    return replace(broken[0][1], strengths=strengths, said=f"{said}; laws that hold: {kept or 'none'}")


def _details(entry: SiteResults) -> dict[str, Any]:
    sizes = {
        str(law): {"size": result.size, "floor": result.visible_share, "share": result.share}
        for law, result in entry.broken.items()
    }
    kept = [str(law) for law in entry.results if law not in entry.broken]
    return {"broken": sizes, "kept": kept, "facts": entry.facts.to_dict()}
