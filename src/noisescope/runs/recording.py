"""What a device computes on fixed prompts, written to disk while it runs.

A record is a folder: `record.json`, written last, and for each batch of prompts one file of sketches
(metrics/sketches.py), per-token figures of the blocks' outputs and the last token's logits. Full detail adds one file
per batch and place with the tensors themselves in their own dtype, so that no more than one place is ever held.
comparison/records.py reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noisescope.anatomy import Anatomy
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.evaluation import evaluating
from noisescope.metrics import sketches
from noisescope.probe.door import unwrap
from noisescope.record_format import DESCRIPTION, FORMAT, UNFINISHED, VERSION, is_unfinished, prompts_digest
from noisescope.runs.fingerprints import model_fingerprint
from noisescope.runs.forwards import Prompts, check_vocabulary, device_of, dtype_of, last_of
from noisescope.runs.recorded_batch import Detail, Recording, writing_into
from noisescope.sites import Site


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
    target = _new_folder(folder)
    ordered = tuple(sorted(prompts, key=len))  # stable: the same prompts give the same order on every machine
    sites: tuple[Site, ...] = ()
    batches: list[dict[str, Any]] = []
    files: list[Future[list[dict[str, Any]]]] = []
    notes: set[str] = set()
    with ThreadPoolExecutor(1) as disk:
        for first, count in _batches(ordered, batch):
            ids = torch.tensor(ordered[first : first + count], device=device_of(module))
            recording = Recording(module, anatomy, ids.shape, first, detail, target / f"{len(batches):04d}")
            with evaluating(module), torch.no_grad(), recording:
                logits = last_of(module, ids)
            tensors = recording.finish(logits)
            if batches and recording.sites != sites:
                raise NothingInjected("the model called other operators on later prompts than on the first")
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
        "model": {**about.get("model", {}), "fingerprint": model_fingerprint(module)},
        "dtype": dtype_of(module),
        "detail": "full" if detail.full else "sketch",
        "full_layers": sorted(detail.full_layers.intersection(site.place for site in sites)),
        "sketch": {"seed": sketches.SEED, "version": sketches.VERSION},
        "prompts": ordered,
        "prompts_sha256": prompts_digest(ordered),
        "sites": [_facts(site) for site in sites],
        "batches": written,
        "notes": sorted(notes.union(about.get("notes", ()))),
    }
    with writing_into(target):
        unfinished = target / UNFINISHED
        unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
        unfinished.replace(target / DESCRIPTION)
    return target


def _new_folder(folder: str | Path) -> Path:
    target = Path(folder)
    with writing_into(target):
        target.mkdir(parents=True, exist_ok=True)
        occupied = any(target.iterdir())
    if is_unfinished(target):
        raise InvalidInput(f"an unfinished record is in {folder}: remove it, or choose another with -o")
    if occupied:
        raise InvalidInput(f"{folder} is not empty: a record gets a folder of its own. Remove it, or choose another")
    return target


def _batches(prompts: Prompts, most: int) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbouring prompts of one length."""
    first = 0
    while first < len(prompts):
        count = 1
        while count < most and first + count < len(prompts) and len(prompts[first + count]) == len(prompts[first]):
            count += 1
        yield first, count
        first += count


def _facts(site: Site) -> dict[str, Any]:
    names = ("operator", "place", "module", "component", "occurrence")
    return {name: getattr(site, name) for name in names}
