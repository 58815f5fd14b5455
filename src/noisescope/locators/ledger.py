"""What an audit has looked at so far: alarms with their pattern, what is not repeatable, what could not be seen."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import Anatomy, Unit
from noisescope.errors import NothingInjected
from noisescope.locators.classify import classify, is_stale
from noisescope.locators.floors import INTEGERS, number_format
from noisescope.locators.judge import Judgement, judge
from noisescope.locators.pattern import Evidence, Pattern
from noisescope.locators.products import Recomputed, Rows
from noisescope.locators.recompute import Unseen, recompute
from noisescope.locators.residuals import Recorder, Residuals
from noisescope.locators.seams import MOST_ROWS, Seams, words
from noisescope.locators.verdict import Suspect, Verdict, ranked
from noisescope.sites import Site, place_order

_MOST_PATTERNS = 24  # alarms of one forward that are looked into
_STRONG = 10.0  # times its limit: beyond any doubt, so that only the order of computation decides
_FUSED = "attention"
_INSIDE = ("matmul", "bmm", "softmax")


@dataclass
class Alarm:
    """The strongest alarm at one site."""

    site: Site
    batch: int
    order: int
    judgement: Judgement
    pattern: Pattern
    evidence: Evidence  # what belongs there: another call may hold it
    stale: bool = False


@dataclass
class Power:
    """What the looks at one kind of operator could have seen; the worst site counts."""

    sites: set[Site] = field(default_factory=set)
    element: float = 0.0
    mean: float = 0.0
    gain: float = 0.0

    def add(self, site: Site, judgement: Judgement) -> None:
        self.sites.add(site)
        self.element = max(self.element, judgement.visible_element)
        self.mean = max(self.mean, judgement.visible_mean)
        self.gain = max(self.gain, judgement.visible_gain)

    def to_dict(self) -> dict[str, Any]:
        return {
            "sites": len(self.sites),
            "element_ulp": _finite(round(self.element, 2)),
            "mean_ulp": _finite(round(self.mean, 3)),
            "gain": _finite(float(f"{self.gain:.2g}")),
        }


class Ledger:
    """One audit."""

    def __init__(self, anatomy: Anatomy, *, rows: int, seed: int) -> None:
        self.anatomy = anatomy
        self.rows = Rows(rows, seed)
        self.residuals = Residuals()
        self.seams = Seams()
        self.alarms: dict[Site, Alarm] = {}
        self.power: dict[str, Power] = {}
        self.unseen: dict[str, set[Site]] = {}
        self.unsteady: set[Site] = set()
        self.remarks: list[str] = []
        self.checksums = 0
        self.looks = 0
        self.forwards = 0
        self._prints: dict[Site, tuple[bytes, bytes, tuple[int, ...]]] = {}  # of inputs, output and weights
        self._compared = 0  # calls that had the same inputs again
        self._keeping = False
        self._repeated = False
        self._batch = 0
        self._count = 0
        self._patterns = 0

    # -- forwards

    def begin(self, batch: int, *, keeping_prints: bool, repeated: bool) -> None:
        self._batch, self._keeping, self._repeated = batch, keeping_prints, repeated
        self._count = self._patterns = 0
        self.forwards += 1
        self.residuals.next_pass()
        self.seams.next_pass()

    def end(self) -> None:
        for block, target, form, recomputed in self.residuals.failures():
            self._judge(block.unit.site("residual"), recomputed, block.order, made=f"{target} = {' + '.join(form)}")
        for block, target, form, recomputed in self.seams.failures():
            site, order = self.seams.sites[block.unit.place, target]
            self._judge(site, recomputed, order, made=f"input of {target} = {words(form)}")
        for site, form in self.seams.nearly():
            self._left_open(
                site, f"its input is nearly {words(form)}, but bit for bit in no block: other code, or a fault"
            )
        for block, target, form, usual in self.seams.odd():
            site = self.seams.sites[block.unit.place, target][0]
            self._left_open(site, f"its input is {words(form)}, in other blocks {words(usual)}: other code, or a fault")
        for block, target, form, usual in self.residuals.odd():
            sums = f"{target} = {' + '.join(form)}, in other blocks {' + '.join(usual)}"
            self._left_open(block.unit.site("residual", tensor="input"), f"{sums}: other code, or a fault")
        for block in self.residuals.unknown():
            self._left_open(block.unit.site("residual"), "the block's output is no sum of what its modules gave")

    def _left_open(self, site: Site, reason: str) -> None:
        """What could not be judged, and why: with any of it, no verdict is "healthy"."""
        self.unseen.setdefault(reason, set()).add(site)

    # -- looks

    def call(self, site: Site, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        """One call of an operator."""
        self._count += 1
        if not self._fresh(site, (*args, *kwargs.values()), y, callee):
            return
        try:
            recomputed = recompute(site.operator, callee, args, kwargs, y, self.rows)
        except Unseen as reason:
            self._left_open(site, str(reason))
            return
        self.checksums += recomputed.checksums
        self._judge(site, recomputed, self._count)

    def block(self, unit: Unit, recorder: Recorder, x: Tensor, y: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
        """One call of a block: its adds, and what lay between its operators."""
        self.seams.end_block(unit, x, angles)
        if angles is not None and not _on_a_circle(*angles):
            site = Site("matmul", "rotary", "", tensor="input")
            self._left_open(site, "cosines and sines of the positions do not lie on one circle")
        self._count += 1
        site = unit.site("residual")
        found = recorder.block(unit, self._count, x, y)
        if self._fresh(site, tuple(found.terms.values()), y):
            self.residuals.see(found)
            power = self.power.setdefault("residual", Power())
            power.sites.add(site)
            power.element = 0.5

    def between(
        self,
        unit: Unit,
        role: str,
        operator: str,
        given: dict[str, Tensor],
        y: Tensor,
        *,
        heads: bool = False,
        occurrence: int = 0,
    ) -> None:
        """Inputs by name and output of an operator in a block, for what lies between operators."""
        for number, (name, x) in enumerate(given.items()):
            site = unit.site(operator, tensor="input", occurrence=occurrence + number)
            self.seams.got(f"{role}{name}", site, self._count, x, heads=heads)
        self.seams.gave(role, y, heads=heads)

    def _fresh(self, site: Site, given: tuple[Any, ...], y: Any, callee: Any = None) -> bool:
        """Whether a call is to be judged: in a repeated forward where its output has changed, or was wrong before."""
        if not (self._keeping or self._repeated) or not isinstance(y, Tensor):
            return not self._repeated
        prints = (_print(given), _print((y,)), _weights(callee))
        if self._keeping:
            self._prints[site] = prints
            return True
        before = self._prints.get(site)
        if before is None or before[0] != prints[0]:
            return False
        self._compared += 1
        if before[2] != prints[2]:
            weights = dataclasses.replace(site, tensor="weight")
            self._left_open(weights, "its weights changed between two forwards: a memory fault, or somebody's code")
        if before[1] != prints[1]:
            self.unsteady.add(site)
        return before[1] != prints[1] or site in self.alarms

    def _judge(self, site: Site, recomputed: Recomputed, order: int, *, made: str = "") -> None:
        judgement = judge(recomputed.y, recomputed.reference, probabilities=site.operator == "softmax")
        self.looks += judgement.looks
        if not recomputed.reference.exact or site.operator == "embedding":
            self.power.setdefault(site.operator, Power()).add(site, judgement)
        before = self.alarms.get(site)
        if not judgement.alarm and before is None:
            return
        evidence = Evidence.of("residual" if site.tensor == "input" else site.operator, recomputed, judgement)
        if before is not None:  # other data, or the same again: does one call hold what belongs to the other?
            before.stale |= is_stale(before.evidence, evidence) or is_stale(evidence, before.evidence)
        if not judgement.alarm or (before is not None and _at_least(before.judgement, judgement)):
            return
        pattern = Pattern("unknown", 0.0, "not looked into: too many alarms in one forward")
        if self._patterns < _MOST_PATTERNS:
            self._patterns += 1
            pattern = classify(evidence)
        if made:
            pattern.details["made_as"] = made
        stale = before is not None and before.stale
        self.alarms[site] = Alarm(site, self._batch, order, judgement, pattern, evidence.kept(), stale)

    # -- conclusions

    def suspects_inside_attention(self) -> frozenset[str]:
        """Attention modules of which an operator inside is under suspicion."""
        inside = (s for s in self.alarms if s.operator in _INSIDE and s.tensor == "output")
        return frozenset(site.module for site in inside if site.component == "attention")

    def hidden_in_attention(self, *, passing_only: bool) -> dict[int, frozenset[str]]:
        """By batch, fused attention that was wrong there while no operator inside it was caught yet.

        `passing_only`: only where it is not wrong in the same way each time.
        """
        inside = self.suspects_inside_attention()
        found: dict[int, frozenset[str]] = {}
        for site, alarm in self.alarms.items():
            fused = site.operator == _FUSED and site.tensor == "output" and site.module not in inside
            if fused and (site in self.unsteady or not passing_only):
                found[alarm.batch] = found.get(alarm.batch, frozenset()) | {site.module}
        return found

    def verdict(self) -> Verdict:
        if not self.power:
            raise NothingInjected("the model ran, but no operator of it was seen: see `noisescope inspect`")
        opened = self.suspects_inside_attention()
        fused = {site for site in self.alarms if site.operator == _FUSED and site.tensor == "output"}
        alarms = [a for a in self.alarms.values() if a.site not in fused or a.site.module not in opened]
        alarms.sort(key=lambda alarm: (place_order(alarm.site.place), alarm.order))
        suspects = ranked(self._suspect(alarm, rank) for rank, alarm in enumerate(alarms))
        notes = self._notes()
        unseen = tuple(site for sites in self.unseen.values() for site in sites if site.component != "router")
        verdict = "faulty" if suspects else "undecided" if unseen else "healthy"
        between = [site for (_, role), (site, _) in self.seams.sites.items() if role in self.seams.forms]
        if between:
            self.power["between operators"] = Power(set(between), element=0.5)
        visible = {operator: power.to_dict() for operator, power in self.power.items()}
        return Verdict(verdict, "audit", suspects, visible, float(self.forwards), self.looks, tuple(notes), unseen)

    def _suspect(self, alarm: Alarm, rank: int) -> Suspect:
        judgement, pattern = alarm.judgement, alarm.pattern
        name, confidence = pattern.fault_class, pattern.confidence
        if alarm.stale:
            name, confidence = "stale data", 0.95
        elif self._unsteady(alarm.site) and name != "spike":
            name, confidence = "noise", 0.9
        strong = judgement.strength > _STRONG
        certainty = 0.99 if strong else 0.9
        evidence = (
            f"{judgement.bad} of {judgement.elements} elements beyond tolerance, worst {judgement.worst_ulp:.3g} ulp, "
            f"mean {judgement.mean_ulp:+.3g} ulp along the sign; {pattern.text}"
        )
        if "made_as" in pattern.details:
            evidence += f"; should be {pattern.details['made_as']}"
        details = {
            "test": judgement.test,
            "strength": judgement.strength if math.isfinite(judgement.strength) else "exact",
            "worst_ulp": judgement.worst_ulp,
            "mean_ulp": judgement.mean_ulp,
            "rms": judgement.rms,
            "bad": judgement.bad,
            "elements": judgement.elements,
            "repeatable": not self._unsteady(alarm.site),
            "class_confidence": confidence,
            **pattern.details,
        }
        score = (2.0 if strong else 1.0) + 1 / (2 + rank)
        return Suspect(alarm.site, name, certainty, evidence, score, pattern.channels, pattern.period, details)

    def _unsteady(self, site: Site) -> bool:
        """The same input gave another output, at the operator itself or at the fused call that holds it."""
        fused = {s.module for s in self.unsteady if s.operator == _FUSED}
        return site in self.unsteady or (site.operator in _INSIDE and site.module in fused)

    def _notes(self) -> list[str]:
        notes = list(self.remarks)
        for reason, sites in self.unseen.items():
            first = min(sites, key=lambda site: place_order(site.place))
            more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
            notes.append(f"not looked at: {first}{more}: {reason}")
        if self._prints and not self._compared:
            notes.append("no operator had the same inputs twice: what does not repeat was not looked at")
        quiet = {site for site in self.unsteady if site not in self.alarms}
        if quiet:
            notes.append(f"{len(quiet)} operators differ from run to run, within the round-off floor")
        if self.checksums:
            notes.append(f"{self.checksums} rows of linears were looked at through checksums only: give more rows=")
        if self.seams.rows > MOST_ROWS:
            notes.append(f"between operators {MOST_ROWS} of {self.seams.rows} rows were looked at")
        loose = self.seams.unexplained()
        if loose:
            notes.append(
                f"left out between operators: what lies before {loose[0]} and {len(loose) - 1} more kinds of inputs, "
                "which are no plain copy, part, product or rotation of outputs in their block"
            )
        heard = {site.module for power in self.power.values() for site in power.sites} | {
            site.module for sites in self.unseen.values() for site in sites
        }
        silent = [u for u in self.anatomy.units if u.certain and u.module not in heard and not u.left_alone]
        if silent:
            notes.append(f"{silent[0].module} and {len(silent) - 1} more were not called in these forwards")
        if torch.get_float32_matmul_precision() != "highest":
            notes.append("float32 products may be shortened here (TF32): their floor is wider")
        return notes


def _finite(number: float) -> float | None:
    """None where nothing of the kind could be seen (the mean of one row), as JSON has no infinity."""
    return number if math.isfinite(number) else None


def _at_least(a: Judgement, b: Judgement) -> bool:
    """Whether alarm a says as much as alarm b."""
    return (a.strength, a.bad) >= (b.strength, b.bad)


def _on_a_circle(cos: Tensor, sin: Tensor) -> bool:
    """cos^2 + sin^2 is the same everywhere (1, or a model's own factor squared), each rounded once: within 4 u."""
    squares = cos.double().square() + sin.double().square()
    return float(squares.max() - squares.min()) <= 4 * number_format(cos.dtype).u * float(squares.max())


def _weights(callee: Any) -> tuple[int, ...]:
    """The bits of a module's own parameters, summed where they lie."""
    own = callee._parameters.values() if isinstance(callee, nn.Module) else ()
    plain = [p.detach() for p in own if type(p) is nn.Parameter and not p.is_meta]
    return tuple(int(p.contiguous().view(INTEGERS[p.itemsize]).sum(dtype=torch.int64)) for p in plain)


def _print(values: tuple[Any, ...]) -> bytes:
    """A fingerprint of the tensors among some values."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            plain = value.detach().to("cpu").contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()
