"""The findings of an audit so far: alarms with their patterns, detection limits, non-repeatable calls, coverage.

The log also tracks where NaN and infinity come from: the first output of a forward that contains any. All outputs
before it were finite. If that call's inputs were finite, the call itself produced them; otherwise the code before it
did (a sum, the product of gate and up, a cache), and its input is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from noisescope.localization.call_tree import CallHash, Judged, Node, hashed, weight_sums
from noisescope.localization.classify import classify, is_stale
from noisescope.localization.data_flow import (
    About,
    NonFiniteOrigin,
    about_difference,
    as_recomputed,
    is_masked,
    same_difference,
)
from noisescope.localization.driven_judgement import Driven
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_copies import tensors_in
from noisescope.localization.host_operators import Unseen, recompute
from noisescope.localization.host_products import Recomputed, Rows
from noisescope.localization.judge import Judgement, judge, judge_elements
from noisescope.localization.resolution import MOST, ResolutionTable, percent_of, too_coarse
from noisescope.localization.tensors import differing, on_host
from noisescope.localization.twin_comparison import OTHER_SHAPE, Comparison, Difference, OtherArguments
from noisescope.model.anatomy import Anatomy
from noisescope.sites import Site

_MOST_PATTERNS = 24  # alarms of one forward that are classified
_DOUBTFUL = 2.0  # times its limit, at most: a few elements that are just beyond it
_BETWEEN = "between operators"
_DIFFERENT = "it runs different code from its class, or it is faulty"
ALWAYS, IF_ALARMED, NEVER = "always", "if there was an alarm", "never"  # when a call is judged


class AuditLog:
    """One audit; audit_verdict.py draws the verdict from it."""

    def __init__(self, anatomy: Anatomy, *, rows: int, seed: int, device: str = "cpu") -> None:
        self.anatomy = anatomy
        self.rows = Rows(rows, seed, device)
        self.nonfinite = NonFiniteOrigin()
        self.alarms: dict[Site, Alarm] = {}
        self.made: dict[Site, dict[str, str]] = {}  # of each tensor of a call that is wrong, how it should be made
        self.limits: dict[str, DetectionLimit] = {}
        self.unseen: dict[str, set[Site]] = {}
        self.judged = Judged()
        self.resolution = ResolutionTable()
        self.unrepeatable: set[Site] = set()
        self.remarks: list[str] = []
        self.checksums = 0
        self.tests = 0
        self.forwards = 0
        self.hashes: dict[tuple[Site, int], CallHash] = {}
        self.compared = 0  # calls that had the same inputs again
        self._keep_hashes = False
        self._repeated = False
        self._batch = 0
        self._count = 0
        self._patterns: Counter[int] = Counter()  # by forward
        self._calls: dict[Site, int] = {}  # of each site, in this forward
        # What arrived where something else was expected, by their hashes.
        self._between: dict[tuple[Any, ...], tuple[int, ...]] = {}

    # -- forwards

    def begin(self, batch: int, *, keep_hashes: bool = False, repeated: bool = False) -> None:
        self._batch, self._keep_hashes, self._repeated = batch, keep_hashes, repeated
        self._count = 0
        self._calls.clear()
        self.forwards += 1
        self.nonfinite.next_pass()

    def leave_open(self, site: Site, reason: str) -> None:
        """Note something that could not be checked, and why. Any such entry rules out the verdict "healthy"."""
        self.unseen.setdefault(reason, set()).add(site)

    def forget(self, site: Site, before: Alarm | None) -> None:
        """Restore the earlier alarm of a site."""
        self.alarms.pop(site, None)
        if before is not None:
            self.alarms[site] = before

    # -- calls

    def call(self, node: Node) -> bool:
        """Check one operator call. False if no formula for it is known."""
        wanted = self.wanted(node)
        return wanted == NEVER or (wanted == IF_ALARMED and node.site("output") not in self.alarms) or self.again(node)

    def again(self, node: Node) -> bool:
        """Check one call unconditionally. False if no formula for it is known."""
        if isinstance(node.output, Tensor) and node.output.numel() == 0:  # an expert without tokens
            self.judged.add(node)
            return True
        try:
            found = recompute(
                node.operator, node.callee, node.args, node.kwargs, node.output, self.rows, autocast=node.autocast
            )
        except Unseen as reason:
            self.judged.unknown(node, str(reason))
            return False
        self.checksums += found.checksums
        self.judge_call(node, found)
        return True

    def judge_call(
        self, node: Node, recomputed: Recomputed, judgement: Judgement | None = None, calls: Sequence[Node] = ()
    ) -> None:
        """Judge one call, or several calls merged into one; pass `judgement` if it was judged before."""
        self._count = node.order
        self.nonfinite.explain(calls or (node,), recomputed)
        if not _any_finite(recomputed.y) and not _any_finite(recomputed.reference.values):
            reason = "its output is not finite, and the host's result from the same inputs is not finite either"
            self.leave_open(node.site("output"), reason)
            return
        judgement = self._judge(node.site("output"), recomputed, node.order, node=node, judgement=judgement)
        bound = judgement.visible_share
        judged = self.resolution.add(_class_name(node.callee), recomputed.y.dtype, bound)
        all_finite = is_masked(recomputed.reference.values)
        for each in calls or (node,):
            lost = 0.0 if all_finite else 1 - float(each.output.isfinite().double().mean())
            if judged:
                self.judged.add(each, not_finite=lost if lost > MOST else 0.0)
            else:
                self.judged.unknown(each, too_coarse(bound))

    def code(self, node: Node, found: Comparison) -> None:
        """Record the result of running a module's code on the host."""
        self.nonfinite.compared(node, found)
        dtype = next((x.dtype for _, x in tensors_in(node.output) if x.is_floating_point()), None)
        if found.problem:
            self.judged.unknown(node, found.problem)
        elif dtype is not None and not self.resolution.add(
            _class_name(node.callee), dtype, found.bound, equal=found.equal
        ):
            self.judged.unknown(node, too_coarse(found.bound))
        else:
            self.judged.add(node)
        self.limits.setdefault(_BETWEEN, DetectionLimit()).sites[node.site("output")] = (0.5, 0.0, 0.0)
        self.tests += found.compared
        for other in found.others:
            self.leave_open(other.node.site(other.tensor), f"{other.words}: {_DIFFERENT}")
        for call in found.other_arguments:
            if not self._with_arguments_of_its_class(call):
                for words in call.words:
                    self.leave_open(call.node.site("input"), f"{words}: {_DIFFERENT}")
        seen: list[Difference] = []
        # One tensor may enter several modules (q, k and v). Rotary embeddings only ask for its dtype.
        for difference in sorted(found.differences, key=lambda each: each.node.unit.place == "rotary"):
            if not any(same_difference(difference, other) for other in seen):
                seen.append(difference)
                self.difference(difference)

    def _with_arguments_of_its_class(self, call: OtherArguments) -> bool:
        """Judge the output of a function that different code may have called in a different way, by what it has to be.

        False if that is unknown.
        """
        node, words = call.node, ", ".join(dict.fromkeys(call.words))
        try:
            found = recompute(
                node.operator, node.callee, call.args, call.kwargs, node.output, self.rows, autocast=node.autocast
            )
        except Exception:  # no formula, or arguments that do not fit this output: then it stays open
            return False
        if found.y.shape != found.reference.values.shape:
            return False
        masked = any(word in words for word in ("mask", "causal"))
        hint = Pattern("mask", 0.9, f"attention is called with another mask: {words}") if masked else None
        made = f"output of {node.module} from what {call.caller} calls it with ({words})"
        site = node.site("input" if all(word.startswith(OTHER_SHAPE) for word in call.words) else "output")
        self._judge(site, found, node.order, node=node, about=About(made, hint, can_be_stale=False))
        return True

    def passed_through_hooks(self, root: Node, inputs: dict[str, Any], output: Any) -> None:
        """Check that the model received what the caller gave, and the caller what it returned, despite its hooks."""
        received, made = root.kwargs, dict(tensors_in(root.output))
        for name in [name for name, x in received.items() if isinstance(x, Tensor) and name not in inputs]:
            self.leave_open(root.site("input"), f"{name} comes from a hook on the model, and not from its caller")
        given = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        for name in [name for name in given if not isinstance(received.get(name), Tensor)]:
            self.leave_open(root.site("input"), f"{name} was given by the caller, and a hook on the model removed it")
        pairs = [
            ("input", name, received[name], on_host(x))
            for name, x in given.items()
            if isinstance(received.get(name), Tensor)
        ]
        pairs += [("output", path, on_host(x), made[path]) for path, x in tensors_in(output) if path in made]
        for tensor, path, got, expected in pairs:
            if tensor == "input":  # a hook may cast what is given, as mixed precision does
                expected = expected.to(got.dtype)
            if got.shape != expected.shape or bool(differing(got, expected).any()):
                self.difference(Difference(root, tensor, path, got, expected, None, root, None))
                return

    def difference(self, found: Difference, site: Site | None = None) -> None:
        """Record a tensor that is not what the code computes from operators' outputs; at its own site by default."""
        # What a module only passes on was changed between the call that gave it and whoever gets it.
        passed_on = found.tensor == "output" and found.source is not None
        node, own = found.node, found.node.site(found.tensor)
        site = site or (dataclasses.replace(own, tensor="input") if passed_on else own)
        order = node.order if found.tensor == "input" else node.ended
        if found.got.shape != found.expected.shape:
            shapes = f"{list(found.got.shape)} in place of {list(found.expected.shape)}"
            self.leave_open(site, f"its shape is {shapes}: {_DIFFERENT}")
            return
        given = (site, found.path, hashed([found.expected]), *found.expected.shape)  # all zeros have one hash
        if self._between.setdefault(given, now := hashed([found.got])) != now:
            self.unrepeatable.add(site)
        recomputed, about = as_recomputed(found), about_difference(found)
        if found.limit is None:
            self._judge(site, recomputed, order, node=node, about=about)
        else:
            judgement = judge_elements(recomputed.y, recomputed.reference)
            gain, most = found.gain
            judgement.strengths["signed"] = abs(gain) / most
            if not judgement.bad:
                way = "large" if gain > 0 else "small"
                judgement.said = f"all {judgement.elements} elements together are {percent_of(abs(gain))} too {way}; "
                judgement.said += f"rounding explains at most {percent_of(most)}"
            self._alarm(site, recomputed, judgement, order, node=node, about=about)

    def gradient(
        self, site: Site, found: Recomputed, judgement: Judgement, node: Node, about: About | None = None
    ) -> None:
        """Record a gradient of a backward pass, with its judgement."""
        self.tests += judgement.tests
        if not found.reference.exact:
            self.limits.setdefault(site.operator, DetectionLimit()).add(site, judgement)
        self._alarm(site, found, judgement, node.order, node=node, about=about)

    def wanted(self, node: Node) -> str:
        """Whether to check a call: in a repeated forward, only if the output changed or was wrong before."""
        y, site = node.output, node.site("output")
        number = self._calls[site] = self._calls.get(site, 0) + 1
        if not (self._keep_hashes or self._repeated) or not isinstance(y, Tensor):
            return NEVER if self._repeated else ALWAYS
        now = CallHash.of(node)
        if self._keep_hashes:
            self.hashes[site, number] = now
            return ALWAYS
        before = self.hashes.get((site, number))
        if before is None or before.given != now.given:
            return NEVER
        self.compared += 1
        if before.weights != now.weights:
            self._weights_changed(site)
        if before.output != now.output:
            self.unrepeatable.add(site)
        return IF_ALARMED if before.output == now.output else ALWAYS

    def kept_its_weights(self, node: Node) -> bool:
        """Whether a module's weights are unchanged since the first forward, because later checks rely on that."""
        site = node.site("output")
        before = self.hashes.get((site, 1))
        if before is None or before.weights == weight_sums(node.callee):
            return True
        self._weights_changed(site)
        return False

    def _weights_changed(self, site: Site) -> None:
        weights = dataclasses.replace(site, tensor="weight")
        self.leave_open(weights, "its weights changed between two forwards: a memory fault, or code that modifies them")

    def settled(self) -> frozenset[Site]:
        """Sites whose alarms are conclusive; for the others, driving the operator may add evidence."""
        return frozenset(site for site, alarm in self.alarms.items() if alarm.judgement.strength > _DOUBTFUL)

    def explained(self, site: Site) -> None:
        """Whether a wrong function called inside a module already explains later errors in that module."""
        for other in [each for each in self.alarms if each.tensor == "input"]:
            if other.module.startswith(f"{site.module}."):
                del self.alarms[other]

    def driven(self, site: Site, callee: Any, found: Driven, order: int) -> None:
        """Record an operator that was called again with synthetic inputs (driven_operators.py)."""
        self.tests += found.judgement.tests
        self.resolution.add_driven(_class_name(callee), found.recomputed.y.dtype, found.resolution)
        if found.judgement.alarm and site not in self.settled():
            evidence = Evidence.of(site.operator, found.recomputed, found.judgement)
            self.alarms[site] = Alarm(site, self._batch, order, found.judgement, found.pattern, evidence.kept())

    def _judge(
        self,
        site: Site,
        recomputed: Recomputed,
        order: int,
        *,
        node: Node | None = None,
        about: About | None = None,
        judgement: Judgement | None = None,
    ) -> Judgement:
        if judgement is None:
            judgement = judge(recomputed.y, recomputed.reference, probabilities=site.operator == "softmax")
        self.tests += judgement.tests
        if not recomputed.reference.exact or site.operator == "embedding":
            self.limits.setdefault(site.operator, DetectionLimit()).add(site, judgement)
        self._alarm(site, recomputed, judgement, order, node=node, about=about)
        return judgement

    def _alarm(
        self,
        site: Site,
        recomputed: Recomputed,
        judgement: Judgement,
        order: int,
        *,
        node: Node | None = None,
        about: About | None = None,
    ) -> None:
        before = self.alarms.get(site)
        if not judgement.alarm and before is None:
            return
        evidence = Evidence.of(site.operator, recomputed, judgement, None if node is None else node.shape)
        if (
            site.tensor == "input" and site.phase == "forward"
        ):  # the operator tells heads from tokens, but has no part in what is wrong
            evidence = dataclasses.replace(evidence, operator="residual")
        alone = about is not None and not about.can_be_stale
        if before is not None and before.evidence is not None and not alone:  # does one hold what belongs to the other?
            before.stale |= is_stale(before.evidence, evidence) or is_stale(evidence, before.evidence)
        if judgement.alarm and about is not None:
            self.made.setdefault(site, {}).setdefault(about.made, judgement.words)
        if not judgement.alarm or (before is not None and before.judgement.rank >= judgement.rank):
            return
        pattern = Pattern("unknown", 0.0, "not examined: too many alarms in one forward")
        forward = self.forwards if node is None else node.number
        if self._patterns[forward] < _MOST_PATTERNS:
            self._patterns[forward] += 1
            pattern = classify(evidence)
        if about is not None:
            pattern = about.refine(pattern)
        stale = before is not None and before.stale
        alarm = Alarm(site, self._batch, order, judgement, pattern, None if alone else evidence.kept(), stale)
        self.alarms[site] = dataclasses.replace(alarm, phase="" if node is None else node.phase)


@dataclass
class Alarm:
    """The strongest alarm at one site."""

    site: Site
    batch: int
    order: int
    judgement: Judgement
    pattern: Pattern
    evidence: Evidence | None = None  # what belongs there: another call may hold it
    stale: bool = False
    phase: str = ""  # in which it was strongest


@dataclass
class DetectionLimit:
    """The smallest errors that the tests of one kind of operator could have detected.

    Of several calls at a site the most sensitive counts; of several sites the least sensitive.
    """

    sites: dict[Site, Any] = field(default_factory=dict)  # element and mean in ulp, gain

    def add(self, site: Site, judgement: Judgement) -> None:
        now = (judgement.visible_element, judgement.visible_mean, judgement.visible_gain)
        before = self.sites.get(site, now)
        self.sites[site] = (min(before[0], now[0]), min(before[1], now[1]), min(before[2], now[2]))

    def without(self, sites: Collection[Site]) -> DetectionLimit:
        """Of the other sites: what a faulty one computes says nothing about what would have shown there."""
        return dataclasses.replace(self, sites={at: found for at, found in self.sites.items() if at not in sites})

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary, with None for what was undetectable (the mean of one row), because JSON has no infinity."""
        element, mean, gain = (max(found) for found in zip(*self.sites.values(), strict=True))
        rounded = {"element_ulp": round(element, 2), "mean_ulp": round(mean, 3), "gain": float(f"{gain:.2g}")}
        return {"sites": len(self.sites)} | {name: v if math.isfinite(v) else None for name, v in rounded.items()}


def _class_name(callee: Any) -> str:
    return type(callee).__name__ if isinstance(callee, nn.Module) else str(getattr(callee, "__name__", callee))


def _any_finite(x: Tensor) -> bool:
    return bool(x[:1].isfinite().any()) or bool(x.isfinite().any())
