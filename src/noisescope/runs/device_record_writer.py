"""Records what a model computes on fixed prompts, writing to disk while it runs.

A record is a folder: `record.json`, written last, and for each batch of prompts one file of sketches
(measures/sketches.py), per-token figures of the blocks' outputs and the last token's logits. Full detail adds one file
per batch and place with the tensors themselves in their own dtype, so that no more than one place is ever held.
comparison/records.py reads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from noisescope import progress
from noisescope.atomic_write import write_file
from noisescope.comparison.records import DESCRIPTION, FORMAT, VERSION, is_unfinished, prompts_digest
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.measures import sketches
from noisescope.model.anatomy import ATTENTION, MODULE, Anatomy, Unit
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import Prompts, check_vocabulary, device_of, dtype_of, evaluating, last_token_logits
from noisescope.probe.forward_patching import unwrap
from noisescope.probe.watch import RecordedCall, WatchScope, watch
from noisescope.sites import FUSED, Place, Site

HEAD_TOKENS = 16  # of each prompt, the last, are kept of the head
_NARROW = 1 << 15  # channels up to which their numbers are kept in 16 bits
_MOST_PENDING = 1 << 24  # group sums that wait to be folded, over all sites: 64 MB
_MOST_UNREAD = 1 << 28  # bytes of outputs that wait to be read, but in the batch that is read both ways: 256 MiB
_LAUNCHING = ("cuda",)  # devices on which reading several outputs at once saves launches


@dataclass(frozen=True)
class Detail:
    """What is kept: sketches of everything, and full tensors of some blocks, or of all places."""

    full: bool = False
    full_layers: frozenset[int] = frozenset()
    inputs: bool = True  # of modules kept whole: a replay feeds them

    def keeps(self, place: Place) -> bool:
        return self.full or place in self.full_layers


class Reading(Enum):
    """When outputs are read: each at once, or those of a block together, unless the model overwrites them before."""

    AT_ONCE = auto()
    TOGETHER = auto()
    BOTH = auto()  # and compared: what was read at once counts. All of a block waits, longer than in any other batch


class Recording:
    """Sketches the outputs of one batch, and keeps full tensors if requested."""

    def __init__(
        self, shape: tuple[int, ...], first: int, detail: Detail, stem: Path, reading: Reading = Reading.AT_ONCE
    ) -> None:
        self.shape = (shape[0], shape[1])
        self.first = first
        self.detail = detail
        self.stem = stem
        self.notes: set[str] = set()
        self._sites: list[Site] = []
        self._pending: dict[tuple[int, ...], list[tuple[int, Tensor, Tensor]]] = {}  # sites, group sums, tokens' sizes
        self._waiting = 0
        self._reading = reading
        self._unread: list[tuple[int, Tensor]] = []
        self._unread_bytes = 0
        self._at_once: dict[int, Tensor] = {}  # group sums of outputs that are read again
        self._overwritten: list[Tensor] = []
        self._sketches: dict[int, tuple[Tensor, Tensor]] = {}  # of each site: the sketch and the size of each prompt
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # of each block: signed sum, largest size, its channel
        self._whole = Whole()
        self._files: list[dict[str, Any]] = []

    def watch(self, model: nn.Module, anatomy: Anatomy) -> WatchScope:
        return watch(model, self._on_call, _is_recorded, anatomy=anatomy)

    def _on_call(self, call: RecordedCall) -> None:
        y, unit, operator = call.output_tensor, call.unit, call.operator
        if y is None or not y.is_floating_point():
            return
        x = call.first_input if unit.kind == MODULE and operator != "residual" else None
        with torch._C.DisableTorchFunction():
            self.add(call.site, y, x, heads=unit.kind == ATTENTION and operator != "linear")

    def add(self, site: Site, y: Tensor, x: Tensor | None, *, heads: bool = False) -> None:
        """Add one output, and the input it came from."""
        y, x, shape = self._batch_first(site, y, x)
        rows = _by_token(y, shape, heads=heads)
        if rows is None:
            self.notes.add(f"{site.operator} outputs whose rows are not tokens (experts, tables) are not recorded")
            return
        number = len(self._sites)
        self._sites.append(site)
        together = self._reading is not Reading.AT_ONCE and rows.device.type in _LAUNCHING
        if self._reading is Reading.BOTH or not together:
            groups, sizes = sketches.read(rows, self.first)
            self._keep(number, rows, groups, sizes)
            if together:
                self._at_once[number] = groups
        if together:
            self._unread.append((number, rows))
            self._unread_bytes += rows.nbytes
            full = self._unread_bytes > _MOST_UNREAD and self._reading is Reading.TOGETHER
            if site.operator == "residual" or full:
                self._read_together()
        if self.detail.keeps(site.place):
            if self._whole.tensors and self._whole.place != site.place:
                self._write_whole()
            self._whole.place = site.place
            self._whole.keep(number, y, x if self.detail.inputs else None)

    def _read_together(self) -> None:
        found = sketches.read_together([rows for _, rows in self._unread], self.first)
        for (number, rows), (groups, sizes) in zip(self._unread, found, strict=True):
            if number in self._at_once:
                self._overwritten.append((groups != self._at_once.pop(number)).any())
            else:
                self._keep(number, rows, groups, sizes)
        self._unread.clear()
        self._unread_bytes = 0

    def _keep(self, number: int, rows: Tensor, groups: Tensor, sizes: Tensor) -> None:
        self._pending.setdefault(tuple(groups.shape), []).append((number, groups, sizes))
        self._waiting += groups.numel()
        if self._sites[number].operator == "residual":
            largest, channel = rows.abs().max(-1)
            index = torch.int16 if rows.shape[-1] <= _NARROW else torch.int32
            self._tokens.append((groups.sum(-1), largest, channel.to(index)))
        if self._waiting > _MOST_PENDING:
            self._fold()

    @property
    def next_reading(self) -> Reading:
        """How the next batch may be read, after one that was read both ways: NaN counts as overwritten."""
        kept = self._overwritten and not torch.stack(self._overwritten).any()
        return Reading.TOGETHER if kept else Reading.AT_ONCE

    def _batch_first(self, site: Site, y: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
        """Output and input with a row a prompt, and (prompts, tokens)."""
        batch, tokens = self.shape
        if site.place == "lm_head" and y.dim() == 3 and y.shape[1] == tokens:  # a vocabulary is wide
            tokens = min(tokens, HEAD_TOKENS)
            y, x = y[:, -tokens:], None if x is None else x[:, -tokens:]
        elif y.shape[:2] == (1, tokens):  # a table of positions, which all prompts share
            y = y.expand(batch, *y.shape[1:])
        elif y.dim() == 2 and y.shape[0] == batch * tokens:  # a router's, flat
            y = torch.unflatten(y, 0, self.shape)
            x = torch.unflatten(x, 0, self.shape) if x is not None and x.dim() == 2 else None
        return y, x, (batch, tokens)

    def _fold(self) -> None:
        for pending in self._pending.values():
            numbers, groups, sizes = zip(*pending, strict=True)
            folded = sketches.folded(torch.stack(groups), sketches.numbers_of(self.shape[1]))
            of_prompts = torch.linalg.vector_norm(torch.stack(sizes), dim=-1)
            self._sketches.update(zip(numbers, zip(folded, of_prompts, strict=True), strict=True))
        self._pending.clear()
        self._waiting = 0

    def _write_whole(self) -> None:
        number = len(self._files)  # a place may come twice: an encoder's and a decoder's embedding
        path = self.stem.with_name(f"{self.stem.name}-{number:03d}-{self._whole.place}.safetensors")
        self._files.append(_written(path, self._whole.tensors, {"same": json.dumps(self._whole.same)}))
        self._whole = Whole()

    @property
    def sites(self) -> tuple[Site, ...]:
        """In the order they ran."""
        return tuple(self._sites)

    def finish(self, logits: Tensor | None) -> dict[str, Tensor]:
        """What remains to be written of this batch, on the host."""
        if not self._sites:
            raise NothingInjected("the model ran, but none of its operators was observed: see `noisescope inspect`")
        self._read_together()
        self._fold()
        found = zip(*(self._sketches[number] for number in range(len(self._sites))), strict=True)
        tensors = {name: torch.stack(columns) for name, columns in zip(("sketch", "size"), found, strict=True)}
        for name, columns in zip(("sum", "max", "channel"), zip(*self._tokens, strict=True), strict=False):
            tensors[f"token_{name}"] = torch.stack(columns)
        if logits is not None:
            tensors["logits"] = logits
        return {name: tensor.detach().contiguous().to("cpu") for name, tensor in tensors.items()}

    def write(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """The files of this batch."""
        if self._whole.tensors:
            self._write_whole()
        return [_written(self.stem.with_suffix(".safetensors"), tensors, {}), *self._files]


def _is_recorded(unit: Unit, operator: str) -> bool:
    if unit.kind == ATTENTION:  # the operators inside it would take fused attention apart
        return operator == FUSED or (operator == "linear" and unit.certain and unit.place != "rotary")
    return unit.place != "rotary" and unit.certain


@dataclass
class Whole:
    """Tensors of one place, on the host; an input that is another operator's output is stored once."""

    place: Place = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    _held: dict[int, tuple[Tensor, int, str]] = field(default_factory=dict)  # alive, so that no address is used twice

    def keep(self, number: int, y: Tensor, x: Tensor | None) -> None:
        if x is not None:
            known = None if x.is_inference() else self._held.get(id(x))  # those don't count their changes
            if known is not None and known[1] == x._version:
                self.same[f"{number}.input"] = known[2]
            else:
                self._copy(f"{number}.input", x)
        self._copy(f"{number}.output", y)

    def _copy(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.detach().contiguous().to("cpu", copy=True)
        if not tensor.is_inference():
            self._held[id(tensor)] = (tensor, tensor._version, name)


def _by_token(y: Tensor, shape: tuple[int, int], *, heads: bool) -> Tensor | None:
    """y as [B, T, C]; None if its rows are not tokens (experts sort them)."""
    if heads and y.dim() == 4 and (y.shape[0], y.shape[2]) == shape:  # [B, H, T, D]
        y = y.transpose(1, 2)
    return y.flatten(2) if y.dim() >= 3 and tuple(y.shape[:2]) == shape else None


def _written(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """One file, and its expected size and checksum."""
    with writing_into(path.parent):
        save_file(tensors, path, metadata)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Report disk errors (no space, no permission) as something the user can fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"can't write into {folder}: {reason}. Free some space, or choose another folder with -o"
        ) from error


def write_record(
    model: nn.Module,
    anatomy: Anatomy,
    prompts: Prompts,
    folder: str | Path,
    *,
    detail: Detail,
    batch: int = 16,
    about: dict[str, Any],
) -> Path:
    """Run the model on prompts and write a record; `about` goes into record.json beside what is known here.

    Prompts of one length share a forward, so that nothing is padded. The model runs in this thread, inside the scopes
    that are open; another thread writes the sketches of a batch while the next one runs.
    """
    module = unwrap(model)
    check_vocabulary(module, prompts, "the data")

    def run(ids: Tensor, recording: Recording) -> Tensor | None:
        with evaluating(module), torch.no_grad(), recording.watch(module, anatomy):
            return last_token_logits(module, ids.to(device_of(module)))

    about = {**about, "dtype": dtype_of(module)}
    fingerprint = functools.partial(model_fingerprint, module)
    return write_batches(run, prompts, folder, detail=detail, batch=batch, about=about, fingerprint=fingerprint)


def write_batches(
    run: Callable[[Tensor, Recording], Tensor | None],
    prompts: Prompts,
    folder: str | Path,
    *,
    detail: Detail,
    batch: int,
    about: dict[str, Any],
    fingerprint: Callable[[], str],
) -> Path:
    """A record of what `run(ids, recording)` adds to the recording of each batch; `run` returns the last logits."""
    target = _new_folder(folder)
    ordered = tuple(sorted(prompts, key=len))  # stable: the same prompts give the same order on every machine
    sites: tuple[Site, ...] = ()
    batches: list[dict[str, Any]] = []
    files: list[Future[list[dict[str, Any]]]] = []
    notes: set[str] = set()
    parts, reading = list(_batches(ordered, batch)), Reading.BOTH
    with ThreadPoolExecutor(1) as disk, progress.plan(progress.Phase("batches", len(parts))):
        for first, count in progress.track("batches", parts):
            ids = torch.tensor(ordered[first : first + count])
            recording = Recording(ids.shape, first, detail, target / f"{len(batches):04d}", reading)
            tensors = recording.finish(run(ids, recording))
            reading = recording.next_reading if reading is Reading.BOTH else reading
            if batches and recording.sites != sites:
                raise NothingInjected("the model called different operators on later prompts than on the first")
            sites = recording.sites
            notes |= recording.notes
            if files:
                files[-1].result()  # one batch waits at most
            files.append(disk.submit(recording.write, tensors))
            batches.append({"first": first, "count": count, "length": ids.shape[1]})
    written = [{**facts, "files": found.result()} for facts, found in zip(batches, files, strict=True)]
    record = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "model": {**about.get("model", {}), "fingerprint": fingerprint()},
        "detail": "full" if detail.full else "sketch",
        "full_layers": sorted(detail.full_layers.intersection(site.place for site in sites)),
        "sketch": {"seed": sketches.SEED, "version": sketches.VERSION},
        "prompts": ordered,
        "prompts_sha256": prompts_digest(ordered),
        "sites": [site.facts() for site in sites],
        "batches": written,
        "notes": sorted(notes.union(about.get("notes", ()))),
    }
    with writing_into(target):
        write_file(target / DESCRIPTION, json.dumps(record) + "\n")
    return target


def _new_folder(folder: str | Path) -> Path:
    target = Path(folder)
    with writing_into(target):
        target.mkdir(parents=True, exist_ok=True)
        occupied = any(target.iterdir())
    if is_unfinished(target):
        raise InvalidInput(f"{folder} holds an unfinished record: remove it, or choose another folder with -o")
    if occupied:
        raise InvalidInput(f"{folder} is not empty, and a record needs its own folder: remove it, or choose another")
    return target


def _batches(prompts: Prompts, most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbouring prompts of one length."""
    first = 0
    while first < len(prompts):
        lengths = [len(ids) for ids in prompts[first : first + most]]
        count = next((n for n, length in enumerate(lengths) if length != lengths[0]), len(lengths))
        yield first, count
        first += count
