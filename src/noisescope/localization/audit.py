"""`audit`: every operator computed again on the host, from the inputs that it really had.

Each operator's input and output are caught on the device; the host computes it in float64 from copies of those inputs
and of the weights. What differs by more than the round-off model allows (roundoff_floors.py, judge.py) is a suspect.
Each is judged on what it was given, so errors do not accumulate from layer to layer, and the first that fails is the
source.

Three forwards: one batch; another batch, with fused attention taken apart into its operators; the first batch again,
which shows what is not repeatable and what remembers the batch before. A few more where a fault inside attention asks
for them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.localization.audit_log import AuditLog
from noisescope.localization.audit_verdict import conclude, hidden_in_attention, suspects_inside_attention
from noisescope.localization.block_wiring import PART, Recorder, inner_modules
from noisescope.localization.host_operators import host_arithmetic, input_of
from noisescope.localization.inputs import Batch, batches_for, parts_of, remarks
from noisescope.localization.verdict import Verdict
from noisescope.model.anatomy import ATTENTION, CALLS, MODULE, Anatomy, Unit
from noisescope.model.forwards import evaluating
from noisescope.model.loading import Subject
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import FUSED

_FOLLOWING = ("linear", "silu", "gelu")  # operators whose input was made from outputs of the same block
_TRIES = 3  # forwards with attention taken apart in which a fault that comes and goes may show its operator


def audit(subject: Subject | nn.Module, inputs: Any = None, *, rows: int = 64, seed: int = 0) -> Verdict:
    """Where a model computes wrongly, by recomputing each of its operators on the host.

        verdict = audit(ns.load("path/to/model", device="cuda"))
        verdict.verdict, verdict.suspects[0].site, verdict.smallest_visible["linear"]

    `inputs` are a batch (the model's arguments as a dict, or token ids), a list of batches, or a list of texts; by
    default 2 x 32 tokens of built-in text. Operators with more rows (tokens) than `rows` are sampled, and the other
    rows of linears checked by checksums. `seed` chooses text and samples. The model runs as it is, in this
    thread and inside the scopes that are open; nothing of it is changed.
    """
    if rows < 2:
        raise InvalidInput(f"rows must be at least 2, got {rows}")
    model, tokenizer, anatomy = parts_of(subject)
    log = AuditLog(anatomy, rows=rows, seed=seed)
    if model is not (subject.model if isinstance(subject, Subject) else subject):
        log.remarks.append("a compiled model is looked at as it runs uncompiled: its own fused kernels are not seen")
    hooked = sum(bool(module._forward_hooks or module._forward_pre_hooks) for module in model.modules())
    if hooked:
        log.remarks.append(
            f"modules with forward hooks: {hooked}. What they change is seen only where it enters another operator of "
            "the same block"
        )
    batches = batches_for(model, tokenizer, inputs, seed)
    log.remarks += remarks(model, batches)
    with evaluating(model), torch.no_grad():
        every = frozenset(unit.module for unit in anatomy.units if unit.kind == ATTENTION)
        for number, batch in enumerate(batches):
            opened = every if number % 2 else frozenset[str]()
            _run(log, model, anatomy, batch, number, opened=opened, keep_hashes=number == 0)
        _run(log, model, anatomy, batches[0], 0, opened=frozenset(), repeated=True)
        for attempt in range(_TRIES):  # a fault that always shows is caught at once, if an operator inside has it
            for number, hidden in hidden_in_attention(log, passing_only=attempt > 0).items():
                _run(log, model, anatomy, batches[number], number, opened=hidden)
        inside = suspects_inside_attention(log)
        if inside:  # was it old data of the first batch? Only these are opened, so that all before them is as it was
            _run(log, model, anatomy, batches[0], 0, opened=inside)
    return conclude(log)


def _run(
    log: AuditLog,
    model: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    number: int,
    *,
    opened: frozenset[str],
    keep_hashes: bool = False,
    repeated: bool = False,
) -> None:
    log.begin(number, keep_hashes=keep_hashes, repeated=repeated)
    own = {name: value if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in batch.items()}

    def where(unit: Unit, operator: str) -> bool:
        return operator != FUSED or unit.module not in opened

    on_call = functools.partial(_on_call, log, Recorder(model))
    with watch(model, on_call, where, anatomy=_with_parts(model, anatomy)):
        model(**own)  # a cache that is given grows: each forward gets its own
    log.end()


def _on_call(log: AuditLog, recorder: Recorder, call: RecordedCall) -> None:
    """One call of an operator, of a block or of a part of a block."""
    unit, y = call.unit, call.output_tensor
    with host_arithmetic():
        if call.operator == "residual":
            if y is not None and call.first_input is not None:
                x = call.first_input
                log.block(unit, recorder, x, y, _angles(call.kwargs.get("position_embeddings"), x))
            recorder.clear()
            return
        if y is not None and isinstance(unit.place, int):
            if isinstance(call.callee, nn.Module):
                if call.operator == "norm" and call.first_input is not None:
                    recorder.got(unit.module, call.first_input)
                recorder.gave(unit.module, y)
            _between(log, call, y)
        if call.operator != PART:
            log.call(call.site, call.callee, call.args, call.kwargs, call.output)


def _between(log: AuditLog, call: RecordedCall, y: Tensor) -> None:
    """The call as the data flow needs it: which inputs must follow from outputs before it, and its own output."""
    unit, operator, occurrence = call.unit, call.operator, call.occurrence
    role = unit.module.removeprefix(f"{log.anatomy.blocks[unit.place]}.")  # type: ignore[index]
    if operator == FUSED:
        given = call.attention
        named = {" query": given.query, " key": given.key, " value": given.value}
        log.between(unit, role, FUSED, named, y, heads=True)
    elif isinstance(call.callee, nn.Module):
        follows = operator in _FOLLOWING or (operator == "norm" and unit.component == "attention")
        log.between(unit, role, operator, {"": input_of(call.args, call.kwargs)} if follows else {}, y)
    elif unit.kind == ATTENTION:
        first = {"": input_of(call.args, call.kwargs)} if operator == "matmul" else {}  # queries, then probabilities
        name = f"{role} {operator} {occurrence}"
        log.between(unit, name, operator, first, y, heads=True, occurrence=occurrence)
    elif unit.kind == CALLS and operator in _FOLLOWING:
        name = f"{role} {operator} {occurrence}"
        log.between(unit, name, operator, {"": input_of(call.args, call.kwargs)}, y, occurrence=occurrence)


def _angles(given: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [B or 1, T, D] of x [B, T, C]; None for what else has that name (complex, by axis, learned)."""
    pair = isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(each, Tensor) for each in given)
    if not pair or x.dim() != 3:
        return None
    fits = all(t.is_floating_point() and t.dim() == 3 and t.shape[0] in (1, len(x)) for t in given)
    return (given[0], given[1]) if fits and all(t.shape[1] == x.shape[1] for t in given) else None


def _with_parts(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """The anatomy with the modules between a block and its operators as units of their own (an MLP, a MoE layer).

    Not where a block's own function calls are watched: a wrapper around a part of it would hide the calls made there.
    """
    units = {unit.module for unit in anatomy.units}
    loose = {unit.place for unit in anatomy.units if unit.kind == CALLS}
    found = (
        Unit(name, MODULE, place, "", (PART,))
        for place, name, _ in inner_modules(model, anatomy)
        if place not in loose and name not in units
    )
    return dataclasses.replace(anatomy, units=(*anatomy.units, *found))
