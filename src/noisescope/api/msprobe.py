"""Dumps of msprobe (Ascend's tool for PyTorch) as records: `dump.json` beside `dump_tensor_data/*.pt`.

Understood are dumps of modules (level L0 or mix, task tensor): entries "Module.NAME.CLASS.forward.COUNT" whose `output`
names a file. Files are read by torch's reader that takes tensors and nothing else; entries of functions, of backward
passes and of statistics alone are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from noisescope.comparison.records import Batch, Record
from noisescope.comparison.safetensors_reader import Numbers
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json
from noisescope.sites import Place, Site

_ENTRY = re.compile(r"Module\.(?P<module>.+)\.(?P<kind>[^.]+)\.forward\.(?P<call>\d+)")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)(?:\.|$)")
_OPERATORS = (("linear", "linear"), ("norm", "norm"), ("embedding", "embedding"), ("silu", "silu"), ("gelu", "gelu"))
_OUTER = {"embed_tokens": "embed", "wte": "embed", "lm_head": "lm_head", "norm": "final_norm", "ln_f": "final_norm"}


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
    outputs = list(_outputs(folder / "dump.json"))
    kept = [output for output in outputs if output.file]
    if not kept:
        raise InvalidInput(
            f"{folder / 'dump.json'} names no output of a module with its tensor: dump with level L0 or mix and with "
            "task tensor"
        )
    files = {f"{number}.output": folder / "dump_tensor_data" / output.file for number, output in enumerate(kept)}
    for file in files.values():
        if not file.is_file():
            raise InvalidInput(f"{folder} lacks {file.name}, which dump.json names: copy the whole dump again")
    rows = next((output.shape[0] for output in kept if len(output.shape) >= 3 and output.shape[0] != 1), 1)
    batch = Batch(0, rows, 0, lambda name: _read(files[name], rows) if name in files else None)
    lost = [output.name for output in outputs if not output.file]
    return Record(
        path=str(folder),
        model="",
        architecture="msprobe dump",
        dtype=next((output.dtype for output in kept if output.dtype), ""),
        prompts=(),
        sites=tuple(output.site for output in kept),
        batches=(batch,),
        sketch=None,
        device="msprobe dump",
        detail="full",
        notes=(f"{len(lost)} outputs have no file and are left out, {lost[0]} first",) if lost else (),
    )


@dataclass(frozen=True)
class _Output:
    """The first tensor that a module gave, as dump.json describes it."""

    name: str
    site: Site
    file: str  # a name without folders; "" where there is none
    dtype: str
    shape: tuple[int, ...]


def _outputs(file: Path) -> Iterator[_Output]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is truncated or no JSON object: {error}. Copy the dump again") from error
    entries = found.get("data") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise InvalidInput(f"{file} has no 'data': is it msprobe's?")
    for name, entry in entries.items():
        match = _ENTRY.fullmatch(name)
        tensor = _first_tensor(entry.get("output")) if match is not None and isinstance(entry, dict) else None
        if match is None or tensor is None:
            continue
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
            shape = []
        named = Path(str(tensor["data_name"] or "")).name  # never a path out of the folder
        yield _Output(name, _site(match), named, str(tensor.get("dtype", "")).removeprefix("torch."), tuple(shape))


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


def _read(file: Path, rows: int) -> Numbers:
    try:
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle, zip and runtime errors of its own, and advises to run the file
        raise InvalidInput(
            f"{file} can't be read as a tensor alone ({type(error).__name__}): it is damaged, or holds more than a "
            "tensor. Copy or dump it again"
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"{file} holds a {type(tensor).__name__}, not a tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Numbers(_by_prompt(tensor.detach(), rows).double().numpy(), dtype)


def _by_prompt(tensor: Tensor, rows: int) -> Tensor:
    """[prompts, ...]: routers and experts are given the tokens of all prompts in one dimension."""
    if tensor.dim() == 0 or len(tensor) <= rows:
        return tensor
    return torch.unflatten(tensor, 0, (rows, -1)) if len(tensor) % rows == 0 else tensor[None]
