"""A record's record.json, read: refused where it is no record, damaged, of another version, or contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.record_format import DESCRIPTION, FORMAT, TENSORS, VERSION, is_unfinished, prompts_digest

Facts = dict[str, Any]
Kinds = Mapping[str, tuple[type, ...]]

_RECORD: Kinds = {
    "model": (dict,),
    "dtype": (str,),
    "detail": (str,),
    "full_layers": (list,),
    "sketch": (dict,),
    "prompts": (list,),
    "prompts_sha256": (str,),
    "sites": (list,),
    "batches": (list,),
    "notes": (list,),
}
_SKETCH: Kinds = {"seed": (int,), "version": (int,)}
SITE: Kinds = {"operator": (str,), "place": (int, str), "module": (str,), "component": (str,), "occurrence": (int,)}
_BATCH: Kinds = {"first": (int,), "count": (int,), "length": (int,), "files": (list,)}
_FILE: Kinds = {"name": (str,), "bytes": (int,), "sha256": (str,)}


def read_description(folder: Path) -> Facts:
    """What record.json says of itself, and of the files beside it; those are not looked into."""
    file = folder / DESCRIPTION
    about = _parsed(folder, file)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidInput(f"{file} is no record of noisescope: it does not say {FORMAT!r}")
    if about.get("version") != VERSION:
        raise InvalidInput(
            f"{file} has version {about.get('version')!r} of the format; this noisescope reads {VERSION}"
        )
    wrong = next(_missing(about), None) or next(_contradictions(about), None)
    if wrong is not None:
        raise InvalidInput(f"{file}: {wrong}: damaged or altered. Copy it again, or record again")
    return about


def _parsed(folder: Path, file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "it was never finished: record again" if is_unfinished(folder) else "`noisescope record` writes one"
        raise InvalidInput(f"{folder} is no record, it holds no {DESCRIPTION}: {reason}") from None
    except OSError as error:
        raise InvalidInput(f"{file} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidInput(f"{file} is truncated or damaged: {error}. Copy it again, or record again") from error


def _missing(about: Facts) -> Iterator[str]:
    """Facts that are not there, or not of their kind."""
    yield from _not_of_kind("", [about], _RECORD)
    yield from _not_of_kind("sketch: ", [about["sketch"]], _SKETCH)
    yield from _not_of_kind("a site: ", about["sites"], SITE)
    yield from _not_of_kind("a batch: ", about["batches"], _BATCH)
    yield from _not_of_kind("a file: ", [file for batch in about["batches"] for file in batch["files"]], _FILE)


def _not_of_kind(where: str, rows: Sequence[Any], kinds: Kinds) -> Iterator[str]:
    for row in rows:
        for name, kind in kinds.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                yield f"{where}{name!r} is missing or no {' or '.join(one.__name__ for one in kind)}"


def _contradictions(about: Facts) -> Iterator[str]:
    """Facts that can't be so together: batches go through the prompts in order, and each has its own files."""
    prompts = about["prompts"]
    if prompts_digest(prompts) != about["prompts_sha256"]:
        yield "the prompts do not fit their checksum"
    if about["detail"] not in ("sketch", "full"):
        yield f"detail is sketch or full, not {about['detail']!r}"
    places, layers = {str(site["place"]) for site in about["sites"]}, set(map(str, about["full_layers"]))
    if not layers <= places:
        yield f"no site is in the full_layers {', '.join(sorted(layers - places))}"
    kept = places if about["detail"] == "full" else layers
    first = 0
    for number, batch in enumerate(about["batches"]):
        if batch["first"] != first:
            yield f"batch {number} begins with prompt {batch['first']}, where {first} is the next"
        lengths = {len(prompt) for prompt in prompts[first : first + batch["count"]]}
        if lengths != {batch["length"]}:
            yield f"the prompts of batch {number} have {sorted(lengths)} tokens, not the {batch['length']} it says"
        first += batch["count"]
        yield from _wrong_files(number, [file["name"] for file in batch["files"]], kept)
    if first != len(prompts):
        yield f"the batches have {first} prompts, where there are {len(prompts)}"


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
