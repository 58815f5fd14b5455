"""The verdict of an audit, from what its log holds: suspects with their evidence, notes on what was not seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from noisescope.errors import NothingInjected
from noisescope.localization.audit_log import Alarm, AuditLog, DetectionLimit, Origin
from noisescope.localization.block_wiring import OUT
from noisescope.localization.data_flow_checks import MOST_ROWS
from noisescope.localization.roundoff_floors import operand_bits
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.sites import FUSED, Site, place_order

_INSIDE = ("matmul", "bmm", "softmax")
_STRONG = 10.0  # times its limit: beyond any doubt, so that only the order of computation decides
_FIRST = 3.0  # score of what made NaN out of finite numbers: above all alarms, whose inputs may be spoilt by it


def conclude(log: AuditLog) -> Verdict:
    if not log.limits:
        raise NothingInjected("the model ran, but no operator of it was seen: see `noisescope inspect`")
    suspects = ranked((*_impossible_sums(log), *_suspects(log)))
    notes = tuple(_notes(log))
    unseen = tuple(site for sites in log.unseen.values() for site in sites if site.component != "router")
    verdict = "faulty" if suspects else "undecided" if unseen else "healthy"
    between = {site for (_, role), (site, _) in log.data_flow.sites.items() if role in log.data_flow.forms}
    limits = log.limits | ({"between operators": DetectionLimit(between, element=0.5)} if between else {})
    visible = {operator: limit.to_dict() for operator, limit in limits.items()}
    return Verdict(verdict, "audit", suspects, visible, float(log.forwards), log.tests, notes, unseen)


# -- inside attention


def suspects_inside_attention(log: AuditLog) -> frozenset[str]:
    """Attention modules of which an operator inside is under suspicion."""
    inside = (s for s in log.alarms if s.operator in _INSIDE and s.tensor == "output")
    return frozenset(site.module for site in inside if site.component == "attention")


def hidden_in_attention(log: AuditLog, *, passing_only: bool) -> dict[int, frozenset[str]]:
    """By batch, fused attention that was wrong there while no operator inside it was caught yet.

    `passing_only`: only where it is not wrong in the same way each time.
    """
    inside = suspects_inside_attention(log)
    found: dict[int, frozenset[str]] = {}
    for site, alarm in log.alarms.items():
        fused = site.operator == FUSED and site.tensor == "output" and site.module not in inside
        if fused and (site in log.unrepeatable or not passing_only):
            found[alarm.batch] = found.get(alarm.batch, frozenset()) | {site.module}
    return found


# -- suspects


def _suspects(log: AuditLog) -> Iterator[Suspect]:
    """One for each call under suspicion, in the order of computation."""
    opened = suspects_inside_attention(log)
    fused = {site for site in log.alarms if site.operator == FUSED and site.tensor == "output"}
    alarms = [a for a in log.alarms.values() if a.site not in fused or a.site.module not in opened]
    alarms.sort(key=lambda alarm: (place_order(alarm.site.place), alarm.order))
    calls: dict[Site, list[Alarm]] = {}
    for alarm in alarms:
        # Queries, keys and values are inputs of one call: a cache that is wrong spoils both of the last.
        shared = alarm.site.operator == FUSED and alarm.site.tensor == "input"
        one = dataclasses.replace(alarm.site, occurrence=0) if shared else alarm.site
        calls.setdefault(one, []).append(alarm)
    for rank, (first, *others) in enumerate(calls.values()):
        yield _suspect(log, first, others, rank)


def _suspect(log: AuditLog, alarm: Alarm, others: list[Alarm], rank: int) -> Suspect:
    judgement, pattern = alarm.judgement, alarm.pattern
    name, confidence = pattern.fault_class, pattern.confidence
    unrepeatable = _unrepeatable(log, alarm.site)
    if alarm.stale:
        name, confidence = "stale data", 0.95
    elif unrepeatable and name != "spike":
        name, confidence = "noise", 0.9
    strong = judgement.strength > _STRONG
    certainty = 0.99 if strong else 0.9
    evidence = f"{judgement.words}; {pattern.text}"
    if "made_as" in pattern.details:
        evidence += f"; should be {pattern.details['made_as']}"
    for other in others:
        evidence += f"; nor is {other.pattern.details['made_as']} ({other.judgement.words})"
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
        "class_confidence": confidence,
        **pattern.details,
    }
    score = (2.0 if strong else 1.0) + 1 / (2 + rank)
    return Suspect(alarm.site, name, certainty, evidence, score, pattern.channels, pattern.period, details)


def _impossible_sums(log: AuditLog) -> Iterator[Suspect]:
    """A sum that can't be NaN, whatever its terms: they may be unknown, since NaN in all later blocks shows none."""
    origin = log.nonfinite.origin
    if origin is not None and origin.fault and origin.site not in log.alarms:
        evidence = f"NaN or infinity arises here from finite numbers: {origin.why}"
        yield Suspect(origin.site, "unknown", 0.9, evidence, _FIRST, details={"test": "non-finite"})


def _unrepeatable(log: AuditLog, site: Site) -> bool:
    """The same input gave another output, at the operator itself or at the fused call that holds it."""
    fused = {s.module for s in log.unrepeatable if s.operator == FUSED}
    return site in log.unrepeatable or (site.operator in _INSIDE and site.module in fused)


# -- notes


def _notes(log: AuditLog) -> Iterator[str]:
    yield from log.remarks
    if log.nonfinite.origin is not None:
        origin = log.nonfinite.origin
        yield f"NaN or infinity first arises at {origin.site}: {_cause(log, origin)}"
    for reason, sites in log.unseen.items():
        first = min(sites, key=lambda site: place_order(site.place))
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield f"not looked at: {first}{more}: {reason}"
    if log.hashes and not log.compared:
        yield "no operator had the same inputs twice: what does not repeat was not looked at"
    quiet = {site for site in log.unrepeatable if site not in log.alarms}
    if quiet:
        yield f"{len(quiet)} operators differ from run to run, within the round-off floor"
    if log.checksums:
        yield f"{log.checksums} rows of linears were looked at through checksums only: give more rows="
    if log.data_flow.rows > MOST_ROWS:
        yield f"between operators {MOST_ROWS} of {log.data_flow.rows} rows were looked at"
    loose = log.data_flow.unexplained()
    if loose:
        yield (
            f"left out between operators: what lies before {loose[0]} and {len(loose) - 1} more kinds of inputs, "
            "which are no plain copy, part, product or rotation of outputs in their block"
        )
    recorded = {site.module for limit in log.limits.values() for site in limit.sites} | {
        site.module for sites in log.unseen.values() for site in sites
    }
    silent = [u for u in log.anatomy.units if u.certain and u.module not in recorded and not u.left_alone]
    if silent:
        yield f"{silent[0].module} and {len(silent) - 1} more were not called in these forwards"
    if operand_bits() < 24:
        yield "float32 products may be shortened here (TF32): their floor is wider"


def _cause(log: AuditLog, origin: Origin) -> str:
    """Why it is not finite: a fault, an overflow, or open."""
    place = origin.site.place
    makers = {origin.site}  # what enters a norm is a sum of its block
    if isinstance(place, int) and origin.site.tensor == "input":
        makers.add(Site("residual", place, log.anatomy.blocks[place]))
    if any(alarm.site in makers and alarm.judgement.nonfinite for alarm in log.alarms.values()):
        return f"a fault, for from the same inputs the host's result is finite and within {origin.dtype}'s range"
    if origin.why:
        return origin.why
    if _host_agrees(log, origin):
        return f"{origin.overflow}: the host makes the same of the finite numbers before it"
    return "how it is made is not known here, so that it may be an overflow or a fault"


def _host_agrees(log: AuditLog, origin: Origin) -> bool:
    """Whether a sum, or what lies before an operator, is what the host makes of the same numbers in their dtype."""
    site, place = origin.site, origin.site.place
    if not isinstance(place, int):
        return False
    if site.operator == "residual":
        return log.residuals.matched(OUT, place)
    if site.operator == FUSED:
        site = dataclasses.replace(site, occurrence=origin.operand)
    elif origin.operand:
        return False
    role = site.module.removeprefix(f"{log.anatomy.blocks[place]}.")
    roles = [role for (_, role), (input_site, _) in log.data_flow.sites.items() if input_site == site]
    return log.residuals.matched(f"{role}.in", place) or any(log.data_flow.matched(role, place) for role in roles)
