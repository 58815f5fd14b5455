"""What a device computes on prompts, recorded for a comparison with another."""

from __future__ import annotations

from contextlib import nullcontext

from noisescope.api.facts import now, versions
from noisescope.api.materials import material_of
from noisescope.comparison.records import Record, read_record
from noisescope.errors import InvalidInput
from noisescope.faults.simulator import faulty
from noisescope.locators.prompts import prompt_ids
from noisescope.model import Subject
from noisescope.options.comparing import RecordOptions
from noisescope.options.signatures import asks
from noisescope.record_format import is_unfinished as is_unfinished
from noisescope.runs.forwards import Prompts, device_name
from noisescope.runs.recorded_batch import Detail
from noisescope.runs.recording import write_record

_GRID = 16  # prompts are cut to a multiple of so many tokens, so that many share a forward without padding


@asks(RecordOptions, "data", "output")
def record(subject: Subject, asked: RecordOptions) -> Record:
    """Run a model on prompts and write what every operator gave into the folder `output`.

        ns.record(ns.load("path/to/model", device="cuda"), "gsm8k.jsonl", "gpu.record", full_layers={9, 10})

    Sketches of every operator always; whole tensors of all operators with detail="full", else of the blocks in
    `full_layers`. Samples of `data` are cut to a multiple of 16 tokens.
    """
    anatomy, layers = subject.anatomy, frozenset(asked.full_layers)
    if not layers <= set(range(len(anatomy.blocks))):
        raise InvalidInput(f"full layers {sorted(layers)} are out of range: blocks are 0 to {len(anatomy.blocks) - 1}")
    if asked.prompts is not None:
        chosen = prompt_ids(
            subject.model, subject.tokenizer, asked.prompts, seed=0, count=asked.samples, length=asked.max_tokens
        )
        source = "prompts"
    else:
        chosen, source = _prompts_of(subject, asked)
    about = {
        "model": {"source": subject.source, "architecture": anatomy.architecture, "blocks": len(anatomy.blocks)},
        "data": {"source": source, "samples": len(chosen)},
        "device": device_name(subject.model),
        "versions": versions(),
        "created": now(),
        "notes": [] if asked.simulate is None else [f"recorded with a simulated fault: {asked.simulate}"],
    }
    kept = Detail(asked.detail == "full", layers, asked.inputs)
    with nullcontext() if asked.simulate is None else faulty(subject.model, asked.simulate, anatomy=anatomy):
        folder = write_record(subject.model, anatomy, chosen, asked.output, detail=kept, batch=asked.batch, about=about)
    return read_record(folder)


def _prompts_of(subject: Subject, asked: RecordOptions) -> tuple[Prompts, str]:
    data, samples, max_tokens = asked.data, asked.samples, asked.max_tokens
    if data is None and subject.tokenizer is None:  # a bare module: seeded token ids
        ids = prompt_ids(subject.model, None, None, seed=0, count=samples, length=min(max_tokens, _GRID))
        return ids, "random token ids"
    material, found = material_of(subject, data, samples, max_tokens, which="test")
    rows = (group[0].ids for group in material.encoded.sequences)
    cut = tuple(ids[: len(ids) // _GRID * _GRID] or ids for ids in rows)
    return cut, "tokenised batches" if found is None else found.source
