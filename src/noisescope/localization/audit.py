"""`audit`: recompute every operator on the host from its actual inputs, and run all code between operators there.

Each call on the device is recorded with its inputs and outputs. The host recomputes the operator in float64 from copies
of those inputs and of the weights; a result that differs by more than the round-off model allows (roundoff_floors.py,
judge.py) is a suspect. Everything else, from the token ids to the logits that the caller receives, is the model's own
code. It runs on the host with the operators' recorded results (host_twin.py) and must produce what the device produced.
Each call is checked on the inputs it received, so errors do not accumulate from layer to layer, and the first call that
fails is the source.

The base run is one batch; a second batch; the first again, which shows what is not repeatable and what depends on the
previous batch; and the second again, with fused attention decomposed into its operators. Then come other shapes, and
decode steps with the model's cache. A fault inside attention costs a few more forwards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import progress
from noisescope.errors import InvalidInput
from noisescope.localization.arithmetic_self_test import self_test_of, with_self_test
from noisescope.localization.audit_log import ALWAYS, NEVER, AuditLog
from noisescope.localization.audit_verdict import JudgedModel, conclude, hidden_in_attention, suspects_inside_attention
from noisescope.localization.call_tree import (
    CHOICE,
    CallTree,
    ChoiceCalls,
    Node,
    can_be_stacked,
    stacked,
    with_whole_modules,
)
from noisescope.localization.coverage import Phase
from noisescope.localization.deferred_calls import Computed, Deferred, side_by_side
from noisescope.localization.driven_judgement import judge_norm, judge_weights
from noisescope.localization.driven_operators import drive, input_alone, is_driven
from noisescope.localization.exact_functions import is_valid_choice
from noisescope.localization.host_copies import HostStates, offloaded_weights, tensors_in
from noisescope.localization.host_operators import Unseen, host_arithmetic
from noisescope.localization.host_products import Recomputed
from noisescope.localization.host_twin import HostTwin, autocast_of
from noisescope.localization.inputs import Batch, parts_of, remarks
from noisescope.localization.judge import Judgement
from noisescope.localization.shipped_functions import replaced_functions, search_code
from noisescope.localization.tensors import host_memory
from noisescope.localization.verdict import Verdict
from noisescope.localization.workloads import Workload, run_workload, within_budget, workloads_for
from noisescope.model.anatomy import ATTENTION, Unit
from noisescope.model.forwards import device_of, evaluating, made_inputs
from noisescope.model.loading import Subject
from noisescope.probe.unfused_attention import is_users_own
from noisescope.probe.watch import watch
from noisescope.sites import FUSED, Site

_MOST_DEFERRED = max(1 << 30, host_memory() // 8)  # bytes of calls that wait: beyond that weights are copied again
_AGAIN = 6  # repetitions of the first batch: cheap, since only what changes is judged, and rare faults need forwards
_TRIES = 3  # forwards with attention decomposed, in which an intermittent fault may show its operator
_FORMULAS = ("linear", "norm", "silu", "gelu", "embedding", "softmax", "matmul", "bmm", FUSED)


def audit(
    subject: Subject | nn.Module,
    inputs: Any = None,
    *,
    rows: int = 64,
    tokens: int | None = None,
    batch: int | None = None,
    decode: int | None = None,
    budget: float | None = None,
    repeat: int = 0,
    quick: bool = False,
    seed: int = 0,
) -> Verdict:
    """Find where a model computes wrongly by recomputing each operator, and running all other code, on the host.

        verdict = audit(ns.load("path/to/model", device="cuda"))
        verdict.verdict, verdict.suspects[0].site, verdict.smallest_visible["linear"], verdict.coverage

    `inputs` are a batch (the model's arguments as a dict, or token ids), a list of batches, or a list of texts; by
    default built-in text. `tokens`, `batch` and `decode` select one shape instead of the built-in ones, and `quick`
    runs only the base batches. `budget` is the number of seconds after which no further shape is started. `repeat` runs
    the base batch that many more times, to catch intermittent faults. Linears with more rows (tokens) than `rows` are
    sampled, and their other rows are checked by checksums. `seed` selects text and samples. The model runs unchanged,
    in this thread and inside the open scopes.
    """
    if rows < 2:
        raise InvalidInput(f"rows must be at least 2, got {rows}")
    model, tokenizer, anatomy = parts_of(subject)
    shape = {"tokens": tokens, "batch": batch, "decode": decode}
    workloads, not_run = workloads_for(model, tokenizer, inputs, **shape, quick=quick, seed=seed)
    with evaluating(model), torch.no_grad():
        faults = self_test_of(model, seed=seed)
        log = AuditLog(anatomy, rows=rows, seed=seed, device=device_of(model).type)
        run = AuditRun(model, log, not_run, again=(1 if quick else _AGAIN) + repeat, made=inputs is None)
        run.log.remarks += _remarks(subject, model, workloads)
        with progress.plan(progress.Phase("shapes", len(workloads)), progress.Phase("judging operators")):
            shapes = within_budget(workloads, budget, not_run)
            for workload in progress.track("shapes", shapes, steps=len(workloads)):
                run.base(workload) if workload.other is not None else run.workload(workload)
            progress.begin("judging operators")
            with run.host():
                run.judge_deferred()
            run.inside_attention()
            if not quick:
                run.call_alone(seed)
                run.drive(workloads[0].inputs, seed)
    return with_self_test(conclude(run.log, run.judged_model()), faults)


def _remarks(subject: Subject | nn.Module, model: nn.Module, workloads: list[Workload]) -> list[str]:
    found = remarks(model, [workload.inputs for workload in workloads])
    if model is not (subject.model if isinstance(subject, Subject) else subject):
        found.append("the model is compiled, but the audit runs it uncompiled: its own fused kernels are not checked")
    return found


def _apart(inputs: Batch) -> Batch:
    return {k: value if isinstance(value, Tensor) else copy.deepcopy(value) for k, value in inputs.items()}


class AuditRun:
    """The forwards of one audit."""

    def __init__(self, model: nn.Module, log: AuditLog, not_run: list[str], *, again: int, made: bool) -> None:
        self.model, self.log, self.not_run, self._made = model, log, not_run, made
        anatomy, self._again = log.anatomy, again  # how often the first batch is run once more
        self.phases: list[Phase] = []
        self._raised: list[str] = []
        self._anatomy = with_whole_modules(model, anatomy)
        attention = (unit.module for unit in anatomy.units if unit.kind == ATTENTION)
        self._attention = frozenset(name for name in attention if not is_users_own(model.get_submodule(name)))
        self._batches: dict[int, Batch] = {}
        self._states = HostStates()
        self._deferred: dict[Site, Deferred] = {}
        self._deferred_bytes = 0
        self._twin: HostTwin | None = None
        self._no_twin = ""
        search_code(model)
        words = ", ".join(map(str, replaced_functions()))
        log.remarks += [
            f"patched at run time, so the host ran the code from the installed package instead: {words}"
        ] * bool(words)
        self._has_short = False  # whether operators that can be driven were given sixteen bits
        self._copy_model()

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """The host's own arithmetic, with every weight in reach."""
        with host_arithmetic(), offloaded_weights(self.model):
            yield

    def _copy_model(self) -> None:
        autocast = autocast_of(self.model)
        try:
            with self.host():
                self._twin = HostTwin(self.model, autocast)
        except Exception as error:  # a module may refuse to be copied
            self._no_twin = f"the model can't be copied ({type(error).__name__}: {str(error)[:80]})"

    def judged_model(self) -> JudgedModel:
        read = frozenset[str]() if self._twin is None else self._twin.read_directly()
        return JudgedModel(self.model, self.phases, self.not_run, self._raised, read)

    def base(self, workload: Workload) -> None:
        """Two batches of one shape, the first again after the second, and the second with attention decomposed."""
        first, other = workload.inputs, workload.other
        assert other is not None
        number = self.log.forwards
        self._forward(first, keep_hashes=True, base=True, phase=workload.phase)
        self._forward(other, base=True, phase=workload.phase)
        for _ in range(self._again):
            self._forward(first, number=number, repeated=True, base=True, phase=workload.phase)
        if self._attention:
            self._forward(other, number=number + 1, opened=self._attention, base=True, phase=workload.phase)
        self.phases.append(dataclasses.replace(workload.phase, steps=2 + self._again + bool(self._attention)))

    def workload(self, workload: Workload) -> None:
        """A prefill and its decode steps; shapes the model can't run are listed, unless the caller asked for them."""
        done: list[Batch] = []

        def forward(inputs: Batch) -> Any:
            output = self._forward(inputs, decoding=bool(done), phase=workload.phases[bool(done)])
            done.append(inputs)
            return output

        try:
            problem = run_workload(self.model, workload, forward)
        except Exception as error:
            if workload.required:
                raise
            problem = f"{workload}: {type(error).__name__}: {str(error)[:80]}"
            self._raised += [problem] * (not isinstance(error, NotImplementedError))  # what a class leaves out
        if done:
            self.phases.append(workload.phase)
        if len(done) > 1:
            self.phases.append(dataclasses.replace(workload.phases[1], steps=len(done) - 1))
        self.not_run += [problem] * bool(problem)

    def judge_deferred(self) -> None:
        """Check the calls of each operator in all forwards together, so that its weight is copied to the host once."""
        every = self._deferred.items()
        kept = [each for each in every if each[1].first is None or self.log.kept_its_weights(each[1].first)]
        tasks = [functools.partial(waiting.computed, self.log.rows.around(*waiting.ends)) for _, waiting in kept]
        for (site, waiting), found in zip(progress.parts(kept), side_by_side(tasks), strict=True):
            self._judge_together(site, waiting, found)
        self._deferred.clear()
        self._deferred_bytes = 0

    def _judge_together(self, site: Site, waiting: Deferred, computed: Computed) -> None:
        if computed.unseen:
            for node in waiting.nodes:
                self.log.judged.unknown(node, computed.unseen)
                if self._twin is not None:
                    self.log.code(node, self._twin.compare(node))
            return
        self.log.checksums += computed.checksums
        for node, (found, judgement) in zip(waiting.apart, computed.apart, strict=True):
            self.log.judge_call(node, found, judgement)
        for node in waiting.again if site in self.log.alarms else ():
            self.log.again(node)
        others = waiting.as_one
        if computed.as_one is not None:
            if site in self.log.alarms:  # whole calls have shown it, and say more than samples of others
                for node in others:
                    self.log.judged.add(node)
            else:
                self._judge_as_one(site, others, *computed.as_one)

    def _judge_as_one(self, site: Site, nodes: list[Node], found: Recomputed, judgement: Judgement) -> None:
        before = self.log.alarms.get(site)
        self.log.judge_call(stacked(nodes), found, judgement, nodes)
        alarm = self.log.alarms.get(site)
        if alarm is before:
            return
        self.log.forget(site, before)  # which calls, and which of their tokens?
        for node in nodes:
            self.log.again(node)
        if self.log.alarms.get(site) is before and alarm is not None:  # only all of them together show it
            self.log.alarms[site] = alarm

    def _defer(self, node: Node, calls: list[Node]) -> None:
        node.by_formula = True
        calls.append(node)
        self._deferred_bytes += sum(x.nbytes for _, x in tensors_in((node.args, node.kwargs, node.output)))
        if self._deferred_bytes > _MOST_DEFERRED:
            self.judge_deferred()

    def inside_attention(self) -> None:
        """Find which operator inside a wrong fused attention call is faulty."""
        log = self.log
        for attempt in range(_TRIES):  # a fault that always shows is caught at once, if an operator inside has it
            for number, hidden in hidden_in_attention(log, passing_only=attempt > 0).items():
                if number in self._batches:
                    self._forward(self._batches[number], number=number, opened=hidden)
        inside = suspects_inside_attention(log)
        if inside and 0 in self._batches:  # old data of the first batch? All before them must be as it was
            self._forward(self._batches[0], number=0, opened=inside)
        with self.host():
            self.judge_deferred()

    def call_alone(self, seed: int) -> None:
        """Call what no forward shows: linears, norms and tables without a call, and other rows of tables."""
        known = self.log.judged.modules | self.log.judged.reasons.keys() | self.judged_model().read_directly
        used = {id(p) for name in known for p in self.model.get_submodule(name).parameters(recurse=False)}
        generator = torch.Generator("cpu").manual_seed(seed)
        called = []
        for name, operators in {unit.module: unit.operators for unit in self._anatomy.units}.items():
            module = self.model.get_submodule(name)
            again = type(module) is nn.Embedding and name in self.log.judged.modules
            x = input_alone(module, operators, generator) if again or name not in known else None
            if x is None:
                continue
            if again:
                self._called_alone(module, x)
            elif id(module.weight) not in used:
                called += [name] * self._called_alone(module, x)
        some = ", ".join(called[:3]) + (f" and {len(called) - 3} more" if len(called) > 3 else "")
        words = f"called alone, with random numbers, because no forward calls them: {some}"
        self.log.remarks += [words] * bool(called)

    def _called_alone(self, module: nn.Module, x: Tensor) -> bool:
        """Call a module outside a forward, and judge the call; False if that is impossible."""
        tree, y = CallTree(self._states, "calls alone", self.log.forwards), None
        self.log.begin(self.log.forwards, keep_hashes=False, repeated=False)
        with (
            contextlib.suppress(Exception),  # of a hook that needs the rest of the model: then it is not judged
            watch(self.model, tree.end, lambda unit, operator: True, before=tree.begin, anatomy=self._anatomy),
        ):
            y = module(x)
        with self.host():
            for node in tree.nodes:
                self.log.nonfinite.see(node)
                self.log.call(node)
                self.log.passed_through_hooks(node, {}, y)
        self.log.forwards -= 1  # it was none of the model
        return y is not None

    def drive(self, inputs: Batch, seed: int) -> None:
        """Call 16-bit norms, softmax and attention again, with inputs that reveal their internal arithmetic."""
        if self._twin is None or not self._has_short:
            return
        alarmed = self.log.settled()
        calls = drive(self.model, self._anatomy, lambda: self.model(**_apart(inputs)), seed=seed, without=alarmed)
        self.log.forwards += 1
        known: dict[tuple[object, ...], tuple[float, ...]] = {}
        with self.host():
            for order, norm in enumerate(calls.norms):
                with contextlib.suppress(Unseen):  # offloaded, or of another shape: not tried
                    found = judge_norm(norm, self._twin, known)
                    if found is not None:
                        self.log.driven(norm.site, norm.callee, found, order)
            for order, weights in enumerate(calls.weights):
                judged = judge_weights(weights)
                if weights.unseen and judged.judgement.alarm:
                    self.log.explained(weights.site)
                self.log.driven(weights.site, weights.callee, judged, order)

    def _forward(
        self,
        inputs: Batch,
        *,
        number: int | None = None,
        opened: frozenset[str] = frozenset(),
        keep_hashes: bool = False,
        repeated: bool = False,
        base: bool = False,
        decoding: bool = False,
        phase: Phase | None = None,
    ) -> Any:
        if number is None:
            number = self.log.forwards
        if not decoding:  # a cache that is given grows: each forward gets its own
            self._batches[number] = inputs
            inputs = _apart(inputs)
        given = {
            name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()
        }  # hooks may write to them
        self.log.begin(number, keep_hashes=keep_hashes, repeated=repeated)
        tree = CallTree(self._states, str(phase) if phase is not None else "", self.log.forwards)

        def where(unit: Unit, operator: str) -> bool:
            return operator != FUSED or unit.module not in opened

        observed = watch(self.model, tree.end, where, before=tree.begin, anatomy=self._anatomy)
        with made_inputs(self.model, made=base and self._made), observed, ChoiceCalls(tree):
            output = self.model(**inputs)
        if self._twin is not None and not self._twin.fits(self.model):
            self._copy_model()
        with self.host():
            self._states.settle()
            self._judge(tree, opened, base=base, together=not (keep_hashes or repeated))
            self.log.passed_through_hooks(tree.root, given, output)
            self._states.adopt(keys=self._twin is not None and bool(self._twin.fused))
        return output

    def _judge(self, tree: CallTree, opened: frozenset[str], *, base: bool, together: bool) -> None:
        for node in tree.nodes:
            self.log.nonfinite.see(node)
        self._has_short |= any(is_driven(node.operator, (node.args, node.kwargs)) for node in tree.nodes)
        for node in sorted(tree.nodes, key=lambda node: node.order):
            waiting = self._deferred.setdefault(node.site("output"), Deferred()) if can_be_stacked(node) else None
            waiting = waiting if waiting is not None and waiting.takes(node) else None
            if waiting is not None and base and node.operator == "linear" and opened:
                self._defer(node, waiting.checked)
            elif waiting is not None and base and node.operator == "linear":
                wanted = self.log.wanted(node)
                node.by_formula = True
                if wanted != NEVER:
                    self._defer(node, waiting.apart if wanted == ALWAYS else waiting.again)
            elif waiting is not None and together:
                self._defer(node, waiting.others)
            elif node.operator in _FORMULAS:
                node.by_formula = self.log.call(node)
            elif node.operator == CHOICE:
                node.by_formula = is_valid_choice(node.callee, node.args, node.kwargs, node.output)
        for node in tree.nodes:  # a function's recorded results are answered all or none, so that none is mistaken
            unknown = {child.callee for child in node.children if not child.is_module and not child.by_formula}
            for child in node.children:
                child.by_formula &= child.is_module or child.callee not in unknown
        if self._twin is None:
            for node in tree.nodes:
                if node.is_module and not node.by_formula:
                    self.log.judged.unknown(node, self._no_twin)
        else:
            # Where attention was decomposed, its code did not run as written.
            written = [node for node in tree.nodes if not any(child.module in opened for child in node.children)]
            self._twin.follow(written, self.log.code)
