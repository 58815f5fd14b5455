"""Decides which laws are tested where: one handler for each kind of observed call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.formula_recognition import linear_formula
from noisescope.localization.host_operators import NOT_LINEAR, Unseen, given_one_tensor, host_arithmetic, recompute
from noisescope.localization.host_products import Rows, as_multiplied
from noisescope.localization.judge import judge
from noisescope.localization.laws import attention, functions, linear, linear_checksums, norms, sublayers
from noisescope.localization.laws.call_results import EvidenceFacts, LawEvidence
from noisescope.localization.laws.calls_with_other_inputs import (
    ATTENTION_MODULE,
    MLP,
    ROTARY,
    Handler,
    ModuleState,
    on_the_host,
    unbiased,
)
from noisescope.localization.laws.law_log import OPERATOR, SUBLAYER, LawLog
from noisescope.localization.laws.table import Law
from noisescope.localization.tensors import differing, host_rows, same_numbers
from noisescope.model.anatomy import ATTENTION, CALLS, EXPERTS, ROUTER, Anatomy, Unit
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import FUSED, Place, Site

_ROWS = 256  # of a suspect's output that are recomputed to name its fault
_HUGE = 1e15  # inputs beyond this come from a fault upstream: their squares overflow
_TOO_LARGE = "inputs that are not finite, or too large to check"

Laws = Callable[[RecordedCall], LawEvidence | None]


class LawDispatcher:
    """Passes each call to its laws, and their results to the log."""

    def __init__(
        self,
        anatomy: Anatomy,
        log: LawLog,
        *,
        causal: bool,
        weights: bool,
        places: frozenset[Place] | None,
    ) -> None:
        self.anatomy, self.log = anatomy, log
        self.causal, self.weights, self.places = causal, weights, places
        self.mixture = any(unit.kind in (EXPERTS, ROUTER) or unit.component == "router" for unit in anatomy.units)
        self.quantised = False  # a linear was met that may round its input by what else is in the batch
        self.nonlinear: set[str] = set()  # modules called linear that need not be
        self.rotary = sublayers.Rotary()
        self.blocks: dict[int, Tensor] = {}  # what each block gave
        self._given: dict[int, Tensor] = {}  # what it was given
        self._second: dict[int, tuple[Tensor, Tensor]] = {}  # the same in the second forward
        self._parts: dict[str, Tensor] = {}  # what the linears of the MLP that runs now gave, by name

    def wanted(self, place: Place) -> bool:
        return self.places is None or place in self.places

    def at_modules(self, unit: Unit, operator: str) -> Handler | None:
        if operator == "residual":
            return self._block
        if not self.wanted(unit.place):
            return None
        laws: dict[str, Laws] = {
            "linear": self._linear,
            "norm": self._norm,
            "silu": self._activation,
            "gelu": self._activation,
            "embedding": self._embedding,
            ATTENTION_MODULE: self._attention_module,
            MLP: self._mlp,
            ROTARY: self._rotary,
        }
        return self.guarded(laws[operator]) if operator in laws else None

    def at_functions(self, unit: Unit, operator: str) -> Handler | None:
        if not self.wanted(unit.place):
            return None
        if operator == "residual":
            return self._block_again
        if unit.kind not in (ATTENTION, EXPERTS, ROUTER, CALLS):
            return None
        laws: dict[str, Laws] = {
            **dict.fromkeys(("linear", "matmul", "bmm"), self._product),
            "softmax": self._softmax,
            "silu": self._activation,
            "gelu": self._activation,
            "norm": self._norm,
            FUSED: self._fused,
        }
        return self.guarded(laws[operator]) if operator in laws else None

    def guarded(self, laws: Laws) -> Handler:
        """Wrap laws as a handler: if a module raises when called again, its laws count as not tested.

        The same holds if it changes its state (a cache, a counter), which is restored: its second answer may differ
        from its first. A law that the class's own code on the host breaks too does not apply to that class.
        """

        def handler(recorded: RecordedCall) -> None:
            if isinstance(recorded.callee, nn.Module):
                self._record(recorded)
            before = ModuleState.of(recorded.callee)
            why = ""
            try:
                found = laws(recorded)
                if found is not None and found.broken and recorded.operator != MLP:
                    found = self._of_the_class(found, laws, recorded)
                if found is not None and found.broken:
                    found.facts.pattern = _pattern(recorded) or found.facts.pattern
            except Exception as error:  # third-party code may raise anything
                found, why = None, f"raised {type(error).__name__} when called again"
            if before.restore():
                found, why = None, "changes its own state when called"
            if why:
                name = type(recorded.callee).__name__ if isinstance(recorded.callee, nn.Module) else "a function in it"
                found = LawEvidence(skipped=[f"laws of {recorded.unit.module} ({name}): it {why}"])
            if found is not None and (found.results or found.skipped):
                self.add(recorded, found)

        return handler

    def _of_the_class(self, found: LawEvidence, laws: Laws, recorded: RecordedCall) -> LawEvidence:
        """The broken laws, without those that the class breaks on the host too.

        A sub-layer that does not run there is not judged, because nothing shows that it satisfies them.
        """
        host = on_the_host(recorded)
        own = None if host is None else laws(host)
        if own is None:
            whole = recorded.operator == ATTENTION_MODULE
            return LawEvidence(skipped=["laws of attention: its class does not run on the host"]) if whole else found
        not_laws = own.broken.keys()
        if not not_laws:
            return found
        self.causal &= Law.CAUSALITY not in not_laws
        name = type(recorded.callee).__name__ if isinstance(recorded.callee, nn.Module) else recorded.operator
        skipped = [f"{law}: {name} does not satisfy it on the host either" for law in sorted(not_laws)]
        results = {law: result for law, result in found.results.items() if law not in not_laws}
        return replace(found, results=results, skipped=[*found.skipped, *skipped])

    # -- modules

    def _record(self, recorded: RecordedCall) -> None:
        """Keep a linear's output for the MLP that contains it."""
        if recorded.operator == "linear" and recorded.unit.component == "mlp" and recorded.output_tensor is not None:
            self._parts[recorded.unit.module] = recorded.output_tensor.detach()

    def _why_not(self, recorded: RecordedCall, *others: Tensor, room: float = 4.0) -> LawEvidence | None:
        """None if the input, and what it is combined with, is finite and so small that no healthy module overflows."""
        x = recorded.first_input
        if x is None or recorded.output_tensor is None or not x.is_floating_point() or x.numel() == 0:
            return LawEvidence()
        largest = min(torch.finfo(t.dtype).max for t in (x, recorded.output_tensor))  # unlike under autocast
        with host_arithmetic():
            fits = all(float(t.detach().cpu().abs().max()) < min(_HUGE, largest / room) for t in (x, *others))
        return None if fits else LawEvidence(skipped=[_TOO_LARGE])

    def _not_all_linear(self, recorded: RecordedCall) -> LawEvidence | None:
        """None if every linear inside a module is one."""
        if not any(name.startswith(f"{recorded.unit.module}.") for name in self.nonlinear):
            return None
        return LawEvidence(skipped=["laws of a module that contains a linear but need not be linear itself"])

    def _linear(self, recorded: RecordedCall) -> LawEvidence:
        packed = recorded.unit.packed
        self.quantised |= bool(packed)
        why = _why_not_linear(recorded)
        if why:
            self.quantised = True
            self.nonlinear.add(recorded.unit.module)
            return LawEvidence(skipped=[f"laws of a linear: {why}"])
        unfit = self._why_not(recorded)
        if unfit is not None:
            return unfit
        call, biased = unbiased(recorded)
        x, y = recorded.tensors
        given = as_multiplied(x, y)
        zero_channels = functools.partial(linear_checksums.zero_channels, recorded.callee)
        own = linear.Linear(call, given, x.shape[-1], additive=not packed, zero_channels=zero_channels)
        found, base = linear.examine(own, y if given is x and not biased else None)
        if packed:
            found.skipped.append(f"{Law.ADDITIVITY}, {Law.NAN_PASSES}: {packed} may quantise its input")
        if self.weights:
            linear_checksums.check_checksums(recorded, found)
        if found.broken:
            linear.probe_suspect(own, base, found)
            if self.weights:
                linear_checksums.read_weights_back(recorded, found)
        return found

    def _norm(self, recorded: RecordedCall) -> LawEvidence:
        # Its sums are kept in float32.
        return self._why_not(recorded, room=1.0) or norms.examine(recorded, weights=self.weights)

    def _activation(self, recorded: RecordedCall) -> LawEvidence:
        return self._why_not(recorded) or functions.examine_activation(recorded)

    def _embedding(self, recorded: RecordedCall) -> LawEvidence | None:
        x = recorded.first_input
        if x is None or recorded.output_tensor is None or x.is_floating_point():
            return None
        return functions.examine_embedding(recorded, weights=self.weights)

    def _mlp(self, recorded: RecordedCall) -> LawEvidence | None:
        prefix = f"{recorded.unit.module}."
        parts = {name.removeprefix(prefix): y for name, y in self._parts.items() if name.startswith(prefix)}
        self._parts.clear()
        if not parts or self.mixture:
            return None
        unfit = self._not_all_linear(recorded) or self._why_not(recorded)
        if unfit is not None:
            return unfit
        found = sublayers.examine_mlp(recorded, parts)
        inside = {op for unit in self.anatomy.units if unit.place == recorded.unit.place for op in unit.operators}
        found.facts.activation = "gelu" if "gelu" in inside else "silu"
        return found

    def _attention_module(self, recorded: RecordedCall) -> LawEvidence:
        given = (*recorded.args, *recorded.kwargs.values())
        if any(type(value).__name__.endswith("Cache") for value in given):  # each call would write to it
            return LawEvidence(skipped=["laws of attention: it uses a key-value cache"])
        unfit = self._not_all_linear(recorded) or self._why_not(recorded)
        return unfit or sublayers.examine_attention(recorded, self.rotary, causal=self.causal)

    def _rotary(self, recorded: RecordedCall) -> LawEvidence:
        return self.rotary.examine(recorded)

    def _block(self, recorded: RecordedCall) -> None:
        x, y = recorded.first_input, recorded.output_tensor
        if x is not None and y is not None and isinstance(recorded.unit.place, int):
            self.blocks[recorded.unit.place] = y.detach().cpu()
            self._given[recorded.unit.place] = x.detach().cpu()

    def _block_again(self, recorded: RecordedCall) -> None:
        x, y = recorded.first_input, recorded.output_tensor
        if x is not None and y is not None and isinstance(recorded.unit.place, int):
            self._second[recorded.unit.place] = (x.detach().cpu(), y.detach().cpu())

    def block_facts(self, place: Place) -> EvidenceFacts:
        """Whether a block returned something different for the same input in the second forward."""
        facts = EvidenceFacts()
        if not isinstance(place, int) or place not in self._second or place not in self._given:
            return facts
        x, y = self._second[place]
        if same_numbers(x, self._given[place]):
            changed = differing(host_rows(y).double(), host_rows(self.blocks[place]).double())
            facts.random = bool(changed.any())
            facts.count_changes(changed)
        return facts

    # -- functions

    def _product(self, recorded: RecordedCall) -> LawEvidence:
        """A product as a linear function of its first factor; the other one is fixed, and an addend is left out."""
        name = getattr(recorded.callee, "__name__", "")
        added = name in ("baddbmm", "addmm")
        args = list(recorded.args)
        if added and isinstance(args[0], Tensor):
            args[0] = torch.zeros_like(args[0])
        x = args[added] if len(args) > added else None
        factors = [arg for arg in recorded.args if isinstance(arg, Tensor) and arg.is_floating_point()]
        unfit = self._why_not(recorded, *factors)
        if unfit is not None or not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2] < 2:
            return unfit or LawEvidence()
        if name in ("einsum", "__rmatmul__"):
            return LawEvidence(skipped=[f"laws of products: {name}"])
        y = recorded.tensors[1]
        if y.dim() < x.dim() or y.shape[-2] != x.shape[-2]:
            return LawEvidence(skipped=["laws of products: a matrix times a vector"])
        plain, biased = unbiased(replace(recorded, args=tuple(args)))

        def call(z: Tensor) -> Tensor:
            if not added:
                return plain(z)
            out: Tensor = recorded.repeat(*(z if arg is x else arg for arg in args), **recorded.kwargs)
            return out

        # Rows of a plain linear are free; those of grouped products belong to an expert, of a batch to its matrix.
        # A matrix that meets a batch of others (Mamba's) is given once for each.
        given = as_multiplied(x, y)
        given = given if y.dim() == x.dim() else given.expand(*y.shape[:-2], -1, -1)
        own = linear.Linear(call, given, x.shape[-1], free_rows=name == "linear")
        found, base = linear.examine(own, y if given is x and not (biased or added) else None)
        if found.broken:
            linear.probe_suspect(own, base, found)
        return found

    def _softmax(self, recorded: RecordedCall) -> LawEvidence | None:
        floating = recorded.first_input is not None and recorded.first_input.is_floating_point()
        return functions.examine_softmax(recorded) if floating else None

    def _fused(self, recorded: RecordedCall) -> LawEvidence:
        return self._why_not(recorded) or attention.examine(recorded)

    def add(self, recorded: RecordedCall, found: LawEvidence) -> None:
        if recorded.operator == ROTARY:
            recorded = replace(recorded, operator="matmul")
        x, y = recorded.first_input, recorded.output_tensor
        level = SUBLAYER if recorded.operator in (ATTENTION_MODULE, MLP) else OPERATOR
        widths = [0 if t is None else t.shape[-1] for t in (x, y)]
        kind = f"{recorded.operator}, {widths[0]} to {widths[1]}"
        self.log.add(site_of(recorded), found, level=level, kind=kind, width=widths[1])


def site_of(recorded: RecordedCall) -> Site:
    """Within an attention module each product is a site; each expert is one site."""
    apart = recorded.unit.kind == ATTENTION and recorded.operator != FUSED
    return recorded.unit.site(recorded.operator, occurrence=recorded.occurrence if apart else 0)


def _pattern(recorded: RecordedCall) -> Pattern | None:
    """The audit's name for a wrong output; None where the host can't recompute it, or finds nothing wrong with it."""
    operator, device = recorded.operator, recorded.tensors[1].device.type
    with host_arithmetic(), contextlib.suppress(Unseen):
        rows = Rows(_ROWS, 0, device)
        found = recompute(operator, recorded.callee, recorded.args, recorded.kwargs, recorded.output, rows)
        judgement = judge(found.y, found.reference, probabilities=operator == "softmax")
        return classify(Evidence.of(operator, found, judgement)) if judgement.alarm else None
    return None


def _why_not_linear(recorded: RecordedCall) -> str:
    """Why a module of that name need not be a linear function of its input; "" if there is no reason."""
    module = recorded.callee
    if not isinstance(module, nn.Module):
        return ""
    if not given_one_tensor(recorded.args, recorded.kwargs):
        return "it takes more than one tensor"
    if recorded.unit.packed:
        return ""
    weight = getattr(module, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):
        return f"a weight of the kind {type(weight).__name__} may round its input"
    return "" if linear_formula(module) is not None else f"{type(module).__name__} computes {NOT_LINEAR}"
