"""Clean prefixes: a trial whose first noisy block is 20 need not compute blocks 0 to 19 again.

One clean forward of a batch stores every block's output. In later forwards of the same batch the blocks before the
first noisy one return the stored output. Embedding, masks and rotary tables are still computed by the model's own code,
so this file needs no knowledge of architectures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.injection import Injection
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.probe.forward_patching import ModelScope
from noisescope.probe.forward_wrapper import RUN
from noisescope.probe.operator_target import CallListener, Target
from noisescope.probe.recorded_call import RecordedCall


def first_noisy_block(injection: Injection, anatomy: Anatomy) -> int:
    """The first block that an injection touches; 0 where it touches what comes before, their number where none."""
    first = len(anatomy.blocks)
    for unit in anatomy.units:
        if any(injection.selects(unit.site(operator)) for operator in unit.injectable):
            if isinstance(unit.place, int):
                first = min(first, unit.place)
            elif unit.place in ("embed", "rotary"):
                return 0
    return first


class Prefix(ModelScope):
    """A scope that stores block outputs and lets forwards start after them.

    with Prefix(model) as prefix:
        with prefix.recording("first batch"):
            clean = model(tokens)
        with prefix.starting_at(20, "first batch"), inject(model, ...):
            noisy = model(tokens)
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        super().__init__(model, anatomy)
        self._kept: dict[Hashable, dict[int, Any]] = {}  # batch -> block -> its whole output
        self._recording = False
        self._start = 0
        self._batch: dict[int, Any] = {}
        self._last: Any = None  # what the last block gave when it last ran, or stood for when it was passed by

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.forget()
        self._close()

    @contextlib.contextmanager
    def recording(self, batch: Hashable) -> Iterator[None]:
        """The forward inside is clean, and its block outputs are stored under the batch's name."""
        self._batch = self._kept[batch] = {}
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextlib.contextmanager
    def starting_at(self, block: int, batch: Hashable) -> Iterator[None]:
        """Forwards of this batch inside start at `block`, if possible."""
        self._batch = self._kept.get(batch, {})
        self._start = block if self.usable(batch) else 0
        try:
            yield
        finally:
            self._start = 0

    @contextlib.contextmanager
    def repeating_the_last_block(self, batch: Hashable) -> Iterator[None]:
        """In forwards inside the last block gives what it gave in the last forward, noise in the blocks included.

        So logits of other positions of that forward cost only what follows the blocks.
        """
        self._batch = {**self._kept[batch], len(self.anatomy.blocks) - 1: self._last}
        self._start = len(self.anatomy.blocks)
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._start, self._recording = 0, recording

    @contextlib.contextmanager
    def replacing(self, outputs: dict[int, Any]) -> Iterator[None]:
        """In forwards inside no block runs: each gives the output that is given for it."""
        self._batch, self._start = outputs, len(self.anatomy.blocks)
        try:
            yield
        finally:
            self._batch, self._start, self._last = {}, 0, None

    def forget(self) -> None:
        self._kept.clear()
        self._batch = {}
        self._last = None

    def kept_bytes(self) -> int:
        outputs = [y[0] if isinstance(y, tuple) else y for kept in self._kept.values() for y in kept.values()]
        return sum(y.numel() * y.element_size() for y in outputs if isinstance(y, Tensor))

    def usable(self, batch: Hashable) -> bool:
        """Whether every block ran, and ran once."""
        kept = self._kept.get(batch, {})
        return len(kept) == len(self.anatomy.blocks) and all(y is not None for y in kept.values())

    # -- the scope's side

    def target_at(self, unit: Unit, operator: str) -> Target | None:
        if operator != "residual" or unit.kind != MODULE:
            return None
        return CallListener(unit, operator, self._keep, rerun=self.rerun, recomputed=True, repeated=True)

    def shortcut(self, block: int, x: Any) -> Any:
        if self._recording or block >= self._start:
            return RUN
        if block == len(self.anatomy.blocks) - 1:
            self._last = self._batch[block]
        return self._batch[block]

    def _keep(self, call: RecordedCall) -> None:
        block = call.unit.place
        assert isinstance(block, int)
        if torch.is_grad_enabled():  # a kept output would hold its graph
            return
        if block == len(self.anatomy.blocks) - 1:
            self._last = call.output
        if self._recording:
            again = block in self._batch  # a block that runs twice in a forward can't be passed by
            self._batch[block] = None if again else call.output
