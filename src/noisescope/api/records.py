"""What a device computes on prompts: recorded for a comparison with another, or saved as activations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from noisescope.api.preparation import encode_data
from noisescope.api.reports import now, versions
from noisescope.comparison.records import Record, read_record
from noisescope.comparison.records import is_unfinished as is_unfinished
from noisescope.errors import InvalidInput
from noisescope.faults.simulator import faulty
from noisescope.localization.inputs import prompt_ids
from noisescope.model.forwards import (
    Prompts,
    check_vocabulary,
    device_name,
    device_of,
    dtype_of,
    evaluating,
    last_token_logits,
)
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.device_commands import RecordOptions
from noisescope.probe.capture import capture
from noisescope.runs.device_record_writer import Detail, write_record
from noisescope.sites import Site

LAYER_PATTERNS = ("self_attn.o_proj", "mlp.down_proj")  # what writes into the residual stream, in Llama's words
INDEX = "activations.json"
_GRID = 16  # prompts are cut to a multiple of so many tokens, so that many share a forward without padding


@takes_options(RecordOptions, "data", "output")
def record(subject: Subject, options: RecordOptions) -> Record:
    """Run a model on prompts and write what every operator gave into the folder `output`.

        ns.record(ns.load("path/to/model", device="cuda"), "gsm8k.jsonl", "gpu.record", full_layers={9, 10})

    Sketches of every operator always; whole tensors of all operators with detail="full", else of the blocks in
    `full_layers`. Samples of `data` are cut to a multiple of 16 tokens.
    """
    anatomy, layers = subject.anatomy, frozenset(options.full_layers)
    if not layers <= set(range(len(anatomy.blocks))):
        raise InvalidInput(f"full layers {sorted(layers)} are out of range: blocks are 0 to {len(anatomy.blocks) - 1}")
    if options.prompts is not None:
        chosen = prompt_ids(
            subject.model, subject.tokenizer, options.prompts, seed=0, count=options.samples, length=options.max_tokens
        )
        source = "prompts"
    else:
        chosen, source = _prompts_of(subject, options)
    about = {
        "model": {"source": subject.source, "architecture": anatomy.architecture, "blocks": len(anatomy.blocks)},
        "data": {"source": source, "samples": len(chosen)},
        "device": device_name(subject.model),
        "versions": versions(),
        "created": now(),
        "notes": [] if options.simulate is None else [f"recorded with a simulated fault: {options.simulate}"],
    }
    kept = Detail(options.detail == "full", layers, options.inputs)
    with nullcontext() if options.simulate is None else faulty(subject.model, options.simulate, anatomy=anatomy):
        folder = write_record(
            subject.model, anatomy, chosen, options.output, detail=kept, batch=options.batch, about=about
        )
    return read_record(folder)


def _prompts_of(subject: Subject, options: RecordOptions) -> tuple[Prompts, str]:
    data, samples, max_tokens = options.data, options.samples, options.max_tokens
    if data is None and subject.tokenizer is None:  # a bare module: seeded token ids
        ids = prompt_ids(subject.model, None, None, seed=0, count=samples, length=min(max_tokens, _GRID))
        return ids, "random token ids"
    material, found = encode_data(subject, data, samples, max_tokens, which="test")
    rows = (group[0].ids for group in material.encoded.sequences)
    cut = tuple(ids[: len(ids) // _GRID * _GRID] or ids for ids in rows)
    return cut, "tokenised batches" if found is None else found.source


def save_activations(
    subject: Subject,
    data: Any = None,
    output: str | Path = "activations",
    *,
    samples: int = 1000,
    max_tokens: int = 256,
    layer_patterns: Sequence[str] | None = None,
    batch: int = 16,
) -> Path:
    """The outputs of the linears that write into the residual stream, or of those that the patterns name.

    One safetensors file for each batch of samples of one length, so that nothing is padded: [B, T, C] by module name,
    with the token ids as `input_ids` and the samples' numbers in the data as `samples`. activations.json is written
    last and lists them; where it is there already nothing is done.
    """
    folder = Path(output)
    if (folder / INDEX).is_file():
        return folder
    modules = linears(subject, layer_patterns)
    material, _ = encode_data(subject, data, samples, max_tokens, which="calibration")
    ids = [tuple(group[0].ids) for group in material.encoded.sequences]
    check_vocabulary(subject.model, tuple(ids), "the data")
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Any]] = []
    for chosen in _batches(ids, batch):
        tensors = _outputs(subject, modules, torch.tensor([ids[at] for at in chosen]))
        file = folder / f"{len(files):04d}.safetensors"
        save_file({**tensors, "samples": torch.tensor(chosen)}, file)
        files.append({"file": file.name, "samples": chosen, "tokens": len(ids[chosen[0]])})
    index = {"model": subject.source, "dtype": dtype_of(subject.model), "modules": modules, "files": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return folder


def _batches(ids: Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Numbers of samples of one length, at most so many together."""
    by_length = sorted(range(len(ids)), key=lambda at: len(ids[at]))
    for _, same in itertools.groupby(by_length, key=lambda at: len(ids[at])):
        numbers = list(same)
        for first in range(0, len(numbers), most):
            yield numbers[first : first + most]


def _outputs(subject: Subject, modules: list[str], ids: Tensor) -> dict[str, Tensor]:
    scope = capture(
        subject.model,
        operators={"linear"},
        modules=modules,
        keep="raw",
        inputs=False,
        device="cpu",
        anatomy=subject.anatomy,
    )
    with evaluating(subject.model), scope as seen:
        last_token_logits(subject.model, ids.to(device_of(subject.model)))
    found = {site_label(site): calls[-1][1].contiguous() for site, calls in seen.raw.items()}
    return {**found, "input_ids": ids}


def linears(subject: Subject, patterns: Sequence[str] | None = None) -> list[str]:
    """Linears of the blocks whose name holds a pattern; without patterns see LAYER_PATTERNS, all where none fits.

    That is asked of each component by itself: Mixtral's attention has Llama's names, its experts have not.
    """
    units = [unit for unit in subject.anatomy.units if "linear" in unit.operators and isinstance(unit.place, int)]
    units = [unit for unit in units if unit.component != "router"]
    wanted = LAYER_PATTERNS if patterns is None else patterns
    chosen = [unit for unit in units if any(pattern in unit.module for pattern in wanted)]
    if patterns is None:
        named = {unit.component for unit in chosen}
        chosen += [unit for unit in units if unit.component not in named]
    if not chosen:
        names = ", ".join(unit.module for unit in units[:3])
        raise InvalidInput(
            f"layer_patterns {list(wanted)} are part of no linear's name; the model has {len(units)}, such as {names}"
        )
    return [unit.module for unit in chosen]


def site_label(site: Site) -> str:
    """The module's name; the second product of one module (MoE experts have two) is numbered."""
    name = site.module if site.operator == "linear" else f"{site.module} ({site.operator})"
    return name if site.occurrence == 0 else f"{name} #{site.occurrence}"
