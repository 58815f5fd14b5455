"""`backward`: audit a model's gradients against the host's vector-Jacobian products.

Micro-batches run forward and backward on the device, as in training with gradient accumulation. For each call the host
has the inputs and the gradient of the output. From these it computes the gradients that the call must return for its
inputs and weights (gradient_formulas.py; other code runs under autograd, gradient_twin.py). Each call is checked on the
gradient it received, so errors do not accumulate, and the call that fails is the source. Finally, `.grad` must equal
the sum over micro-batches in its dtype.

A backward pass keeps a lot of memory, so it runs several times, each time for some blocks whose calls and gradients are
copied to the host. The model runs in evaluation mode; the caller's `.grad`, `requires_grad`, modes and random state are
restored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization.audit_log import AuditLog
from noisescope.localization.call_tree import CallTree, with_whole_modules
from noisescope.localization.coverage import Phase, Share
from noisescope.localization.data_flow import first_floating
from noisescope.localization.gradient_calls import (
    GradientCalls,
    ParameterGradients,
    differentiable,
    without_checkpointing,
)
from noisescope.localization.gradient_judge import GradientJudge
from noisescope.localization.gradient_twin import GradientTwin
from noisescope.localization.host_copies import HostStates
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_twin import autocast_of
from noisescope.localization.inputs import Batch, parts_of
from noisescope.localization.tensors import host_memory
from noisescope.localization.workloads import workloads_for
from noisescope.model.anatomy import Anatomy, Unit
from noisescope.model.forwards import device_of, evaluating, without_cache
from noisescope.model.loading import Subject
from noisescope.probe.watch import watch

MICRO_BATCHES = 2
_MOST_HELD = max(1 << 30, host_memory() // 8)  # bytes of calls and gradients on the host at a time
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class BackwardAudit:
    """The findings of a backward audit and what ran; `reason` says why nothing could run."""

    model: nn.Module
    log: AuditLog
    phases: list[Phase] = field(default_factory=list)
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    parameters: dict[int, Share] = field(default_factory=dict)  # elements of each that were judged

    @property
    def passes(self) -> int:
        """Number of forward and backward passes."""
        return self.log.forwards


def audit_backward(
    subject: Subject | nn.Module,
    inputs: Any = None,
    *,
    tokens: int | None = None,
    batch: int | None = None,
    rows: int = 64,
    seed: int = 0,
) -> BackwardAudit:
    """Audit the gradients of a loss on micro-batches: next-token cross entropy, or a fixed sum of outputs."""
    model, tokenizer, anatomy = parts_of(subject)
    shape = {"tokens": tokens, "batch": batch, "decode": None if tokens is None and batch is None else 0}
    quick = tokens is None and batch is None
    workloads, _ = workloads_for(model, tokenizer, inputs, **shape, quick=quick, seed=seed)
    batches = [each for one in workloads for each in (one.inputs, one.other) if each is not None]
    batches = batches[:MICRO_BATCHES] if quick else batches[-MICRO_BATCHES:]
    found = BackwardAudit(model, AuditLog(anatomy, rows=rows, seed=seed, device=device_of(model).type))
    found.reason = _obstacle(model)
    if found.reason:
        return found
    phase = dataclasses.replace(workloads[0 if quick else -1].phase, kind="backward", steps=len(batches))
    device = device_of(model)
    with evaluating(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        run = BackwardRun(model, anatomy, found.log, batches, str(phase))
        try:
            run.all_groups()
        except _NoGradient as reason:
            found.reason = str(reason)
            return found
    found.phases.append(phase)
    found.notes += run.notes
    found.parameters |= run.parameters
    return found


class _NoGradient(Exception):
    """The model returned nothing that can be differentiated."""


def _obstacle(model: nn.Module) -> str:
    """Why a model has no gradients, or ""."""
    parameters = list(model.named_parameters())
    if not parameters:
        return f"{type(model).__name__} has no parameters"
    for name, p in parameters:
        if type(p) is not nn.Parameter or p.dtype not in _PLAIN:
            kind = str(p.dtype).removeprefix("torch.") if type(p) is nn.Parameter else type(p).__name__
            return f"the weights are quantised ({name} is {kind}) and have no gradient"
        if p.is_meta:
            return f"{name} is offloaded"
    if any(p.is_inference() for _, p in parameters):
        return "the weights were created in inference mode and have no gradient"
    packed = next((name for name, m in model.named_modules() if _is_packed(m)), None)
    return "" if packed is None else f"the weights are quantised ({packed}) and have no gradient"


def _is_packed(module: nn.Module) -> bool:
    """Whether a linear stores integers in buffers, as quantised checkpoints do."""
    buffers = [b for b in module._buffers.values() if b is not None and b.dim() > 1]
    return "linear" in type(module).__name__.lower() and any(not b.is_floating_point() for b in buffers)


@dataclass(frozen=True)
class _Group:
    """Modules whose gradients are checked in one pass, and modules that are only recorded as parts of others' code."""

    judged: frozenset[str]
    watched: frozenset[str]


class BackwardRun:
    """Passes over the same micro-batches, each for some of the modules."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, log: AuditLog, batches: Sequence[Batch], phase: str) -> None:
        self.model, self.log, self.batches, self.phase = model, log, batches, phase
        self.notes: list[str] = []
        self.parameters: dict[int, Share] = {}
        self._anatomy = with_whole_modules(model, anatomy)
        self._blocks = anatomy.blocks
        self._names = frozenset(name for name, _ in model.named_modules())
        autocast = autocast_of(model)
        with host_arithmetic():
            self._twin = GradientTwin(model, autocast)
        for name, parameter in model.named_parameters():
            if parameter._post_accumulate_grad_hooks:  # an optimizer's step may be one
                module, _, weight = name.rpartition(".")
                reason = f"a hook on {weight} runs after its gradient was accumulated, and was not run"
                log.judged.reasons.setdefault(module, {})["gradient accumulation"] = reason

    def all_groups(self) -> None:
        inside = frozenset(name for block in self._blocks for name in self._within(block) if name != block)
        outer = self._names - inside
        self._pass(_Group(outer - frozenset(self._blocks), outer))
        waiting, at_once = list(dict.fromkeys(self._blocks)), 1
        while waiting:
            here, waiting = waiting[:at_once], waiting[at_once:]
            names = frozenset(name for block in here for name in self._within(block))
            held = self._pass(_Group(names, names))
            at_once = max(1, int(_MOST_HELD // max(1, held // len(here))))

    def _within(self, block: str) -> Iterator[str]:
        return (name for name in self._names if name == block or name.startswith(f"{block}."))

    def _pass(self, group: _Group) -> int:
        """Run all micro-batches with gradients for the group's parameters; returns the peak number of bytes held."""
        owners: dict[int, set[str]] = {}
        for name, module in self.model.named_modules():
            for p in module._parameters.values():
                if p is not None:
                    owners.setdefault(id(p), set()).add(name)
        own = [p for p in self.model.parameters() if owners[id(p)] & group.judged]
        whole = [p for p in own if owners[id(p)] <= group.judged]
        wanted = {id(p) for p in own} | {id(p) for p in self._first_parameters()}
        judge = GradientJudge(self.model, self.log, self._twin, group.judged, owners)
        held = 0
        with differentiable(self.model, lambda p: id(p) in wanted):
            for number, batch in enumerate(self.batches):
                calls, sent = self._micro_batch(number, batch, group, whole)
                with host_arithmetic():
                    judge.micro_batch(calls, sent, whole)
                    if "" in group.judged:
                        judge.loss(calls, functools.partial(loss_of, batch=batch))
                held = max(held, calls.nbytes() + sum(p.nbytes for p in whole))
        for p in own:  # if modules outside the group use it, parts of its gradient are unknown here
            self.parameters[id(p)] = judge.parameters.get(id(p), Share(0, 0))
            if owners[id(p)] - group.judged:
                self.parameters[id(p)] = Share(0, p.numel())
        return held

    def _first_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters the data reaches first: if they require gradients, so does every call after them."""
        first = [unit.module for unit in self._anatomy.units if unit.place == "embed"] or list(self._blocks[:1])
        for name in first:
            yield from self.model.get_submodule(name).parameters()

    def _micro_batch(
        self, number: int, batch: Batch, group: _Group, parameters: Sequence[nn.Parameter]
    ) -> tuple[GradientCalls, ParameterGradients]:
        self.log.begin(number)
        states = HostStates()
        calls = GradientCalls(CallTree(states, self.phase, self.log.forwards))
        sent = ParameterGradients(parameters)

        def where(unit: Unit, operator: str) -> bool:
            return unit.module in group.watched

        try:
            with (
                watch(self.model, calls.end, where, before=calls.begin, anatomy=self._anatomy),
                without_checkpointing(),
            ):
                output = self.model(**without_cache(self.model), **batch)
            states.settle()
            loss = loss_of(output, batch)
            if loss is None or loss.grad_fn is None:
                raise _NoGradient(f"the output of {type(self.model).__name__} has no gradient")
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # autograd's, or the model's own, which ran without gradients
            reason = str(error).strip().partition("\n")[0][:120]
            raise _NoGradient(f"{type(self.model).__name__} can't be differentiated ({reason})") from error
        finally:
            sent.remove()
        return calls, sent


def loss_of(output: Any, batch: Batch) -> Tensor | None:
    """Summed next-token cross entropy; for an output without a vocabulary, a fixed sum of its first numbers.

    The first token follows the last, so that the last position has a gradient too and a fault there is visible.
    """
    ids: Any = batch.get("decoder_input_ids", batch.get("input_ids"))
    logits = output["logits"] if isinstance(output, dict) and "logits" in output else first_floating(output)
    if logits is None:
        return None
    tokens = isinstance(ids, Tensor) and logits.dim() == 3 and logits.shape[:2] == ids.shape
    if tokens and ids.shape[1] > 1 and int(ids.max()) < logits.shape[-1]:
        following = ids.roll(-1, 1).reshape(-1).to(logits.device)
        return F.cross_entropy(logits.float().reshape(len(following), -1), following, reduction="sum")
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.randn(logits.shape[-1], generator=generator, device="cpu").to(logits.device)
    return (logits.float() * weights).sum()
