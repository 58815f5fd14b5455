"""`relations`: tests laws of healthy arithmetic on every module of the model under test.

It needs neither weights on a host nor a reference: modules are called again, in place, with transformed inputs, and the
implied result is checked (laws/table.py lists the laws). Exact laws have no tolerance; the others use a round-off
model.

Two forwards are observed: one at modules (projections, norms, activations, sub-layers, block sums), one at functions
(fused attention, softmax, products, experts). A third, with the batch in another order, runs between them, so the two
also show whether the model is repeatable.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import progress
from noisescope.errors import unknown
from noisescope.localization.arithmetic_self_test import self_test_note, self_test_of, with_self_test
from noisescope.localization.audit_verdict import conclude
from noisescope.localization.classify import classify
from noisescope.localization.data_flow import as_recomputed, flow_in_blocks
from noisescope.localization.error_pattern import Evidence
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.inputs import Batch, batches_for, parts_of, remarks
from noisescope.localization.judge import Judgement
from noisescope.localization.laws import whole_model
from noisescope.localization.laws.call_results import LawEvidence
from noisescope.localization.laws.calls_with_other_inputs import (
    WHOLES,
    Choice,
    Handler,
    Listening,
    function_anatomy,
    module_anatomy,
)
from noisescope.localization.laws.dispatcher import LawDispatcher, site_of
from noisescope.localization.laws.law_log import MODEL, WHOLE_MODEL, LawLog
from noisescope.localization.laws.table import Law
from noisescope.localization.tensors import differing, host_rows, same_numbers
from noisescope.localization.verdict import Verdict
from noisescope.model.anatomy import ATTENTION, Anatomy, Unit
from noisescope.model.forwards import evaluating
from noisescope.model.loading import Subject
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import Place, Site

_LOOKS = 6  # more, between modules, at a model that does not repeat itself
_UNEXPLAINED = (
    "the model's output differs from run to run, but no single module's does: run again, or use --method audit"
)
_CACHE_LAWS = f"{' and '.join(whole_model.CACHE_LAWS)} of the whole model"


def relations(
    subject: Subject | nn.Module,
    inputs: Any = None,
    *,
    weights: bool = False,
    places: Iterable[Place] | None = None,
    sites: Iterable[Site] = (),
    seed: int = 0,
) -> Verdict:
    """Find where a model computes wrongly, by laws that its modules must satisfy.

        verdict = relations(ns.load("path/to/model", device="cuda"))
        verdict.verdict, verdict.suspects[0].site, verdict.suspects[0].fault_class

    `inputs` are a batch (the model's arguments as a dict, or token ids), a list of batches, or a list of texts; by
    default built-in text, or random tokens without a tokenizer. `weights=True` also reads the weights, which reveals
    linear faults (gain, swapped channels, lost inputs) that the other laws can't detect. `places` restricts the search
    to some blocks (by index) or outer places; `sites` restricts it to their places, and then the verdict is "healthy"
    only if a law was tested at each. The model runs unchanged, in this thread and inside the open scopes.
    """
    model, tokenizer, anatomy = parts_of(subject)
    asked = tuple(sites)
    wanted = _checked({site.place for site in asked} if asked else places, anatomy)
    batches = batches_for(model, tokenizer, inputs, seed)
    with evaluating(model), torch.no_grad():
        wrong = self_test_of(model, seed=seed)
        search = Search(model, anatomy, batches[0], weights=weights, places=wanted)
        search.log.remarks += [*remarks(model, batches[:1]), self_test_note(wrong)]
        return with_self_test(search.verdict(asked), wrong)


def _checked(places: Iterable[Place] | None, anatomy: Anatomy) -> frozenset[Place] | None:
    if places is None:
        return None
    wanted = frozenset([places] if isinstance(places, (int, str)) else places)
    known = anatomy.places()
    for place in wanted:
        if place not in known:
            raise unknown("place", place, known)
    return wanted


class Search:
    """One run of the locator on one batch."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, batch: Batch, *, weights: bool, places: frozenset[Place] | None
    ) -> None:
        self.model, self.anatomy, self.batch = model, anatomy, batch
        self.flipped = {k: v.flip(0) if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}
        self.narrowed = places is not None
        self.log = LawLog(anatomy)
        causal = whole_model.is_causal(model)
        self.dispatcher = LawDispatcher(anatomy, self.log, causal=causal, weights=weights, places=places)
        self.modules = module_anatomy(model, anatomy)
        self.functions, skipped = function_anatomy(model, anatomy)
        for why in skipped:
            self.log.skipped[why] += 1
        self._naturals: dict[tuple[Site, int], Tensor] = {}  # outputs in a search for old data, by its forward

    def verdict(self, asked: tuple[Site, ...]) -> Verdict:
        modules = Listening(self.model, self.modules, self.dispatcher.at_modules, "laws of modules")
        functions = Listening(self.model, self.functions, self.dispatcher.at_functions, "laws of functions")
        with progress.plan(modules.phase, functions.phase):
            with modules:
                first = whole_model.answer(whole_model.run(self.model, self.batch))
            flipped = whole_model.answer(whole_model.run(self.model, self.flipped))
            with functions:
                again = whole_model.answer(whole_model.run(self.model, self.batch))
        progress.begin("relations")
        forwards = 4 + (modules.extra + functions.extra) / max(1, modules.natural + functions.natural)
        with host_arithmetic():
            repeats = whole_model.repeatability(first, flipped, again)
        self._block_sums()
        with host_arithmetic():
            self.log.forgive_the_stack()
        self._self_test(repeats)
        if any(result.alarm for result in repeats.values()) and not self.log.suspects():
            # Where kernels themselves do not repeat, modules were seen to; where they do, the model must as well.
            alone = repeats[Law.REPEAT].alarm and not self.log.forgiven
            answers = (flipped.flip(0), again)
            if any(whole_model.beyond_round_off(first, other, self._nudged) for other in answers):
                forwards += self._search_for_old_data()
            if alone:
                forwards += self._look_between_again()
                if not self.log.suspects():
                    self.log.leave_open(WHOLE_MODEL, _UNEXPLAINED)
        if not self.narrowed:
            forwards += self._cache(first)
        with host_arithmetic():
            self.log.settle(asked)
            found = conclude(self.log)
        return replace(found, method="relations", forwards=forwards + ("_nudged" in self.__dict__))

    @functools.cached_property
    def _nudged(self) -> whole_model.Nudged:
        return whole_model.nudge(self.model, self.anatomy, self.batch)

    def _self_test(self, found: dict[Law, Judgement]) -> None:
        """Report what the whole model shows about the stack; its modules have to explain it."""
        if found[Law.REPEAT].alarm:
            size = found[Law.REPEAT].size
            self.log.remarks.append(f"self-test: two runs of the model differ by up to {size:.2g} of the rms")
        if found[Law.ROW_ORDER].alarm:
            size = found[Law.ROW_ORDER].size
            self.log.remarks.append(f"self-test: batch order changes the output by up to {size:.2g} of the rms")
        if not any(result.alarm for result in found.values()):
            self.log.remarks.append(
                "self-test: the model's output is identical bit for bit on every run and in any batch order"
            )

    def _block_sums(self) -> None:
        """Check that a block's output equals what its code computes from its modules' outputs, bit for bit."""
        for flow in flow_in_blocks(self.model, self.anatomy, lambda: whole_model.run(self.model, self.batch)):
            site, width = flow.unit.site("residual"), flow.output.shape[-1]
            if not self.dispatcher.wanted(flow.unit.place):
                continue
            if flow.problem:
                self.log.add(site, LawEvidence(skipped=[f"{Law.SUM_OF_PARTS}: {flow.problem}"]), kind="residual")
                continue
            kept = LawEvidence({Law.SUM_OF_PARTS: Judgement({Law.SUM_OF_PARTS: 0.0}, tests=flow.output.numel())})
            self.log.add(site, kept, kind="residual", width=width)
            for difference in flow.differences:
                recomputed = as_recomputed(difference)
                found = LawEvidence(facts=self.dispatcher.block_facts(flow.unit.place))
                result = found.check(Law.SUM_OF_PARTS, recomputed.y.double(), recomputed.reference.values)
                if difference.tensor == "input":
                    result.said = f"{Law.SUM_OF_PARTS}: the input of {difference.node.module} is wrong"
                found.facts.pattern = classify(Evidence.of("residual", recomputed, result))
                self.log.add(site, found, kind="residual", width=width)

    def _look_between_again(self) -> float:
        for look in range(_LOOKS):
            if self.log.suspects():
                return float(look)
            self._block_sums()
        return float(_LOOKS)

    def _cache(self, logits: Tensor) -> float:
        """Test causality and the cache of the whole model; returns the cost in forwards."""
        why = ""
        if not self.dispatcher.causal or set(self.batch) != {"input_ids"}:
            why = "not a causal language model that takes only token ids"
        elif not self._attention_is_causal():
            why = "no attention module was found to be causal by itself"
        elif self.batch["input_ids"].shape[1] < 3:
            why = "fewer than 3 tokens"
        elif self.dispatcher.mixture:
            why = "MoE routing may switch experts"
        elif self.dispatcher.quantised:
            why = "quantised linears may share a scale across the batch"
        elif self.log.suspects():
            why = "not tested, because laws inside the blocks failed"
        if why:
            self.log.skipped[f"{_CACHE_LAWS}: {why}"] += 1
            return 0.0
        try:
            found, site = whole_model.cache_laws(
                self.model, self.anatomy, self.batch, self.dispatcher.blocks, logits, lambda: self._nudged
            )
        except Exception as error:  # a model's own cache code may raise anything: then there is nothing to judge
            self.log.skipped[f"{_CACHE_LAWS}: its cache can't be used ({type(error).__name__})"] += 1
            return 1.0
        self.log.add(site or WHOLE_MODEL, LawEvidence(found), level=MODEL, kind="model")
        return 1.0

    def _attention_is_causal(self) -> bool:
        """Whether any attention module satisfied that law; a model's name does not guarantee it."""
        tried = [entry.results.get(Law.CAUSALITY) for entry in self.log.sites.values()]
        attends = any(unit.kind == ATTENTION for unit in self.anatomy.units)
        return not attends or any(result is not None and not result.alarm for result in tried)

    # -- old data

    def _search_for_old_data(self) -> float:
        """Find a module that depends on what ran before, when only the whole model is known not to be repeatable.

        Run forwards on other data and on the same data repeatedly, and compare every operator's call with one made
        right after it. A difference that recurs each time is stale data; one that does not is noise.
        """
        dispatcher, cost = self.dispatcher, 0.0
        for anatomy, choose in ((self.modules, dispatcher.at_modules), (self.functions, dispatcher.at_functions)):
            for turn, data in enumerate((self.flipped, self.batch) * 2):
                handler = dispatcher.guarded(functools.partial(self._made_again, turn))
                listener = functools.partial(_wherever, choose, handler)
                with Listening(self.model, anatomy, listener) as scope:
                    whole_model.run(self.model, data)
                cost += 1 + scope.extra / max(1, scope.natural)
        return cost

    def _made_again(self, turn: int, recorded: RecordedCall) -> None:
        x = recorded.first_input
        if (
            recorded.operator in WHOLES
            or x is None
            or recorded.output_tensor is None
            or not recorded.output_tensor.is_floating_point()
        ):
            return
        repeat = recorded.again(x)
        site = site_of(recorded)
        with host_arithmetic():
            y = host_rows(recorded.output_tensor)
            found = LawEvidence()
            found.check(Law.REPEAT, host_rows(repeat).double(), y.double())
            before = self._naturals.get((site, turn - 2))
            self._naturals[site, turn] = y
            self.dispatcher.add(recorded, found)
            entry = self.log.sites.get(site)
            if before is not None and entry is not None and entry.broken:
                random = not same_numbers(before, y)
                share = float(differing(host_rows(repeat).double(), y.double()).double().mean())
                entry.facts.random, entry.facts.stale, entry.facts.changed_share = random, not random, share


def _wherever(choose: Choice, handler: Handler, unit: Unit, operator: str) -> Handler | None:
    return None if choose(unit, operator) is None else handler
