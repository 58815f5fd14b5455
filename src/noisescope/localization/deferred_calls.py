"""Collects the calls of one operator and checks them together, so that its weight is copied to the host once."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from noisescope.localization.call_tree import Node, stacked
from noisescope.localization.host_operators import Unseen, host_arithmetic, recompute
from noisescope.localization.host_products import Recomputed, Rows
from noisescope.localization.judge import Judgement, judge

_WORKERS = 4  # each holds one operator's outputs in float64 several times over


@dataclass(frozen=True)
class Computed:
    """The host's recomputed result, with its judgement."""

    apart: tuple[tuple[Recomputed, Judgement], ...] = ()
    as_one: tuple[Recomputed, Judgement] | None = None
    checksums: int = 0
    unseen: str = ""  # why no formula could be used


@dataclass
class Deferred:
    """The calls of one operator, grouped by how they are checked."""

    apart: list[Node] = field(default_factory=list)  # each is judged by itself
    again: list[Node] = field(default_factory=list)  # repetitions with the same bits, which count where one was wrong
    others: list[Node] = field(default_factory=list)  # of other shapes, judged as one call
    checked: list[Node] = field(default_factory=list)  # of a batch that was judged, with attention decomposed

    @property
    def first(self) -> Node | None:
        return next(iter((*self.apart, *self.again, *self.others, *self.checked)), None)

    def takes(self, node: Node) -> bool:
        """Whether its rows are as wide as those that wait: rows [B, C, T] of a channel are as long as the text."""
        return self.first is None or self.first.output.shape[-1] == node.output.shape[-1]

    @property
    def as_one(self) -> list[Node]:
        return [*self.others, *self.checked]

    @property
    def nodes(self) -> list[Node]:
        return [*self.apart, *self.as_one]

    @property
    def ends(self) -> tuple[int, int]:
        """How many leading rows are always recomputed, and how many trailing rows are known already."""
        return _rows(self.apart), _rows(self.checked)

    def computed(self, rows: Rows) -> Computed:
        """All calls recomputed as one, and judged."""
        if not self.nodes:
            return Computed()
        whole = stacked(self.nodes)
        try:
            found = recompute(
                whole.operator, whole.callee, whole.args, whole.kwargs, whole.output, rows, autocast=whole.autocast
            )
        except Unseen as reason:
            return Computed(unseen=str(reason))
        parts, first = [], 0
        for node in self.apart:
            parts.append(found.part(first, tuple(node.output.shape[:-1])))
            first += _rows([node])
        rest = found.part(first, (_rows(self.as_one),)) if self.as_one else None
        judged = functools.partial(_with_judgement, probabilities=whole.operator == "softmax")
        return Computed(tuple(map(judged, parts)), None if rest is None else judged(rest), found.checksums)


def _with_judgement(found: Recomputed, *, probabilities: bool) -> tuple[Recomputed, Judgement]:
    return found, judge(found.y, found.reference, probabilities=probabilities)


def _rows(nodes: Sequence[Node]) -> int:
    return sum(node.output.shape[:-1].numel() for node in nodes)


def side_by_side(tasks: Sequence[Callable[[], Computed]]) -> Iterator[Computed]:
    """Results in order, several tasks at a time, because one operator alone does not keep many cores busy."""
    threads = torch.get_num_threads()
    workers = min(_WORKERS, threads, os.cpu_count() or 1, len(tasks))
    if workers < 2:
        yield from (task() for task in tasks)
        return

    def run(task: Callable[[], Computed]) -> Computed:
        with host_arithmetic():  # its modes belong to a thread
            return task()

    share = functools.partial(torch.set_num_threads, max(1, threads // workers))
    waiting: deque[Future[Computed]] = deque()
    try:
        with ThreadPoolExecutor(workers, "noisescope-audit", initializer=share) as pool:
            for task in tasks:
                waiting.append(pool.submit(run, task))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(threads)
