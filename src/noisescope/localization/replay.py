"""`replay`: give each module the inputs it had on a good device, and compare its output with that device's.

It takes one forward per batch of the reference's prompts. Every module receives the reference's own input, and its
output is replaced by the reference's, so whatever comes next (adds, rotary angles, fused attention) also starts from
good numbers: errors don't accumulate, and a difference belongs to the operator that made it. The tolerance is the
round-off of both sides (roundoff_floors.py); the tests are the audit's (judge.py). The reference is assumed to be
correct. An input that arrives different from the reference's is a fault of the code between two operators (an add, a
gate) and is reported as the module's input.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.comparison.records import Batch, Record
from noisescope.errors import InvalidInput
from noisescope.localization.audit_log import AuditLog
from noisescope.localization.audit_verdict import conclude
from noisescope.localization.host_operators import Unseen, host_arithmetic, recompute
from noisescope.localization.host_products import Recomputed, Rows
from noisescope.localization.inputs import parts_of, recorded
from noisescope.localization.roundoff_floors import Reference, rounded_once
from noisescope.localization.tensors import host_rows
from noisescope.localization.verdict import Verdict
from noisescope.model.anatomy import ATTENTION, MODULE, Anatomy, Unit
from noisescope.model.forwards import device_of, evaluating, last_token_logits
from noisescope.model.loading import Subject
from noisescope.probe.watch import RecordedCall, WatchScope, watch
from noisescope.sites import FUSED, Site

_MOST_SCORES = 1 << 24  # attention scores recomputed in one call
# Roundings between numbers that agree and the sum that is compared: a block adds attention's and the MLP's output to
# what it was given, so two. Each is at most half an ulp on either device, at the largest number in it. A limit, not a
# measured null; judge.SLACK allows twice that.
_ADDS = 2


def replay(subject: Subject | nn.Module, reference: Record | str | Path, *, rows: int = 64, seed: int = 0) -> Verdict:
    """Find where a model computes differently from the device of a record made with full detail.

        ns.record(good, "gsm8k.jsonl", "good.record", detail="full")        # on the good device
        replay(suspect, "good.record")

    Of each operator `rows` tokens of a batch are compared: half of them spread evenly, half those that differ most.
    """
    if rows < 2:
        raise InvalidInput(f"rows must be at least 2, got {rows}")
    model, _, anatomy = parts_of(subject)
    record = recorded(reference, model)
    kept = {site: number for number, site in enumerate(record.sites) if record.whole(number, 0) is not None}
    if not kept:
        raise InvalidInput(
            f"{record.path} holds only sketches, but replay needs full tensors: record with --detail full"
        )
    units = (unit for unit in anatomy.units if any(unit.site(op) in kept for op in (*unit.operators, FUSED)))
    log = Comparer(dataclasses.replace(anatomy, units=tuple(units)), rows=rows, seed=seed)
    for number, batch in enumerate(record.batches):
        ids = torch.tensor(record.prompts[batch.first : batch.first + batch.count], device=device_of(model))
        log.begin(number)
        with evaluating(model), torch.no_grad(), Replay(anatomy, record, kept, batch, log).watch(model):
            logits = last_token_logits(model, ids)
        _compare_logits(log, kept, record, batch, logits)
    found = conclude(log)
    notes = found.notes
    if len(kept) < len(record.sites):
        partly = f"the record has full tensors for {len(kept)} of {len(record.sites)} sites: only those were checked"
        notes = (*notes, partly)
    return dataclasses.replace(found, method="replay", notes=notes)


def _compare_logits(log: Comparer, kept: dict[Site, int], record: Record, batch: Batch, logits: Tensor | None) -> None:
    """What the caller gets: the head's output, which was the reference's, unless something changes it afterwards."""
    head = next((site for site in kept if site.place == "lm_head" and site.tensor == "output"), None)
    known = record.logits()
    if head is None or known is None or logits is None:
        return
    stored = torch.tensor(known[batch.first : batch.first + batch.count]).to(logits.dtype)
    with host_arithmetic():
        log.compare_plainly(head, logits.cpu(), stored, stored)


class Comparer(AuditLog):
    """A log that checks outputs against another device's."""

    def compare(self, site: Site, callee: Any, args: tuple[Any, ...], kwargs: Any, y: Tensor, other: Tensor) -> None:
        """Check one call: its output here, and its output there for the same arguments."""
        self._count += 1
        try:
            everything = Rows(y.numel(), 0, y.device.type)
            here, there = (recompute(site.operator, callee, args, kwargs, side, everything) for side in (y, other))
        except Unseen:
            self.compare_plainly(site, y, other, other)
            return
        floor = here.reference
        doubled = dataclasses.replace(
            floor,
            values=there.y.double(),
            bounds=tuple(2 * bound for bound in floor.bounds),
            spread=None if floor.spread is None else math.sqrt(2) * floor.spread,
            systematic=None if floor.systematic is None else 2 * floor.systematic,
        )
        self._judge(site, dataclasses.replace(here, reference=doubled), self._count)

    def compare_plainly(self, site: Site, y: Tensor, other: Tensor, size: Tensor) -> None:
        """Check numbers that should be equal up to a few roundings at the given size."""
        self._count += 1
        out, values, sizes = (host_rows(t) for t in (y, other, size))
        bound = 2 * rounded_once(sizes.double().abs(), out.dtype)
        reference = Reference(values.double(), (bound,) * _ADDS)
        self._judge(site, Recomputed(out, reference), self._count)


class Replay:
    """Gives every recorded operator the reference's inputs and outputs, and compares its output here."""

    def __init__(self, anatomy: Anatomy, record: Record, kept: dict[Site, int], batch: Batch, log: Comparer) -> None:
        self.anatomy = anatomy
        self.record = record
        self.kept = kept
        self.batch = batch
        self.log = log
        self.most = log.rows.most

    def watch(self, model: nn.Module) -> WatchScope:
        return watch(model, self._on_call, self._is_recorded, before=self._before, repeated=True, anatomy=self.anatomy)

    def _is_recorded(self, unit: Unit, operator: str) -> bool:
        if operator == FUSED:
            return unit.site(FUSED) in self.kept
        whole = operator == "residual" or unit.kind == MODULE
        return unit.certain and unit.kind != ATTENTION and whole and unit.site(operator) in self.kept

    def _recorded(self, site: Site, like: Tensor, tensor: str = "output") -> Tensor | None:
        """A tensor of the record for the current batch, on the device of `like`."""
        number = self.kept.get(site)
        found = None if number is None else self.record.whole(number, self.batch.first, self.batch.count, tensor)
        if found is None:
            return None
        values = torch.tensor(found.values).to(like.device, like.dtype)
        if len(like) == 1:  # a table of positions is kept for every prompt
            values = values[:1]
        return values.reshape(like.shape) if values.numel() == like.numel() else values

    def _before(self, call: RecordedCall) -> Tensor | None:
        """Give a module the reference's input."""
        x = call.first_input
        if x is None or call.operator in ("residual", FUSED):
            return None
        with host_arithmetic():
            stored = self._recorded(call.site, x, "input")
            if stored is not None and stored.shape == x.shape and x.is_floating_point():
                here, there = _picked(self.most, x, stored)
                self.log.compare_plainly(dataclasses.replace(call.site, tensor="input"), here, there, there)
            return None if stored is None else _in_place_of(x, stored)

    def _on_call(self, call: RecordedCall) -> Any:
        return self._sum(call) if call.operator in ("residual", FUSED) else self._module(call)

    def _module(self, call: RecordedCall) -> Tensor | None:
        """Compare a module's output, and replace it by the reference's."""
        x, y = call.first_input, call.output
        if not isinstance(y, Tensor) or x is None:
            return None
        with host_arithmetic():
            stored = self._recorded(call.site, y)
            if stored is None:
                return None
            last = slice(y.shape[1] - stored.shape[1], None)  # of the head the record keeps the last tokens
            here, there, given = _picked(self.most, y[:, last], stored, x[:, last])
            self.log.compare(call.site, call.callee, (given,), {}, here, there)
            return _in_place_of(y, stored)

    def _sum(self, call: RecordedCall) -> Any:
        """A block's sum, or a fused attention call: its terms are the reference's already."""
        y, whole = call.output, call.output_tensor
        if whole is None:
            return None
        with host_arithmetic():
            stored = self._recorded(call.site, whole)
            if stored is None or stored.shape != whole.shape:
                return None
            if call.operator == FUSED:
                self._attention(call, whole, stored)
            else:
                x = whole if call.first_input is None else call.first_input
                size = torch.maximum(stored.abs(), x.abs()) if x.shape == whole.shape else stored.abs()
                self.log.compare_plainly(call.site, *_picked(self.most, whole, stored, size))
        return (stored, *y[1:]) if isinstance(y, tuple) else stored

    def _attention(self, call: RecordedCall, y: Tensor, stored: Tensor) -> None:
        """Process as many prompts as their scores fit into memory."""
        batch, heads, length = y.shape[0], y.shape[1], y.shape[-2]
        most = max(1, _MOST_SCORES // max(1, heads * length * length))

        def cut(value: Any) -> Any:
            return value[:most] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == batch else value

        few = tuple(map(cut, call.args)), {name: cut(value) for name, value in call.kwargs.items()}
        self.log.compare(call.site, call.callee, *few, y[:most], stored[:most])


def _picked(most: int, y: Tensor, other: Tensor, *more: Tensor) -> list[Tensor]:
    """Rows of tensors [..., C]: half of `most` spread evenly, half those in which y and `other` differ most."""
    gap = (y.float() - other.float()).abs().nan_to_num(torch.inf).reshape(-1, y.shape[-1]).amax(-1)
    count = len(gap)
    pick = torch.arange(count, device=y.device)
    if count > most:
        pick = torch.cat([pick[:: -(-2 * count // most)], gap.topk(most // 2).indices]).sort().values
    # Token ids, which an embedding is given, have one dimension less.
    flat = (t.flatten(0, -2) if t.dim() == y.dim() else t.flatten() for t in (y, other, *more))
    return [tensor[pick] for tensor in flat]


def _in_place_of(x: Tensor, stored: Tensor) -> Tensor:
    """The reference's numbers in the shape of x; if it kept only the last tokens, the others stay."""
    if stored.shape == x.shape:
        return stored
    changed = x.clone()
    changed[:, -stored.shape[1] :] = stored
    return changed
