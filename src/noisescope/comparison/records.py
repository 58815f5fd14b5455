"""Reads records: what one device computed on fixed prompts, in a folder written by runs/device_record_writer.py.

A folder that is not a record, is damaged, of another version or inconsistent is rejected.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from noisescope.comparison.safetensors_reader import Numbers, TensorFile
from noisescope.errors import InvalidInput
from noisescope.sites import Place, Site
from noisescope.text_escaping import cut
from noisescope.untrusted_files import FileKind, fitting, members, parse_json, read_text

FORMAT = "noisescope record"
VERSION = 2  # 2: prompts have a checksum
DESCRIPTION = "record.json"
RECORD = FileKind("record", "It is truncated or damaged: copy it again, or record again", root="record")
_BEING_WRITTEN = re.compile(r"\.tmp.*|\.record\.json\..*\.part")  # by safetensors, by atomic_write
# 0003.safetensors: the sketches of batch 3; 0003-012-7.safetensors: its thirteenth file of whole tensors, of block 7
TENSORS = re.compile(r"(?P<batch>\d{4,9})(?:-\d{3,9}-(?P<place>\w+))?\.safetensors")


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token ids: two records are about the same prompts, and none was altered."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds only files of a record that was never finished."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ours = [name for name in names if not _BEING_WRITTEN.fullmatch(name)]
    return bool(ours) and all(TENSORS.fullmatch(name) for name in ours)


# -- record.json


@dataclass(frozen=True)
class RecordedModel:
    source: str
    architecture: str
    blocks: int
    fingerprint: str


@dataclass(frozen=True)
class RecordedData:
    source: str
    samples: int


@dataclass(frozen=True)
class SketchKind:
    """Sketches with different seeds or versions can't be subtracted."""

    seed: int
    version: int


@dataclass(frozen=True, kw_only=True)
class RecordedSite:
    operator: str
    place: Place
    module: str
    component: str
    occurrence: int

    @property
    def site(self) -> Site:
        return Site(self.operator, self.place, self.module, self.component, occurrence=self.occurrence)


@dataclass(frozen=True)
class RecordedFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RecordedPrompts:
    """A batch: `count` prompts starting at `first`, all of one length, and the files with their tensors."""

    first: int
    count: int
    length: int
    files: tuple[RecordedFile, ...]


@dataclass(frozen=True)
class Description:
    """record.json, as `noisescope record` writes it."""

    format: str
    version: int
    model: RecordedModel
    data: RecordedData
    device: str
    versions: Mapping[str, str]
    created: str
    dtype: str
    detail: Literal["sketch", "full"]
    full_layers: tuple[int, ...]
    sketch: SketchKind
    prompts: tuple[tuple[int, ...], ...]
    prompts_sha256: str
    sites: tuple[RecordedSite, ...]
    batches: tuple[RecordedPrompts, ...]
    notes: tuple[str, ...]


def read_description(folder: Path) -> Description:
    """The contents of record.json; the files it lists are not opened."""
    file = folder / DESCRIPTION
    if not file.exists():
        reason = "it was never finished: record again" if is_unfinished(folder) else "`noisescope record` writes one"
        raise InvalidInput(f"{folder} is not a record: it has no {DESCRIPTION}: {reason}")
    found = members(parse_json(read_text(file, RECORD), file, RECORD), file, RECORD)
    if found.get("format") != FORMAT:
        raise InvalidInput(f"{file} is not a noisescope record: it does not contain {FORMAT!r}")
    if found.get("version") != VERSION:
        raise InvalidInput(
            f"{file} has version {cut(repr(found.get('version')))} of the format; this noisescope reads "
            f"{VERSION}: record again"
        )
    about = fitting(Description, found, file, RECORD)
    for wrong in _contradictions(about):
        raise RECORD.refuse(file, wrong)
    return about


def _contradictions(about: Description) -> Iterator[str]:
    """Inconsistent facts: batches must cover the prompts in order, and each has its own files."""
    if prompts_digest(about.prompts) != about.prompts_sha256:
        yield "the prompts do not match their checksum"
    places, layers = {str(site.place) for site in about.sites}, set(map(str, about.full_layers))
    if not layers <= places:
        yield f"no site is in the full_layers {', '.join(sorted(layers - places))}"
    kept = places if about.detail == "full" else layers
    first = 0
    for number, batch in enumerate(about.batches):
        if batch.first != first:
            yield f"batch {number} begins with prompt {batch.first}, expected {first}"
        lengths = {len(prompt) for prompt in about.prompts[first : first + batch.count]}
        if lengths != {batch.length}:
            yield f"the prompts of batch {number} have {sorted(lengths)} tokens, not {batch.length} as it states"
        first += batch.count
        yield from _wrong_files(number, [file.name for file in batch.files], kept)
    if first != len(about.prompts):
        yield f"the batches have {first} prompts, expected {len(about.prompts)}"


def _wrong_files(number: int, names: Sequence[str], kept: set[str]) -> Iterator[str]:
    """Check for one file of sketches, full tensors of the selected places, and none of others."""
    found = [TENSORS.fullmatch(name) for name in names]
    for name, match in zip(names, found, strict=True):
        if match is None or int(match["batch"]) != number:
            yield f"batch {number} can't have a file {name!r}"
    held = [match["place"] for match in found if match is not None]
    if held.count(None) != 1:
        yield f"batch {number} has {held.count(None)} files of sketches, not one"
    whole = {place for place in held if place is not None}
    if whole != kept:
        has, wanted = (", ".join(sorted(places)) or "none" for places in (whole, kept))
        yield f"batch {number} has whole tensors of {has}, by detail and full_layers of {wanted}"


# -- the record


@dataclass(frozen=True)
class Batch:
    """Prompts first, first + 1, ... of one length, and their tensors by name: "sketch", "logits", "3.output" ..."""

    first: int
    count: int
    length: int
    read: Callable[[str], Numbers | None]


@dataclass(frozen=True)
class Record:
    """What one device computed; sites are in execution order. Arrays are read on demand."""

    path: str
    model: str  # fingerprint of its numbers, dtype included; "" where it is not known
    architecture: str
    dtype: str
    prompts: tuple[tuple[int, ...], ...]  # token ids; () where they are not known
    sites: tuple[Site, ...]
    batches: tuple[Batch, ...]
    sketch: SketchKind | None  # None where there are no sketches
    device: str = "unknown device"
    data: RecordedData | None = None
    detail: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Prompts, or the one batch of a dump that does not name them."""
        return sum(batch.count for batch in self.batches)

    def sketches(self) -> NDArray[np.float64] | None:
        """[sites, prompts, numbers]; prompts with fewer numbers than others are filled up with zeros."""
        arrays = self._arrays("sketch")
        if not arrays:
            return None
        whole = np.zeros((len(self.sites), self.count, max(array.shape[2] for array in arrays)))
        for batch, array in zip(self.batches, arrays, strict=True):
            whole[:, batch.first : batch.first + batch.count, : array.shape[2]] = array
        return whole

    def sizes(self) -> NDArray[np.float64] | None:
        """The norm of each site's output, [sites, prompts]."""
        arrays = self._arrays("size")
        return np.concatenate(arrays, axis=1, dtype=np.float64) if arrays else None

    def numbers(self) -> int:
        """How many numbers the sketches of one site have, over all prompts."""
        return sum(array.shape[1] * array.shape[2] for array in self._arrays("sketch"))

    def logits(self) -> NDArray[np.float64] | None:
        """The last token's [prompts, vocabulary]."""
        arrays = self._arrays("logits")
        return np.concatenate(arrays, dtype=np.float64) if len(arrays) == len(self.batches) else None

    def _arrays(self, name: str) -> list[NDArray[np.generic]]:
        """A tensor of every batch that has it."""
        found = [batch.read(name) for batch in self.batches]
        return [one.values for one in found if one is not None]

    def by_token(self, name: str) -> list[NDArray[np.float64]] | None:
        """Per-token values of the blocks' outputs, one array [blocks, tokens] per prompt: "sum", "max" or "channel"."""
        rows: list[NDArray[np.float64]] = []
        for batch in self.batches:
            found = batch.read(f"token_{name}")
            if found is None:
                return None
            rows.extend(np.asarray(found.values[:, row], dtype=np.float64) for row in range(batch.count))
        return rows

    def whole(self, site: int, first: int, count: int = 1, tensor: str = "output") -> Numbers | None:
        """A tensor of full detail, [prompts first to first + count, ...]; None if only a sketch was kept."""
        parts = []
        for batch in self.batches:
            start, stop = max(first, batch.first), min(first + count, batch.first + batch.count)
            if start < stop:
                found = batch.read(f"{site}.{tensor}")
                if found is None:
                    return None
                parts.append(Numbers(found.values[start - batch.first : stop - batch.first], found.dtype))
        if len(parts) == 1:
            return parts[0]
        return Numbers(np.concatenate([part.values for part in parts]), parts[0].dtype)


def read_record(path: str | Path) -> Record:
    """Read a record from its folder; rejected with a reason if it is damaged, unfinished or of another version."""
    folder = Path(path)
    about = read_description(folder)
    sites = tuple(one.site for one in about.sites)
    return Record(
        path=str(folder),
        model=about.model.fingerprint,
        architecture=about.model.architecture,
        dtype=about.dtype,
        prompts=about.prompts,
        sites=sites,
        batches=tuple(_batch(folder, one, len(sites)) for one in about.batches),
        sketch=about.sketch,
        device=about.device,
        data=about.data,
        detail=about.detail,
        created=about.created,
        versions=about.versions,
        notes=about.notes,
    )


def _batch(folder: Path, about: RecordedPrompts, sites: int) -> Batch:
    for file in about.files:
        if not (folder / file.name).is_file():
            raise InvalidInput(f"{folder} lacks {file.name}: copy the whole folder again, or record again")

    @functools.cache  # checksums are verified when the first tensor is wanted, once
    def opened() -> list[TensorFile]:
        files = [TensorFile(folder / one.name, one.bytes, one.sha256) for one in about.files]
        sketch = _tensor(files, "sketch")
        found = (0, 0) if sketch is None else sketch.values.shape[:2]
        if found != (sites, about.count):
            raise InvalidInput(
                f"{files[0].path} has sketches of {found[0]} sites and {found[1]} prompts, but record.json lists "
                f"{sites} and {about.count}: damaged or altered. Copy both again, or record again"
            )
        return files

    return Batch(about.first, about.count, about.length, lambda name: _tensor(opened(), name))


def _tensor(files: Iterable[TensorFile], name: str) -> Numbers | None:
    return next((found for file in files if (found := file.read(name)) is not None), None)


def site_key(site: Site) -> tuple[str, str, int]:
    """What two records know a site by; other tools' dumps don't name components."""
    return (site.operator, site.module, site.occurrence)


def check_comparable(a: Record, b: Record) -> None:
    """Reject two records that can't be subtracted."""
    if a.prompts and b.prompts and a.prompts != b.prompts:
        mine, its = (prompts_digest(side.prompts)[:12] for side in (a, b))
        raise InvalidInput(
            f"{b.path} was recorded on different prompts ({len(b.prompts)}, hash {its}) than {a.path} "
            f"({len(a.prompts)}, {mine}): record both on the same data, --samples and --max-tokens"
        )
    if a.sketch is not None and b.sketch is not None and a.sketch != b.sketch:
        raise InvalidInput(
            f"{b.path} has sketches of version {b.sketch.version} and seed {b.sketch.seed}, {a.path} of version "
            f"{a.sketch.version} and seed {a.sketch.seed}: they can't be compared. Record both with the same "
            f"version of noisescope"
        )
    if not set(map(site_key, a.sites)) & set(map(site_key, b.sites)):
        raise InvalidInput(f"{a.path} and {b.path} have no site in common, so there is nothing to compare")


def unlike(a: Record, b: Record) -> str:
    """Why two records do not come from the same arithmetic on the same numbers, so that round-off can't be assumed."""
    if a.dtype and b.dtype and a.dtype != b.dtype:
        return f"the records were computed in different dtypes ({a.dtype} and {b.dtype})"
    if a.model and b.model and a.model != b.model:
        return f"the weights or configs differ (fingerprints {a.model[:12]} and {b.model[:12]})"
    return ""
