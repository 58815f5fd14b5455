"""What an audit has found so far: alarms with their pattern, detection limits, what does not repeat, what was not seen.

Also where NaN and infinity come from: the first output of a forward that holds any. All outputs before it were finite.
So an operator that was given finite numbers made them itself; where it was not, what lies before it did (a sum, the
product of gate and up, a cache), and its input is named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.block_wiring import Recorder, Residuals
from noisescope.localization.classify import classify, is_stale
from noisescope.localization.data_flow_checks import DataFlowChecks, words
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_operators import Unseen, recompute
from noisescope.localization.host_products import Recomputed, Rows
from noisescope.localization.judge import Judgement, judge
from noisescope.localization.roundoff_floors import WORK_ROUNDOFF, number_format
from noisescope.localization.tensors import bits_of, on_host
from noisescope.model.anatomy import Anatomy, Unit
from noisescope.probe.unfused_attention import AttentionArguments
from noisescope.sites import FUSED, Site

_MOST_PATTERNS = 24  # alarms of one forward that are classified


class AuditLog:
    """One audit; audit_verdict.py draws the verdict from it."""

    def __init__(self, anatomy: Anatomy, *, rows: int, seed: int) -> None:
        self.anatomy = anatomy
        self.rows = Rows(rows, seed)
        self.residuals = Residuals()
        self.data_flow = DataFlowChecks()
        self.nonfinite = NonFiniteOrigin()
        self.alarms: dict[Site, Alarm] = {}
        self.limits: dict[str, DetectionLimit] = {}
        self.unseen: dict[str, set[Site]] = {}
        self.unrepeatable: set[Site] = set()
        self.remarks: list[str] = []
        self.checksums = 0
        self.tests = 0
        self.forwards = 0
        self.hashes: dict[Site, CallHash] = {}
        self.compared = 0  # calls that had the same inputs again
        self._keep_hashes = False
        self._repeated = False
        self._batch = 0
        self._shape: tuple[int, int] | None = None  # sequences and tokens of this forward, as its first output has them
        self._count = 0
        self._patterns = 0

    # -- forwards

    def begin(self, batch: int, *, keep_hashes: bool = False, repeated: bool = False) -> None:
        self._batch, self._keep_hashes, self._repeated = batch, keep_hashes, repeated
        self._count = self._patterns = 0
        self._shape = None
        self.forwards += 1
        self.residuals.next_pass()
        self.data_flow.next_pass()
        self.nonfinite.next_pass()

    def end(self) -> None:
        for block, target, form, recomputed in self.residuals.failures():
            self._judge(block.unit.site("residual"), recomputed, block.order, made=f"{target} = {' + '.join(form)}")
        for block, target, form, recomputed in self.data_flow.failures():
            site, order = self.data_flow.sites[block.unit.place, target]
            self._judge(site, recomputed, order, made=f"input of {target} = {words(form)}")
        for site, form in self.data_flow.nearly():
            self._leave_open(
                site, f"its input is nearly {words(form)}, but bit for bit in no block: other code, or a fault"
            )
        for block, target, form, usual in self.data_flow.odd():
            site = self.data_flow.sites[block.unit.place, target][0]
            self._leave_open(
                site, f"its input is {words(form)}, in other blocks {words(usual)}: other code, or a fault"
            )
        for block, target, form, usual in self.residuals.odd():
            sums = f"{target} = {' + '.join(form)}, in other blocks {' + '.join(usual)}"
            self._leave_open(block.unit.site("residual", tensor="input"), f"{sums}: other code, or a fault")
        for block in self.residuals.unknown():
            self._leave_open(block.unit.site("residual"), "the block's output is no sum of what its modules gave")

    def _leave_open(self, site: Site, reason: str) -> None:
        """What could not be judged, and why: with any of it, no verdict is "healthy"."""
        self.unseen.setdefault(reason, set()).add(site)

    # -- calls

    def call(self, site: Site, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        """One call of an operator."""
        self._count += 1
        if self._shape is None and isinstance(y, Tensor) and y.dim() == 3:
            self._shape = (y.shape[0], y.shape[1])
        arose = self.nonfinite.arises(site, _inputs(site, args, kwargs), y)
        if not self._to_be_judged(site, (*args, *kwargs.values()), y, callee):
            return
        try:
            recomputed = recompute(site.operator, callee, args, kwargs, y, self.rows)
        except Unseen as reason:
            self._leave_open(site, str(reason))
            return
        self.checksums += recomputed.checksums
        if arose:
            self.nonfinite.explain(recomputed)
        if not (recomputed.y.isfinite() | recomputed.reference.values.isfinite()).any():
            self._leave_open(site, "it gave no finite number, and neither does the host from the same inputs")
            return
        self._judge(site, recomputed, self._count)

    def block(self, unit: Unit, recorder: Recorder, x: Tensor, y: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
        """One call of a block: its adds, and what lay between its operators."""
        self.data_flow.end_block(unit, x, angles)
        if angles is not None and not _on_a_circle(*angles):
            site = Site("matmul", "rotary", "", tensor="input")
            self._leave_open(site, "cosines and sines of the positions do not lie on one circle")
        self._count += 1
        site = unit.site("residual")
        found = recorder.block(unit, self._count, x, y)
        if self.nonfinite.arises(site, (x,), y):
            self.nonfinite.explain_sum(found.terms.values())
        if self._to_be_judged(site, tuple(found.terms.values()), y):
            self.residuals.see(found)
            limit = self.limits.setdefault("residual", DetectionLimit())
            limit.sites.add(site)
            limit.element = 0.5

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
            self.data_flow.got(f"{role}{name}", site, self._count, x, heads=heads)
        self.data_flow.gave(role, y, heads=heads)

    def _to_be_judged(self, site: Site, given: tuple[Any, ...], y: Any, callee: Any = None) -> bool:
        """In a repeated forward only where the output has changed, or was wrong before."""
        if not (self._keep_hashes or self._repeated) or not isinstance(y, Tensor):
            return not self._repeated
        now = CallHash.of(given, y, callee)
        if self._keep_hashes:
            self.hashes[site] = now
            return True
        before = self.hashes.get(site)
        if before is None or before.given != now.given:
            return False
        self.compared += 1
        if before.weights != now.weights:
            weights = dataclasses.replace(site, tensor="weight")
            self._leave_open(weights, "its weights changed between two forwards: a memory fault, or somebody's code")
        if before.output != now.output:
            self.unrepeatable.add(site)
        return before.output != now.output or site in self.alarms

    def _judge(
        self, site: Site, recomputed: Recomputed, order: int, *, made: str = "", hint: Pattern | None = None
    ) -> None:
        """One output. `hint` is what the data flow says of its class: it counts where the numbers say less."""
        judgement = judge(recomputed.y, recomputed.reference, probabilities=site.operator == "softmax")
        self.tests += judgement.tests
        if not recomputed.reference.exact or site.operator == "embedding":
            self.limits.setdefault(site.operator, DetectionLimit()).add(site, judgement)
        before = self.alarms.get(site)
        if not judgement.alarm and before is None:
            return
        operator = "residual" if site.tensor == "input" else site.operator
        evidence = Evidence.of(operator, recomputed, judgement, self._shape)
        if before is not None:  # other data, or the same again: does one call hold what belongs to the other?
            before.stale |= is_stale(before.evidence, evidence) or is_stale(evidence, before.evidence)
        if not judgement.alarm or (before is not None and before.judgement.rank >= judgement.rank):
            return
        pattern = Pattern("unknown", 0.0, "not looked into: too many alarms in one forward")
        if self._patterns < _MOST_PATTERNS:
            self._patterns += 1
            pattern = classify(evidence)
        if hint is not None and hint.confidence > pattern.confidence:
            found, text = (hint.fault_class, hint.confidence), f"{hint.text}; {pattern.text}"
            pattern.fault_class, pattern.confidence, pattern.text = *found, text
        if made:
            pattern.details["made_as"] = made
        stale = before is not None and before.stale
        self.alarms[site] = Alarm(site, self._batch, order, judgement, pattern, evidence.kept(), stale)


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
class DetectionLimit:
    """The smallest errors that the tests of one kind of operator could have shown; the worst site counts."""

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
        """None where nothing of the kind could be seen (the mean of one row), as JSON has no infinity."""
        rounded = {
            "element_ulp": round(self.element, 2),
            "mean_ulp": round(self.mean, 3),
            "gain": float(f"{self.gain:.2g}"),
        }
        return {"sites": len(self.sites)} | {name: v if math.isfinite(v) else None for name, v in rounded.items()}


@dataclass(frozen=True)
class CallHash:
    """A call by the hashes of its bits: the same inputs again must give the same output."""

    given: bytes
    output: bytes
    weights: tuple[int, ...]

    @classmethod
    def of(cls, given: tuple[Any, ...], y: Tensor, callee: Any) -> CallHash:
        return cls(_hash(given), _hash((y,)), _weight_sums(callee))


def _weight_sums(callee: Any) -> tuple[int, ...]:
    """The bits of a module's own parameters, summed where they lie."""
    own = callee._parameters.values() if isinstance(callee, nn.Module) else ()
    plain = [p.detach() for p in own if type(p) is nn.Parameter and not p.is_meta]
    return tuple(int(bits_of(p).sum(dtype=torch.int64)) for p in plain)


def _hash(values: tuple[Any, ...]) -> bytes:
    """Of the tensors among some values."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            plain = on_host(value).contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()


def _inputs(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What an operator is given to compute with: no masks, which may hold -inf."""
    if site.operator == FUSED:
        given = AttentionArguments.of(args, kwargs)
        return [given.query, given.key, given.value]
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _on_a_circle(cos: Tensor, sin: Tensor) -> bool:
    """cos^2 + sin^2 is the same everywhere: 1, or a model's own factor squared.

    A relative error e in both moves it by 2 e: u of the last rounding, and in float32 an ulp (2 u) of the function that
    a factor may round once more. The largest and the smallest may each be off by that.
    """
    squares = cos.double().square() + sin.double().square()
    limit = 4 * number_format(cos.dtype).u + 8 * WORK_ROUNDOFF
    return float(squares.max() - squares.min()) <= limit * float(squares.max())


# -- NaN and infinity


@dataclass(frozen=True)
class Origin:
    """The first place where NaN or infinity is seen."""

    site: Site
    dtype: str
    largest: float  # number of that dtype
    operand: int = 0  # which one, of an operator's inputs
    why: str = ""  # what the host found; empty where only the way its block is made can tell
    fault: bool = False  # nothing that was given could have led there

    @property
    def overflow(self) -> str:
        return f"an overflow of {self.dtype}, whose largest number is {self.largest:.5g}, and no fault"


class NonFiniteOrigin:
    """Watches the outputs of one audit's forwards."""

    def __init__(self) -> None:
        self.origin: Origin | None = None
        self._seen = False  # in this forward

    def next_pass(self) -> None:
        self._seen = False

    def arises(self, site: Site, given: Iterable[Tensor], y: object) -> bool:
        """Whether a call's output is where they arise: then it is to be explained."""
        if self._seen or not isinstance(y, Tensor) or _all_finite(y):
            return False
        self._seen = True
        if self.origin is not None:
            return False
        before = next((at for at, x in enumerate(given) if not _all_finite(x)), None)
        made_here = before is None
        site = site if made_here else dataclasses.replace(site, tensor="input")
        dtype, largest = str(y.dtype).removeprefix("torch."), number_format(y.dtype).largest
        self.origin = Origin(site, dtype, largest, before or 0)
        return made_here

    def explain(self, recomputed: Recomputed) -> None:
        """By what the host computes from the same inputs. Where that fits the dtype, it is the judge's alarm."""
        assert self.origin is not None
        values = recomputed.reference.values[~recomputed.y.isfinite()]
        if not len(values):
            why = "not in the rows that the host computed again: give more rows="
        elif bool(values.isfinite().all()):
            why = f"the host's own result reaches {float(values.abs().max()):.4g}: {self.origin.overflow}"
        else:
            why = "nor is the host's result finite: its weights are not, or it has none"
        self.origin = dataclasses.replace(self.origin, why=why)

    def explain_sum(self, terms: Iterable[Tensor]) -> None:
        """A sum of some of these, which are finite: can any be too large for the dtype?"""
        assert self.origin is not None
        sizes = [term.double().abs() for term in terms]
        most = float(torch.stack(sizes).sum(0).max()) if sizes else torch.inf
        if most < self.origin.largest:
            why = f"no sum of what its modules gave exceeds {most:.4g}"
            self.origin = dataclasses.replace(self.origin, why=why, fault=True)


def _all_finite(x: Tensor) -> bool:
    """Of plain tensors; packed ones and those of eight bits can't be asked."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.dtype.itemsize > 1
    return not plain or bool(torch.isfinite(x).all())
