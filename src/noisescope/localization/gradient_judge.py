"""Checks the gradients of one group of modules: those that calls return, those of parameters, and their sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.audit_log import AuditLog
from noisescope.localization.call_tree import Node
from noisescope.localization.coverage import Share
from noisescope.localization.data_flow import About
from noisescope.localization.gradient_calls import INPUT, OUTPUT, GradientCalls, ParameterGradients
from noisescope.localization.gradient_formulas import (
    LinearCall,
    Rounding,
    WeightUse,
    attention_gradients,
    embedding_use,
    parameter_gradient,
    product_gradients,
    wrong_use,
)
from noisescope.localization.gradient_rounding import (
    Expected,
    RoundingMode,
    as_rows,
    expected_gradients,
    judge_gradient,
)
from noisescope.localization.gradient_twin import WEIGHT, CodeGradients, GradientTwin, Leaf, NotDifferentiated
from noisescope.localization.host_copies import is_state, leaves_in, mapped, tensors_in
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import judge
from noisescope.localization.roundoff_floors import Reference
from noisescope.localization.tensors import differing, on_host
from noisescope.sites import FUSED, Site

ACCUMULATED = "accumulated weight"
LOSS = Site("loss", "lm_head", "cross entropy", phase="backward")


class GradientJudge:
    """The micro-batches of one pass."""

    def __init__(
        self,
        model: nn.Module,
        log: AuditLog,
        twin: GradientTwin,
        judged: frozenset[str],
        owners: Mapping[int, set[str]],
    ) -> None:
        self._modules = dict(model.named_modules())
        self._log, self._twin, self._judged, self._owners = log, twin, judged, owners
        self._before: dict[int, Tensor] = {}  # `.grad` after the micro-batch before
        self._uses: dict[int, list[tuple[Node, WeightUse]]] = {}
        self._unknown: dict[int, str] = {}  # parameters with a use that can't be recomputed
        self._nodes: dict[str, Node] = {}  # a call of each module, for its site
        self.parameters: dict[int, Share] = {}  # elements that were judged, of those that had gradients

    def micro_batch(self, calls: GradientCalls, sent: ParameterGradients, parameters: Sequence[nn.Parameter]) -> None:
        self._uses.clear()
        nodes = [node for node in calls.tree.nodes if node.module in self._judged]
        for node in nodes:
            node.by_formula = self._by_formula(node, calls)
            if node.is_module:
                self._nodes.setdefault(node.module, node)
        for node in nodes:  # a function's recorded results are answered all or none
            unknown = {child.callee for child in node.children if not child.is_module and not child.by_formula}
            for child in node.children:
                child.by_formula &= child.is_module or child.callee not in unknown
        for node in nodes:
            if not node.by_formula and node.is_module:
                self._by_code(node, calls)
        for p in parameters:
            self._parameter(p, sent)

    def loss(self, calls: GradientCalls, loss_of: Callable[[Any], Tensor | None]) -> None:
        """Check the gradients of the model's outputs, which come from the loss."""
        root = calls.tree.root
        tapped = calls.tapped(root, OUTPUT)

        def back(rounding: RoundingMode | None = None) -> dict[str, Tensor | None]:
            leaves = {path: (x if rounding else x.double()).clone().requires_grad_() for path, x in tapped.items()}
            paths = iter([path for path, _ in tensors_in(root.output)])
            output = mapped(root.output, lambda x: leaves.get(next(paths), x))
            with torch.enable_grad(), rounding or nullcontext():
                loss = loss_of(output)
                assert loss is not None
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            return {
                path: torch.zeros_like(leaf) if g is None else g
                for (path, leaf), g in zip(leaves.items(), found, strict=True)
            }

        dtypes = {path: x.dtype for path, x in tapped.items()}
        expected = expected_gradients(back(), dtypes, lambda generator: back(RoundingMode(generator)))
        for path, each in expected.items():
            found = as_rows(calls.arrived(root, OUTPUT, path), each, tokens=True)
            self._log.gradient(LOSS, found, judge_gradient(found, each.gain), root)

    # -- operators

    def _by_formula(self, node: Node, calls: GradientCalls) -> bool:
        """Check an operator whose gradients have a formula. False if its code has to be differentiated instead."""
        linear = LinearCall.of(node, calls)
        if linear is not None:
            got = calls.sole_gradient(node, INPUT)
            if got is not None:
                self._judge(node, INPUT, linear.input_gradient(got, self._log.rows), product=True)
            self._use(node, id(linear.weight), linear.weight_use())
            if linear.bias is not None:
                self._use(node, id(linear.bias), linear.bias_use())
            self._log.judged.add(node)
            return True
        use = embedding_use(node, calls) if node.operator == "embedding" else None
        if use is not None:
            self._use(node, id(node.callee.weight), use)
            self._log.judged.add(node)
            return True
        return not node.is_module and self._function(node, calls)

    def _function(self, node: Node, calls: GradientCalls) -> bool:
        if not calls.tapped(node, OUTPUT):
            return False
        products = product_gradients(node, calls, self._log.rows)
        for path, found in (products or {}).items():
            self._judge(node, INPUT, found, product=True, words=_argument(path))
        if products is not None:
            self._log.judged.add(node)
            return True
        expected: Mapping[str, Expected] | None = None
        if node.operator == FUSED:
            expected = attention_gradients(node, calls)
        elif node.operator == "softmax":
            try:
                of_code = self._twin.gradients(node, calls).expected
                expected = {path: each for (_, _, path), each in of_code.items()}
            except NotDifferentiated:
                expected = None
        for path, each in (expected or {}).items():
            self._compare(node, INPUT, each, calls.arrived(node, INPUT, path), words=_argument(path))
        if expected is not None:
            self._log.judged.add(node)
        return expected is not None

    # -- other code

    def _by_code(self, node: Node, calls: GradientCalls) -> None:
        if not calls.tapped(node, OUTPUT):  # nothing to differentiate: rotary angles, masks
            return
        try:
            found = self._twin.gradients(node, calls)
        except NotDifferentiated as reason:
            self._log.judged.unknown(node, str(reason))
            for p in node.callee.parameters(recurse=False):
                self._unknown[id(p)] = str(reason)
            return
        self._log.judged.add(node)
        wrong: dict[Leaf, Tensor] = {}
        for leaf, expected in found.expected.items():
            side, at, path = leaf
            if side == WEIGHT:
                self._use(node, at, _code_use(expected))
                continue
            receiver = node if at < 0 else node.children[at]
            got = calls.arrived(receiver, side, path)
            if not found.reached[leaf] and bool(got.any()) and _passes_state(node):
                self._log.judged.unknown(receiver, "its gradient passes through a cache")
                continue
            judgement = judge_gradient(as_rows(got, expected, tokens=True), expected.gain)
            if judgement.alarm:
                wrong[leaf] = got
            else:
                self._compare(receiver, side, expected, got)
        for leaf in wrong:
            self._sent_wrongly(node, found, leaf, wrong)

    def _sent_wrongly(self, node: Node, found: CodeGradients, leaf: Leaf, wrong: Mapping[Leaf, Tensor]) -> None:
        """A gradient that differs from what the code computes from the incoming ones, reported at the faulty end."""
        side, at, _ = leaf
        receiver = node if at < 0 else node.children[at]
        senders = [node.children[one].module for one in sorted(found.reached[leaf]) if one >= 0]
        words = f"what {type(node.callee).__name__} computes from the incoming gradients"
        words += f" from {', '.join(senders)}" if senders else ""
        sender = None if at >= 0 and _hooked(receiver) else _sender(node, found, leaf, wrong)
        if found.replaced:
            words += f", at the {side} of {receiver.module or 'the model'}"
            words += f"; on the device, another function computes its {found.replaced}"
            receiver, side = dataclasses.replace(node, operator=found.replaced), INPUT
        elif sender is not None:
            words += f", at the {side} of {receiver.module or 'the model'}"
            receiver, side = (node, OUTPUT) if sender < 0 else (node.children[sender], INPUT)
        self._compare(receiver, side, found.expected[leaf], wrong[leaf], words=words)

    # -- parameters

    def _use(self, node: Node, key: int, use: WeightUse) -> None:
        self._uses.setdefault(key, []).append((node, use))

    def _parameter(self, p: nn.Parameter, sent: ParameterGradients) -> None:
        names = sorted(self._owners[id(p)])
        node = next((self._nodes[name] for name in names if name in self._nodes), None)
        uses, got = self._uses.get(id(p), []), sent.sent(p)
        if node is None or (not uses and got is None):
            return
        own = next((name for name, q in self._modules[node.module]._parameters.items() if q is p), "weight")
        if id(p) in self._unknown or not uses:
            reason = self._unknown.get(id(p), "it is not used anywhere noisescope can see")
            self._log.judged.unknown(node, f"gradient of {own}: {reason}")
            self.parameters[id(p)] = Share(0, p.numel())
            return
        self.parameters.setdefault(id(p), Share(p.numel(), p.numel()))
        got = torch.zeros_like(p, device="cpu") if got is None else got
        shared = f", the sum of its uses in {', '.join(names)}" if len(names) > 1 else ""
        found = parameter_gradient(got.detach(), [use for _, use in uses], self._log.rows)
        words = f"the host's gradient of {own}{shared}"
        if shared and judge_gradient(found, 0.0).alarm:
            node = uses[wrong_use(got.detach(), [use for _, use in uses], self._log.rows)][0]
        self._judge(node, WEIGHT, found, product=found.reference.sums, words=words)
        self._accumulated(p, got, node, own)

    def _accumulated(self, p: nn.Parameter, got: Tensor, node: Node, own: str) -> None:
        """Check that `.grad` equals its previous value plus this micro-batch's gradient, rounded once, bit for bit."""
        held = torch.zeros_like(got) if p.grad is None else on_host(p.grad.detach()).clone()
        before = self._before.get(id(p))
        expected = got if before is None else before + got
        self._before[id(p)] = held
        self._log.tests += held.numel()
        if held.shape == expected.shape and not bool(differing(held, expected).any()):
            return
        width = held.shape[-1] if held.dim() else 1
        exact = Reference(expected.reshape(-1, width).double(), (), exact=True)
        found = Recomputed(held.reshape(-1, width), exact)
        words = f"the sum of the gradients of {own} from all micro-batches, in {p.dtype}"
        self._log.gradient(_site(node, ACCUMULATED), found, judge(found.y, exact), node, About(words))

    # -- judging

    def _compare(self, node: Node, tensor: str, expected: Expected, got: Tensor, *, words: str = "") -> None:
        self._judge(node, tensor, as_rows(got, expected, tokens=True), gain=expected.gain, words=words)

    def _judge(
        self, node: Node, tensor: str, found: Recomputed, *, product: bool = False, gain: float = 0.0, words: str = ""
    ) -> None:
        judgement = judge(found.y, found.reference) if product else judge_gradient(found, gain)
        self._log.gradient(_site(node, tensor), found, judgement, node, About(words) if words else None)


def _site(node: Node, tensor: str) -> Site:
    return dataclasses.replace(node.site(tensor), phase="backward")


def _argument(path: str) -> str:
    """Which argument of a function, in words."""
    name = path.rpartition(".")[2]
    return f"the host's gradient of argument {name}"


def _code_use(expected: Expected) -> WeightUse:
    def at(rows: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
        return expected.values[rows], expected.limit[rows]

    return WeightUse(at)


def _sender(node: Node, found: CodeGradients, leaf: Leaf, wrong: Mapping[Leaf, Tensor]) -> int | None:
    """The call (-1: the module's own output) whose gradient was changed on the way, if that explains more than this.

    All that follows from its gradient is wrong, and that is most; or it has backward hooks.
    """
    explains: dict[int, float] = {}
    for at in found.reached[leaf]:
        follows = {one for one, ends in found.reached.items() if at in ends and one[0] != WEIGHT}
        if at >= 0 and _hooked(node.children[at]):
            explains[at] = math.inf
        elif len(follows) > 1 and follows <= wrong.keys():
            explains[at] = len(follows)
    return max(explains, key=lambda at: explains[at], default=None)


def _passes_state(node: Node) -> bool:
    """Whether its code keeps tensors in an object that it hands to other modules, where no gradient is recorded."""
    return any(is_state(leaf) for child in node.children for _, leaf in leaves_in((child.args, child.kwargs)))


def _hooked(node: Node) -> bool:
    return node.is_module and bool(node.callee._backward_hooks or node.callee._backward_pre_hooks)
