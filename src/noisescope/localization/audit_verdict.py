"""Builds the verdict of an audit from its log: suspects with evidence, coverage, notes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from noisescope.errors import NothingInjected
from noisescope.localization.audit_log import Alarm, AuditLog, DetectionLimit
from noisescope.localization.call_tree import Judged, with_whole_modules
from noisescope.localization.coverage import Cell, Coverage, NotJudged, Phase, Share
from noisescope.localization.data_flow import Origin
from noisescope.localization.resolution import percent_of
from noisescope.localization.roundoff_floors import operand_bits
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.model.anatomy import Anatomy
from noisescope.sites import FUSED, Site, place_order

_INSIDE = ("matmul", "bmm", "softmax")
_PLACED = ("tile", "tail", "batch", "rows")  # classes that say which elements are wrong, whatever happens to them
_NEARLY_ALL = 0.8  # of the places that have such an operator
_FEWEST = 2
_MANY_CALLS = 4  # of one function in one call of a module: attention's own code has two products
_MOST_OTHERS = 2  # tensors of one call that are named beside the worst
_STRONG = 10.0  # times its limit: beyond any doubt, so that only the order of computation decides

Kind = Callable[[Site], Hashable]


@dataclass(frozen=True)
class JudgedModel:
    """The audited model, with the phases that ran."""

    model: nn.Module
    phases: Sequence[Phase]
    not_run: Sequence[str]
    raised: Sequence[str]  # of these, what an error of the model ended
    read_directly: frozenset[str]  # modules that are not called: others read their parameters


def conclude(log: AuditLog, judged: JudgedModel | None = None) -> Verdict:
    """The verdict; without a model (relations, a replay of a record) the coverage is empty."""
    if not log.limits and not log.unseen:
        raise NothingInjected("the model ran, but none of its operators was observed: see `noisescope inspect`")
    suspects = ranked(in_all_layers(tuple(suspects_of(log)), judged_sites(log), log.anatomy))
    unseen = tuple(dict.fromkeys(site for sites in log.unseen.values() for site in sites))
    coverage = Coverage() if judged is None else _coverage(log, judged)
    decided = not unseen and (judged is None or (coverage.enough and not coverage.never_decoded))
    verdict = "faulty" if suspects else "healthy" if decided else "undecided"
    visible = {operator: limit.to_dict() for operator, limit in _healthy_limits(log).items()}
    notes = tuple(_notes(log))
    return Verdict(verdict, "audit", suspects, visible, float(log.forwards), log.tests, notes, unseen, coverage)


def _healthy_limits(log: AuditLog) -> dict[str, DetectionLimit]:
    """Without sites that raised an alarm, such as a softmax and the attention around it: they are wrong, not judged."""
    limits = {operator: limit.without(log.alarms) for operator, limit in log.limits.items()}
    return {operator: limit for operator, limit in limits.items() if limit.sites}


# -- coverage


def _coverage(log: AuditLog, judged: JudgedModel) -> Coverage:
    modules = dict(judged.model.named_modules())
    whole = with_whole_modules(judged.model, log.anatomy)
    names = [name for name in dict.fromkeys(unit.module for unit in whole.units) if name in modules]
    own = {name: [p for p in modules[name]._parameters.values() if p is not None] for name in names}
    found = log.judged
    called = found.called | judged.read_directly
    reasons = {name: found.reason(name) for name in names if found.reason(name)}
    judged_weights = {id(p) for name in names if name in called and name not in reasons for p in own[name]}
    for name in names:  # weights that another module shares and uses are not left out
        if name not in called and not all(id(p) in judged_weights for p in own[name]):
            reasons[name] = "not called in these forwards"
    ran = [name for name in names if name in called or name in reasons]
    weights = {id(p): p.numel() for name in ran for p in own[name]}
    return Coverage(
        phases=tuple(judged.phases),
        not_run=tuple(dict.fromkeys(judged.not_run)),
        modules=Share(len(ran) - len(reasons), len(ran)),
        parameters=Share(sum(n for p, n in weights.items() if p in judged_weights), sum(weights.values())),
        multiply_adds=Share(
            sum(found.work[key] * share for key, share in found.calls.items()), sum(found.work.values())
        ),
        not_judged=not_judged(reasons, modules),
        in_part=(*dict.fromkeys(judged.raised), *_with_nan(found, reasons)),
        cells=tuple(cells_of(log)),
        resolution=log.resolution.rows(),
    )


def _with_nan(found: Judged, reasons: Collection[str]) -> Iterator[str]:
    for phase, shares in found.not_finite.items():
        here = [share for name, share in shares.items() if name not in reasons]
        if here:
            words = f"NaN or infinite, on the host as well, in {len(here)} module{'s' * (len(here) > 1)}"
            yield f"{phase}: up to {percent_of(max(here))} of the output is {words}"


def not_judged(reasons: Mapping[str, str], modules: Mapping[str, nn.Module]) -> tuple[NotJudged, ...]:
    """Modules that were not judged, by class and reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        grouped.setdefault((type(modules[name]).__name__, reason), []).append(name)
    return tuple(NotJudged(kind, tuple(names), reason) for (kind, reason), names in grouped.items())


def cells_of(log: AuditLog) -> Iterator[Cell]:
    sites: dict[Site, bool] = {}
    for (site, _), judged in log.judged.calls.items():
        sites[site] = judged > 0 and sites.get(site, True)
    found = {(site.place, site.operator) for site in sites}
    for place, operator in sorted(found, key=lambda key: (place_order(key[0]), key[1])):
        here = [judged for site, judged in sites.items() if (site.place, site.operator) == (place, operator)]
        yield Cell(place, operator, sum(here), len(here))


# -- inside attention


def suspects_inside_attention(log: AuditLog) -> frozenset[str]:
    """Attention modules that contain a suspect operator."""
    inside = (s for s in log.alarms if s.operator in _INSIDE and s.tensor == "output")
    return frozenset(site.module for site in inside if site.component == "attention")


def hidden_in_attention(log: AuditLog, *, passing_only: bool) -> dict[int, frozenset[str]]:
    """Per batch, fused attention calls that were wrong although no operator inside has been identified yet.

    `passing_only` restricts this to calls that are not wrong in the same way every time.
    """
    inside = suspects_inside_attention(log)
    found: dict[int, frozenset[str]] = {}
    for site, alarm in log.alarms.items():
        fused = site.operator == FUSED and site.tensor == "output" and site.module not in inside
        if fused and (site in log.unrepeatable or not passing_only):
            found[alarm.batch] = found.get(alarm.batch, frozenset()) | {site.module}
    return found


# -- suspects


def suspects_of(log: AuditLog, *, backward: bool = False) -> Iterator[Suspect]:
    """One suspect for each suspicious call, in the order of computation; a backward pass starts at the end."""
    opened = suspects_inside_attention(log)
    fused = {site for site in log.alarms if site.operator == FUSED and site.tensor == "output"}
    alarms = [a for a in log.alarms.values() if a.site not in fused or a.site.module not in opened]
    alarms.sort(key=lambda alarm: (place_order(alarm.site.place), alarm.order), reverse=backward)
    for rank, alarm in enumerate(alarms):
        yield _suspect(log, alarm, rank)


def _suspect(log: AuditLog, alarm: Alarm, rank: int) -> Suspect:
    judgement, pattern = alarm.judgement, alarm.pattern
    name, confidence = pattern.fault_class, pattern.confidence
    unrepeatable = _unrepeatable(log, alarm.site)
    also = pattern.details.get("also", "")
    if alarm.stale:
        name, confidence, also = "stale data", 0.95, name if name in _PLACED else also
    elif unrepeatable and name not in ("spike", *_PLACED):
        name, confidence = "noise", 0.9
    strong = judgement.strength > _STRONG
    certainty = 0.99 if strong else 0.9
    evidence = "; ".join(filter(None, (judgement.words, pattern.text, alarm.phase and f"in {alarm.phase}")))
    if alarm.stale:
        evidence += "; the wrong elements hold another call's values"
    elif unrepeatable and name != "noise":
        evidence += "; differs from run to run"
    if "made_as" in pattern.details:
        evidence += f"; expected: {pattern.details['made_as']}"
    others = [(made, words) for made, words in log.made.get(alarm.site, {}).items() if made not in evidence]
    for made, words in others[:_MOST_OTHERS]:  # a wrong cache spoils keys and values
        evidence += f"; also wrong: {made} ({words})"
    details = {
        "test": judgement.test,
        "strength": judgement.strength if math.isfinite(judgement.strength) else "exact",
        "worst": judgement.worst,
        "worst_ulp": judgement.worst_ulp,
        "mean_ulp": judgement.mean_ulp,
        "rms": judgement.rms,
        "bad": judgement.bad,
        "elements": judgement.elements,
        "repeatable": not unrepeatable,
        **pattern.details,
        **({"also": also} if also else {}),
    }
    score = (2.0 if strong else 1.0) + 1 / (2 + rank)
    return Suspect(
        alarm.site,
        name,
        certainty,
        evidence,
        score,
        pattern.channels,
        pattern.period,
        details,
        confidence,
        pattern.rows,
        pattern.row_words,
    )


def judged_sites(log: AuditLog) -> frozenset[Site]:
    return frozenset(site for limit in log.limits.values() for site in limit.sites)


def _unrepeatable(log: AuditLog, site: Site) -> bool:
    """Whether the same input gave a different output, at the operator or at the fused call that contains it."""
    fused = {s.module for s in log.unrepeatable if s.operator == FUSED}
    return site in log.unrepeatable or (site.operator in _INSIDE and site.module in fused)


# -- one kernel that is wrong in every layer is one suspect


def in_all_layers(suspects: Sequence[Suspect], judged: Iterable[Site], anatomy: Anatomy) -> tuple[Suspect, ...]:
    """Merge suspects of one operator and class that occur in nearly all layers.

    First all calls of an operator (every linear), then all calls of one role (every q_proj). Errors in only a few
    places are never merged, so a fault in one layer keeps its place.
    """
    suspects = _without_repetitions(suspects)
    known = {*judged, *(suspect.site for suspect in suspects)}
    for kind in (_by_operator, lambda site: (*_by_operator(site), _role(site, anatomy))):
        suspects = _joined(suspects, known, kind)
    return tuple(suspects)


def _without_repetitions(suspects: Sequence[Suspect]) -> list[Suspect]:
    """One suspect for a function that a module's code calls again and again, as a scan does for each token."""
    groups: dict[Site, list[Suspect]] = {}
    for suspect in suspects:
        groups.setdefault(dataclasses.replace(suspect.site, occurrence=0), []).append(suspect)
    found = []
    for head, *others in groups.values():
        if len(others) < _MANY_CALLS:
            found += [head, *others]
        else:
            words = f"{head.evidence}; the same function in {len(others)} other calls of this module"
            sites = tuple(site for other in others for site in (other.site, *other.also))
            found.append(dataclasses.replace(head, evidence=words, also=(*head.also, *sites)))
    return list(ranked(found))


def _by_operator(site: Site) -> tuple[str, str]:
    return site.operator, site.tensor


def _role(site: Site, anatomy: Anatomy) -> tuple[str, int]:
    """A module's name within its block, and which call of it."""
    inside = isinstance(site.place, int)
    prefix = anatomy.blocks[site.place] if isinstance(site.place, int) else ""
    return (site.module.removeprefix(prefix) if inside else site.module), site.occurrence


def _joined(suspects: Sequence[Suspect], known: set[Site], kind: Kind) -> list[Suspect]:
    groups: dict[Hashable, list[Suspect]] = {}
    for suspect in suspects:
        groups.setdefault(kind(suspect.site), []).append(suspect)
    swallowed: set[int] = set()
    first: dict[int, Suspect] = {}
    for key, group in groups.items():
        # What enters an operator is judged only where it is wrong, so that its outputs tell how many there are.
        total = {s for s in known if kind(dataclasses.replace(s, tensor="output")) == _as_output(key)}
        places = {(s.place, s.module) for s in total if isinstance(s.place, int)}
        name = Counter(s.fault_class for s in group if s.class_confidence > 0).most_common(1)
        same = [s for s in group if name and (s.fault_class == name[0][0] or s.class_confidence == 0)]
        layers = {(s.site.place, s.site.module) for s in same if isinstance(s.site.place, int)}
        if len(layers) < max(_FEWEST, _NEARLY_ALL * len(places)) or len({place for place, _ in layers}) < _FEWEST:
            continue
        head = next(s for s in same if s.class_confidence > 0)
        swallowed |= {id(s) for s in same}
        first[id(head)] = _join(head, [s for s in same if s is not head])
    return [first.get(id(s), s) for s in suspects if id(s) in first or id(s) not in swallowed]


def _as_output(key: Hashable) -> Hashable:
    return (key[0], "output", *key[2:]) if isinstance(key, tuple) else key


def _join(head: Suspect, others: Sequence[Suspect]) -> Suspect:
    sites = tuple(site for other in others for site in (other.site, *other.also))
    layers = {site.place for site in sites if isinstance(site.place, int)} - {head.site.place}
    modules = len({site.module for site in sites})
    words = f"the same in {len(layers)} other layer{'s' * (len(layers) != 1)}"
    if modules > len(layers):
        words += f", {modules} other modules in all"
    return dataclasses.replace(
        head,
        evidence=f"{head.evidence}; {words}",
        score=max(s.score for s in (head, *others)),
        also=(*head.also, *sites),
        class_confidence=max(s.class_confidence for s in (head, *others)),
    )


# -- notes


def _notes(log: AuditLog) -> Iterator[str]:
    yield from log.remarks
    if log.nonfinite.origin is not None:
        origin = log.nonfinite.origin
        yield f"NaN or infinity first appears at {origin.site}: {_cause(log, origin)}"
    for reason, sites in log.unseen.items():
        first = min(sites, key=lambda site: place_order(site.place))
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield f"undecided: {first}{more}: {reason}"
    if log.hashes and not log.compared:
        yield "no operator received the same inputs twice, so repeatability was not checked"
    quiet = {site for site in log.unrepeatable if site not in log.alarms}
    if quiet:
        yield f"{len(quiet)} operators differ from run to run, within the round-off floor"
    if log.checksums:
        yield (
            f"{log.checksums} output rows of linears were checked by checksum, which detects errors above about 14 ulp"
        )
    if operand_bits() < 24:
        yield "this device may compute float32 products in reduced precision (TF32), so their detection limit is higher"


def _cause(log: AuditLog, origin: Origin) -> str:
    """Why a value is not finite: a fault, an overflow, or unknown."""
    here = (origin.site.place, origin.site.module)
    if any((a.site.place, a.site.module) == here and a.judgement.nonfinite for a in log.alarms.values()):
        return f"a fault: from the same inputs the host's result is finite and within the range of {origin.dtype}"
    return origin.why or "noisescope has no formula for it, so it may be an overflow or a fault"
