"""Activations of a model on calibration data, written to a folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from noisescope.api.materials import material_of
from noisescope.errors import InvalidInput
from noisescope.evaluation import evaluating
from noisescope.model import Subject
from noisescope.probe.capture import capture
from noisescope.runs.forwards import check_vocabulary, device_of, dtype_of, last_of
from noisescope.sites import Site

LAYER_PATTERNS = ("self_attn.o_proj", "mlp.down_proj")  # what writes into the residual stream, in Llama's words
INDEX = "activations.json"


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
    material, _ = material_of(subject, data, samples, max_tokens, which="calibration")
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
        last_of(subject.model, ids.to(device_of(subject.model)))
    found = {_label(site): calls[-1][1].contiguous() for site, calls in seen.raw.items()}
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


def _label(site: Site) -> str:
    return site.module if site.occurrence == 0 else f"{site.module} #{site.occurrence}"
