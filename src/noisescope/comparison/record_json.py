"""A record's record.json, read: refused where it is no record, damaged, of another version, or contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, from_json
from noisescope.record_format import DESCRIPTION, FORMAT, TENSORS, VERSION, is_unfinished, prompts_digest
from noisescope.sites import Place


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
    """Sketches of another seed or version can't be subtracted."""

    seed: int
    version: int


@dataclass(frozen=True)
class RecordedSite:
    operator: str
    place: Place
    module: str
    component: str
    occurrence: int


@dataclass(frozen=True)
class RecordedFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RecordedPrompts:
    """A batch: `count` prompts from `first` on, all of one length, and the files with their tensors."""

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
    """What record.json says of itself, and of the files beside it; those are not opened."""
    file = folder / DESCRIPTION
    found = _parsed(folder, file)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InvalidInput(f"{file} is no record of noisescope: it does not say {FORMAT!r}")
    if found.get("version") != VERSION:
        raise InvalidInput(
            f"{file} has version {found.get('version')!r} of the format; this noisescope reads {VERSION}"
        )
    try:
        about = from_json(Description, found, "record")
        wrong = next(_contradictions(about), None)
    except InvalidInput as error:
        wrong = str(error)
    if wrong is not None:
        raise InvalidInput(f"{file}: {wrong}: damaged or altered. Copy it again, or record again")
    return about


def _parsed(folder: Path, file: Path) -> Json:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "it was never finished: record again" if is_unfinished(folder) else "`noisescope record` writes one"
        raise InvalidInput(f"{folder} is no record, it holds no {DESCRIPTION}: {reason}") from None
    except OSError as error:
        raise InvalidInput(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is truncated or damaged: {error}. Copy it again, or record again") from error


def _contradictions(about: Description) -> Iterator[str]:
    """Facts that can't be so together: batches go through the prompts in order, and each has its own files."""
    if prompts_digest(about.prompts) != about.prompts_sha256:
        yield "the prompts do not fit their checksum"
    places, layers = {str(site.place) for site in about.sites}, set(map(str, about.full_layers))
    if not layers <= places:
        yield f"no site is in the full_layers {', '.join(sorted(layers - places))}"
    kept = places if about.detail == "full" else layers
    first = 0
    for number, batch in enumerate(about.batches):
        if batch.first != first:
            yield f"batch {number} begins with prompt {batch.first}, where {first} is the next"
        lengths = {len(prompt) for prompt in about.prompts[first : first + batch.count]}
        if lengths != {batch.length}:
            yield f"the prompts of batch {number} have {sorted(lengths)} tokens, not the {batch.length} it says"
        first += batch.count
        yield from _wrong_files(number, [file.name for file in batch.files], kept)
    if first != len(about.prompts):
        yield f"the batches have {first} prompts, where there are {len(about.prompts)}"


def _wrong_files(number: int, names: Sequence[str], kept: set[str]) -> Iterator[str]:
    """One file of sketches, and whole tensors of the places that are kept; none from elsewhere."""
    found = [TENSORS.fullmatch(name) for name in names]
    for name, match in zip(names, found, strict=True):
        if match is None or int(match["batch"]) != number:
            yield f"batch {number} can't have a file {name!r}"
    held = [match["place"] for match in found if match is not None]
    if held.count(None) != 1:
        yield f"batch {number} has {held.count(None)} files of sketches, not one"
    whole = {place for place in held if place is not None}
    if whole != kept:
        has, said = (", ".join(sorted(places)) or "none" for places in (whole, kept))
        yield f"batch {number} has whole tensors of {has}, by detail and full_layers of {said}"
