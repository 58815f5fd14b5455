"""What a device computes on prompts: recorded for a comparison, saved as activations, or read from dumps of msprobe."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from noisescope.api.preparation import encode_data
from noisescope.api.reports import now, versions
from noisescope.atomic_write import write_file
from noisescope.comparison.records import Batch, Record, read_record
from noisescope.comparison.records import is_unfinished as is_unfinished
from noisescope.comparison.safetensors_reader import Numbers
from noisescope.errors import InvalidInput
from noisescope.faults.simulator import faulty
from noisescope.jsonform import Json
from noisescope.localization.prompts import prompt_ids
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
from noisescope.sites import Place, Site
from noisescope.text_escaping import cut, last_part, shown
from noisescope.untrusted_files import FileKind, inside, members, parse_json, read_text

LAYER_PATTERNS = ("self_attn.o_proj", "mlp.down_proj")  # what writes into the residual stream, in Llama's words
INDEX = "activations.json"
DUMP = FileKind("msprobe dump.json", "Copy the whole dump again")
DUMPED = FileKind("tensor file", "It is damaged, or holds more than one tensor: copy or dump it again")
_GRID = 16  # prompts are cut to a multiple of so many tokens, so that many share a forward without padding
_ENTRY = re.compile(r"Module\.(?P<module>.+)\.(?P<kind>[^.]+)\.forward\.(?P<call>[0-9]{1,9})")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.([0-9]{1,6})(?:\.|$)")
_OPERATORS = (("linear", "linear"), ("norm", "norm"), ("embedding", "embedding"), ("silu", "silu"), ("gelu", "gelu"))
_OUTER = {"embed_tokens": "embed", "wte": "embed", "lm_head": "lm_head", "norm": "final_norm", "ln_f": "final_norm"}


@takes_options(RecordOptions, "data", "output")
def record(subject: Subject, options: RecordOptions) -> Record:
    """Run a model on prompts and write what every operator gave into the folder `output`.

    >>> import noisescope as ns
    >>> found = ns.record(ns.load("demo"), output="cpu.record", samples=4, full_layers={9, 10})
    >>> found.count, len(found.sites), found.dtype
    (4, 195, 'float32')

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
        "model": {
            "source": last_part(subject.source),
            "architecture": anatomy.architecture,
            "blocks": len(anatomy.blocks),
        },
        "data": {"source": last_part(source), "samples": len(chosen)},
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
    data, samples, max_tokens = options.source(), options.samples, options.max_tokens
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
    index = {"model": last_part(subject.source), "dtype": dtype_of(subject.model), "modules": modules, "files": files}
    write_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
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


# -- dumps of msprobe (Ascend's tool for PyTorch) as records: `dump.json` beside `dump_tensor_data/*.pt`
#
# Understood are dumps of modules (level L0 or mix, task tensor): entries "Module.NAME.CLASS.forward.COUNT" whose
# `output` names a file. Files are read by torch's reader that takes tensors and nothing else; entries of functions, of
# backward passes and of statistics alone are left out.


def dump_folder(path: str | Path) -> Path | None:
    """The folder of one rank that holds dump.json, or None where this is no dump: the first step's first rank.

    Steps and ranks are in the order of their numbers: step9 comes before step10.
    """
    folder = Path(path)
    for pattern in ("dump.json", "rank*/dump.json", "step*/rank*/dump.json", "step*/proc*/dump.json"):
        found = [file.parent for file in folder.glob(pattern)]
        if found:
            return min(found, key=lambda one: (_numbers(one.relative_to(folder)), str(one)))
    return None


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))


def read_dump(path: str | Path) -> Record:
    """A dump as a record of full detail; what it does not name (model, prompts) is not checked in a comparison."""
    folder = dump_folder(path)
    if folder is None:
        raise InvalidInput(f"{path} holds no dump.json of msprobe")
    outputs = list(_dumped_outputs(folder / "dump.json"))
    kept = [output for output in outputs if output.file]
    if not kept:
        raise InvalidInput(
            f"{folder / 'dump.json'} names no output of a module with its tensor: dump with level L0 or mix and with "
            "task tensor"
        )
    beside = folder / "dump_tensor_data"
    files = {f"{number}.output": inside(beside, output.file, DUMP) for number, output in enumerate(kept)}
    for file in files.values():
        if not file.is_file():
            raise InvalidInput(f"{folder} lacks {cut(file.name)}, which dump.json names: copy the whole dump again")
    rows = next((output.shape[0] for output in kept if len(output.shape) >= 3 and output.shape[0] != 1), 1)
    batch = Batch(0, rows, 0, lambda name: _read_tensor(files[name], rows) if name in files else None)
    lost = [output.name for output in outputs if not output.file]
    return Record(
        path=str(Path(last_part(str(path))) / folder.relative_to(path)),
        model="",
        architecture="msprobe dump",
        dtype=next((output.dtype for output in kept if output.dtype), ""),
        prompts=(),
        sites=tuple(output.site for output in kept),
        batches=(batch,),
        sketch=None,
        device="msprobe dump",
        detail="full",
        notes=(f"{len(lost)} outputs have no file and are left out, {cut(lost[0])} first",) if lost else (),
    )


@dataclass(frozen=True)
class _DumpedOutput:
    """The first tensor that a module gave, as dump.json describes it."""

    name: str
    site: Site
    file: str  # a name without folders; "" where there is none
    dtype: str
    shape: tuple[int, ...]


def _dumped_outputs(file: Path) -> Iterator[_DumpedOutput]:
    found = members(parse_json(read_text(file, DUMP), file, DUMP), file, DUMP)
    entries = found.get("data")
    if not isinstance(entries, dict):
        raise DUMP.refuse(file, f"an object was expected as 'data', got {shown(entries)}")
    for name, entry in entries.items():
        match = _ENTRY.fullmatch(name)
        tensor = _first_tensor(entry.get("output")) if match is not None and isinstance(entry, dict) else None
        if match is None or tensor is None:
            continue
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(isinstance(size, int) and 0 < size < 2**32 for size in shape):
            shape = []
        named = str(tensor["data_name"] or "")
        dtype = cut(str(tensor.get("dtype", ""))).removeprefix("torch.")
        yield _DumpedOutput(name, _site(match), named, dtype, tuple(shape))


def _first_tensor(value: Json) -> dict[str, Json] | None:
    """The first described tensor with a file, however it is nested."""
    if isinstance(value, dict):
        return value if "data_name" in value else _first_tensor(list(value.values()))
    if isinstance(value, list):
        return next((found for member in value if (found := _first_tensor(member)) is not None), None)
    return None


def _site(found: re.Match[str]) -> Site:
    module, kind = found["module"], found["kind"].lower()
    block = _BLOCK.search(module)
    place: Place = int(block[1]) if block else _OUTER.get(module.rpartition(".")[2], "embed")
    operator = next((operator for word, operator in _OPERATORS if word in kind), "module")
    if block and block.end() == len(module):
        operator = "residual"
    return Site(operator, place, module, occurrence=int(found["call"]))


def _read_tensor(file: Path, rows: int) -> Numbers:
    try:
        tensor = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise DUMPED.refuse(file, f"it holds a {type(tensor).__name__}")
        if tensor.numel() * tensor.itemsize > file.stat().st_size:  # strides of zero: few bytes, any number of elements
            raise DUMPED.refuse(file, f"{tensor.numel()} elements can't lie in a file of {file.stat().st_size} bytes")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Numbers(_by_prompt(tensor.detach(), rows).double().numpy(), dtype)
    except InvalidInput:
        raise
    except Exception as error:  # pickle, zip and runtime errors; torch's words advise to run the file
        raise DUMPED.refuse(file, type(error).__name__) from error


def _by_prompt(tensor: Tensor, rows: int) -> Tensor:
    """[prompts, ...]: routers and experts are given the tokens of all prompts in one dimension."""
    if tensor.dim() == 0 or len(tensor) <= rows:
        return tensor
    return torch.unflatten(tensor, 0, (rows, -1)) if len(tensor) % rows == 0 else tensor[None]
