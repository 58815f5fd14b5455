"""Dumps of msprobe (Ascend's tool for PyTorch) as records: `dump.json` beside `dump_tensor_data/*.pt`.

Understood are dumps of modules (level L0 or mix, task tensor): entries "Module.NAME.CLASS.forward.COUNT" whose `output`
names a file. Files are read by torch's reader that takes tensors and nothing else; entries of functions, of backward
passes and of statistics alone are left out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisescope.comparison.records import Batch, Record
from noisescope.comparison.tensor_files import Numbers
from noisescope.errors import InvalidInput
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
    """A dump as a record of full detail; what it does not tell (model, prompts) is not checked in a comparison."""
    folder = dump_folder(path)
    if folder is None:
        raise InvalidInput(f"{path} holds no dump.json of msprobe")
    data = _entries(folder / "dump.json")
    sites: list[Site] = []
    files: dict[str, Path] = {}
    rows, dtype = 1, ""
    without_file: list[str] = []
    for name, entry in data.items():
        found = _ENTRY.fullmatch(name)
        output = _first_tensor(entry.get("output")) if found else None
        if found is None or output is None:
            continue
        if not output["data_name"]:
            without_file.append(name)
            continue
        file = folder / "dump_tensor_data" / Path(str(output["data_name"])).name  # never a path out of the folder
        if not file.is_file():
            raise InvalidInput(f"{folder} lacks {file.name}, which dump.json names: copy the whole dump again")
        files[f"{len(sites)}.output"] = file
        sites.append(_site(found))
        dtype = dtype or str(output.get("dtype", "")).removeprefix("torch.")
        rows = int(output["shape"][0]) if rows == 1 and len(output.get("shape", ())) >= 3 else rows
    if not sites:
        raise InvalidInput(
            f"{folder / 'dump.json'} names no output of a module with its tensor: dump with level L0 or mix and with "
            "task tensor"
        )
    batch = Batch(0, rows, 0, lambda name: _read(files[name], rows) if name in files else None)
    about: dict[str, Any] = {"device": "msprobe dump", "detail": "full"}
    if without_file:
        about["notes"] = [f"{len(without_file)} outputs have no file and are left out, {without_file[0]} first"]
    return Record(str(folder), "", "msprobe dump", dtype, (), tuple(sites), (batch,), None, about)


def _entries(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{file} is truncated or no JSON object: {error}. Copy the dump again") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{file} has no 'data': is it msprobe's?")
    return data


def _first_tensor(value: Any) -> dict[str, Any] | None:
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
