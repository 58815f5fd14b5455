"""Runs trials on a loaded model, one slice of samples at a time, in waves until no more are proposed.

For the current slice the runner keeps the clean logits and every block's clean output, so that a trial costs only the
blocks from its first noisy one on. Trials of one slice should run consecutively.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from noisescope.errors import UnsupportedModel
from noisescope.model.anatomy import EXPERTS
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import evaluating, input_device
from noisescope.model.loading import Subject
from noisescope.probe.draws import ENGINE_VERSION
from noisescope.probe.inject import Probe
from noisescope.probe.prefix import Prefix, first_noisy_block
from noisescope.runs.batches import GIB, Batch, Material, Piece, Room, lay_out
from noisescope.trials import Conditions, Result, Results, Slice, Trial, missing

if TYPE_CHECKING:
    from noisescope.runs.store import Store  # a worker of a cluster runs trials and knows no store


Finish = Callable[[], Result]
NO_MEMORY = "out of memory even with one sample at a time and no cached prefixes: use a smaller --slice"
NOT_CAUSAL = "{} {}, but scoring works only for causal language models: use inject() and your own evaluation"
_ALL_AT_ONCE = ("gradients", "curvature")
PIECE = 2 * GIB  # of logits computed at once in scoring: more are done in pieces, or they would rule the memory
_PIECE_SHARE = 16  # of the memory beside the weights, one part in so many


@dataclass
class Clean:
    """What one slice is compared with: its batches and their clean logits, [N, V] of scored rows per piece."""

    slice: Slice
    batches: list[Batch]
    logits: list[list[Tensor]]


class TrialRunner:
    """Runs trials on a subject; use it in a `with`, because it keeps the model open."""

    def __init__(
        self,
        subject: Subject,
        materials: Iterable[Material],
        *,
        metric: Callable[..., Any] | None = None,
        memory: float | None = None,  # GiB beside the weights; None: what is free
    ) -> None:
        self.subject = subject
        self.model = subject.model
        self.anatomy = subject.anatomy
        self.materials = {material.fingerprint: material for material in materials}
        self.metric = metric
        self.device = input_device(self.model)
        self.prefix = Prefix(self.model, self.anatomy)
        self.reuse: bool | None = None  # whether prefixes may be reused: tried on the first slice
        self.forwards = 0.0  # of one sequence, in parts where blocks were passed by; a backward counts as one, too
        self.notes: list[str] = []
        self.squares: dict[Slice, Mapping[str, Tensor]] = {}  # runs/calibrated_plans.py
        self._clean: Clean | None = None
        self._batch_size: int | None = None  # samples at once; None: a whole slice
        self.room = Room.on(self.model, self.anatomy, self.device, memory)
        self._scopes = contextlib.ExitStack()
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(self.model).forward).parameters

    def __enter__(self) -> TrialRunner:
        with contextlib.ExitStack() as entered:
            entered.enter_context(evaluating(self.model))
            entered.enter_context(self.prefix)
            self._scopes = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._clean = None
        self._scopes.__exit__(*error)

    # -- one trial

    def run(self, trial: Trial) -> Result:
        """The trial's result. An error inside it becomes a failed result."""
        return self.begin(trial)()

    def begin(self, trial: Trial) -> Finish:
        """Submit the trial's work to the device; the returned function waits for it and builds the result.

        Begun before the last one is finished, a trial keeps an accelerator busy meanwhile. Running out of memory halves
        the batch and starts the trial again, for noise belongs to samples and positions, not to batches.
        """
        from noisescope.runs.measures import MEASURES

        while True:
            try:
                found = MEASURES[trial.measure](self, trial)
            except Exception as error:  # the model's code and the user's metric may raise anything; the run continues
                if not _out_of_memory(error):
                    found = _failure(error)
                elif trial.measure in _ALL_AT_ONCE:  # smaller batches would not help them, and slow all others
                    if self._clean is not None:
                        self.forget_slice()
                        continue
                    found = Result(error="out of memory: gradients and curvature need all their samples in one batch")
                elif self._shrink(trial.slice):
                    continue
                else:
                    found = Result(error=NO_MEMORY)
            return functools.partial(_finish, found)

    def _shrink(self, part: Slice) -> bool:
        """Halve the batch; then drop prefixes; False if nothing is left to give up."""
        self.forget_slice()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = self._batch_size or part.stop - part.start
        if size > 1:
            self._batch_size = (size + 1) // 2
            self.notes.append(f"out of memory: {self._batch_size} samples at a time from now on")
            return True
        if self.reuse is not False:
            self.reuse = False
            self.notes.append("out of memory: clean prefixes are no longer cached")
            return True
        return False

    def gradient_batches(self, part: Slice, wanted: int) -> list[Batch]:
        """The slice as batches whose gradients fit; what is kept of a slice gives way to them."""
        longest = self.longest(part)
        if self._clean is not None:
            kept = self.room.needs.kept(self.longest(self._clean.slice) * sum(len(b.ids) for b in self._clean.batches))
            if self.room.gradients(longest, kept) != self.room.gradients(longest, 0):
                self.forget_slice()
        fits = self.room.gradients(longest, 0)
        if self.device.type != "cpu" and fits is not None:
            wanted = part.stop - part.start
        if any(unit.kind == EXPERTS for unit in self.anatomy.units):
            wanted = 1  # rows are sorted by expert: of several samples it is not known whose a row is
        return self.batches(part, size=self.fitting(wanted, fits, "backward"), whole=True)

    def longest(self, part: Slice) -> int:
        """Tokens of the longest sample, all its choices together."""
        return max(sum(len(one.ids) for one in group) for group in self.materials[part.data].groups(part))

    def fitting(self, wanted: int, fits: int | None, what: str) -> int:
        """Samples per batch; where memory allows fewer than wanted, a note says so."""
        size = self.batch_size(min(wanted, fits or wanted))
        room = (self.room.bytes or 0) / GIB
        allowed = f"{room:.1f}" if room >= 1 else f"{room:.2g}"
        note = f"samples per {what} at once: {size}; {allowed} GiB of memory are allowed beside the weights"
        if fits is not None and fits < wanted and note not in self.notes:
            self.notes.append(note)
        return size

    def batch_size(self, wanted: int) -> int:
        """Samples per batch: as many as requested, unless memory ran out before."""
        return min(wanted, self._batch_size or wanted)

    # -- forwards

    def batches(self, part: Slice, size: int | None = None, *, whole: bool = False) -> list[Batch]:
        """The slice as batches of at most `size` samples, as many as fit; `whole` leaves each in one piece."""
        groups = self.materials[part.data].groups(part)
        longest, needs = self.longest(part), self.room.needs
        if size is None:  # beside what is kept of the slice
            kept = len(groups) * longest * (needs.logits + (needs.blocks * needs.hidden if self.reuse else 0))
            size = self.fitting(len(groups), self.room.forwards(longest, kept), "forward")
        size = self.batch_size(size)
        parts = [(at, groups[at : at + size]) for at in range(0, len(groups), size)]
        return [lay_out(p, at, self.device, positions=None if whole else self._positions(p)) for at, p in parts]

    def _positions(self, groups: Sequence[tuple[Any, ...]]) -> int | None:
        """Positions whose logits fit into a piece. Pieces are few: each is another call of the model."""
        logits, rows = self.room.needs.logits, sum(map(len, groups))
        if not logits or not self._keeps_logits or not self.reuse:
            return None
        most = PIECE if self.room.bytes is None else min(PIECE, self.room.bytes // _PIECE_SHARE)
        return max(1, most // (logits * rows))

    def forward(self, batch: Batch, piece: Piece | None = None) -> Tensor:
        """Logits [B * K, V] of a piece's positions."""
        kept = (piece or batch.whole).kept
        wanted = {"logits_to_keep": kept} if self._keeps_logits else {}
        logits: Tensor = self.model(input_ids=batch.ids, use_cache=False, **wanted).logits
        if not self._keeps_logits:
            logits = logits[:, kept]
        return logits.flatten(0, 1)

    def _pieces(
        self, batch: Batch, start: int, number: Hashable, probe: Probe | None = None
    ) -> Iterator[tuple[Piece, Tensor]]:
        """Logits piece by piece: the blocks run once, what follows them once a piece."""
        for piece in batch.pieces:
            if probe is not None:
                probe.rows(batch.rows)  # again for each piece: a second forward would count positions on
            first = piece is batch.pieces[0]
            skipping = self.prefix.starting_at(start, number) if first else self.prefix.repeating_the_last_block(number)
            with skipping:
                logits = self.forward(batch, piece)
            yield piece, logits
            del logits
        self.forwards += len(batch.ids) * (1 - start / (len(self.anatomy.blocks) + 1))

    def clean(self, part: Slice) -> Clean:
        """The slice's clean logits, computed once; prefixes are recorded on the way."""
        if self.reuse is None:
            self.reuse = self._prefix_holds(part)
        tokens = self.longest(part) * (part.stop - part.start)
        if self.reuse and not self.room.keeps_blocks(tokens):
            self.reuse = False
            needed = self.room.needs.kept(tokens) / GIB
            self.notes.append(f"clean prefixes are not cached: {needed:.1f} GiB per slice, too much for the memory")
        if self._clean is None or self._clean.slice != part:
            self.forget_slice()
            made = Clean(part, self.batches(part), [])
            with torch.no_grad():
                for number, batch in enumerate(made.batches):
                    with self.prefix.recording(number) if self.reuse else contextlib.nullcontext():
                        pieces = self._pieces(batch, 0, number)
                        made.logits.append([_rows(logits, piece.scored) for piece, logits in pieces])
            self._clean = made
        return self._clean

    @torch.no_grad()
    def check_causal(self, part: Slice) -> None:
        """Raise if a later token changes an earlier prediction: batches here have no mask and rely on causality."""
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedModel(NOT_CAUSAL.format(type(self.model).__name__, "is an encoder and a decoder"))
        ids = torch.tensor([self.materials[part.data].groups(part)[0][0].ids], device=self.device)
        if ids.shape[1] < 3:
            return
        changed = ids.clone()
        changed[0, -1] = ids[0, 0] if int(ids[0, 0]) != int(ids[0, -1]) else ids[0, 1]
        try:
            with evaluating(self.model):  # with dropout two forwards differ everywhere
                first, second = (self.model(input_ids=x, use_cache=False).logits[0].float() for x in (ids, changed))
        except Exception:  # a model that does not run: the trials will report how
            return
        moved = (first - second).abs().amax(-1)  # [T]; the last token's own prediction has to change
        if float(moved[:-1].max()) > 1e-3 * float(moved[-1]):
            raise UnsupportedModel(NOT_CAUSAL.format(type(self.model).__name__, "attends to later tokens"))

    def forget_slice(self) -> None:
        """Release the current slice."""
        self._clean = None
        self.prefix.forget()

    @torch.no_grad()
    def _prefix_holds(self, part: Slice) -> bool:
        """Whether prefixes may be reused: tested on one sample, whose logits must match bit for bit."""
        groups = self.materials[part.data].groups(part)[:1]
        positions = (len(groups[0][0].ids) + 1) // 2 if self._keeps_logits else None
        batch = lay_out(groups, 0, self.device, positions=positions)
        last = len(self.anatomy.blocks) - 1
        try:
            with self.prefix.recording("trial"):
                clean = [self.forward(batch, piece) for piece in batch.pieces[:1]]
            holds = last > 0 and self.prefix.usable("trial")
            if holds:
                clean += [self.forward(batch, piece) for piece in batch.pieces[1:]]
            for start in {(last + 1) // 2, last} if holds else ():  # late blocks may need more than hidden states
                again = [logits for _, logits in self._pieces(batch, start, "trial")]
                holds = holds and all(torch.equal(a, b) for a, b in zip(again, clean, strict=True))
        except Exception as error:  # whatever a model does when blocks are passed by, it can't be done with this one
            if _out_of_memory(error):
                raise
            holds = False
        self.prefix.forget()
        if not holds:
            self.notes.append("this model can't reuse clean prefixes, so every trial computes all blocks")
        return holds

    def noisy(self, part: Slice, probe: Probe) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Every piece of every batch, with its clean logits [N, V] of scored rows and its noisy ones [B * K, V]."""
        clean = self.clean(part)
        start = first_noisy_block(probe.injection, self.anatomy) if self.reuse else 0
        with probe, torch.no_grad():
            for number, batch in enumerate(clean.batches):
                pieces = self._pieces(batch, start, number, probe)
                for before, (piece, after) in zip(clean.logits[number], pieces, strict=True):
                    yield piece, before, after
                    del after


def conditions(subject: Subject) -> Conditions:
    """What all trials on this subject share."""
    weights = next(iter(subject.model.parameters()))
    config = getattr(subject.model, "config", None)
    return Conditions(
        model=model_fingerprint(subject.model),
        dtype=str(weights.dtype).removeprefix("torch."),
        device=weights.device.type,
        attention=str(getattr(config, "_attn_implementation", None) or "own"),
        engine=ENGINE_VERSION,
    )


def _finish(found: Result | Finish) -> Result:
    """The end of a trial, where a device reports errors."""
    try:
        return found if isinstance(found, Result) else found()
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Result:
    name = type(error).__name__
    return Result(facts={"error_type": name}, error=f"{name}: {' '.join(str(error).split())[:500]}")


def _rows(logits: Tensor, wanted: Tensor) -> Tensor:
    """Chosen rows of logits; no copy where all are wanted."""
    if len(wanted) == len(logits):  # in order by construction
        return logits
    return logits.index_select(0, wanted.to(logits.device))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
    )


# -- waves: ask which trials are wanted, run those without a result


class Progress(Protocol):
    """Called at the start of every wave, and at the start and end of every trial."""

    def wave(self, trials: int) -> None: ...
    def start(self, trial: Trial) -> None: ...
    def step(self, trial: Trial, result: Result, seconds: float) -> None: ...


class NoProgress:
    """A Progress that shows nothing."""

    def wave(self, trials: int) -> None: ...
    def start(self, trial: Trial) -> None: ...
    def step(self, trial: Trial, result: Result, seconds: float) -> None: ...


class Executor(Protocol):
    """Runs trials, each once, and stores every result immediately."""

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None: ...


def run_waves(
    propose: Callable[[Results], Iterable[Trial]], store: Store, execute: Executor, progress: Progress
) -> None:
    """Run waves until nothing more is proposed. Stored results are not computed again."""
    while wanted := missing(propose(store), store):
        progress.wave(len(wanted))
        execute(wanted, store, progress)


@dataclass(frozen=True)
class LocalExecutor:
    """Runs trials in this process, slice by slice: the runner keeps the clean prefix of one slice at a time."""

    runner: TrialRunner

    def __call__(self, trials: list[Trial], store: Store, progress: Progress) -> None:
        waiting: deque[Callable[[], None]] = deque()
        behind = 0 if self.runner.device.type == "cpu" else 1
        for trial in sorted(trials, key=lambda trial: (trial.slice.data, trial.slice.start)):  # stable within a slice
            started = time.perf_counter()
            progress.start(trial)
            finish = self.runner.begin(trial)
            begun = time.perf_counter() - started
            waiting.append(functools.partial(_store, trial, finish, begun, store, progress))
            if len(waiting) > behind:  # an accelerator works on this trial while the last one is put away
                waiting.popleft()()
        while waiting:
            waiting.popleft()()


def _store(trial: Trial, finish: Finish, begun: float, store: Store, progress: Progress) -> None:
    """Put a result away; `begun` is how many seconds it took to begin the trial."""
    started = time.perf_counter()
    result = finish()
    seconds = begun + time.perf_counter() - started
    store.put(trial, result, seconds)
    progress.step(trial, result, seconds)
