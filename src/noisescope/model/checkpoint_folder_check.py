"""Checks a model folder from elsewhere before transformers reads it: config.json, the shard index, GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, from_json
from noisescope.untrusted_files import MIB, FileKind, fitting, inside, members, parse_json, read_text

CONFIG = FileKind("model config", "Download the model's files again", max_bytes=4 * MIB, infinite=True, root="config")
INDEX = FileKind("shard index", "Download the model's files again", max_bytes=64 * MIB)
TOKENIZER = FileKind("tokenizer config", CONFIG.cure, max_bytes=64 * MIB, infinite=True, root="config")
SHARD = FileKind("safetensors file", "Download the model's files again")
GGUF = FileKind("GGUF file", "Download it again")
_TOKENIZER = "tokenizer_config.json"
WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_LAYERS = 2000  # the deepest models have a few hundred; building many more would hardly end
_LARGEST_SIZE = 2**31
_NAMES = ("model_type", "dtype", "torch_dtype")
# of them every spelling: a size in text, or of 10^18, would end in a traceback or never
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers", "num_local_experts", "num_experts", "n_routed_experts")  # fmt: skip
_SIZES = ("hidden_size", "n_embd", "d_model", "vocab_size", "intermediate_size", "num_attention_heads", "n_head",
          "num_key_value_heads", "head_dim", "max_position_embeddings", "n_positions")  # fmt: skip


@dataclass(frozen=True)
class _TokenizerConfig:
    model_max_length: float | None  # compared with lengths long after it was loaded


@dataclass(frozen=True)
class _Index:
    weight_map: Mapping[str, str]


def check_folder_files(folder: Path) -> None:
    """Reject an invalid model config, and shards outside the folder, before anything is built or read."""
    check_config(folder / "config.json")
    shards_of(folder)
    if (folder / _TOKENIZER).exists():
        path = folder / _TOKENIZER
        found = members(parse_json(read_text(path, TOKENIZER), path, TOKENIZER), path, TOKENIZER)
        fitting(_TokenizerConfig, {"model_max_length": found.get("model_max_length")}, path, TOKENIZER)


def check_config(path: Path) -> None:
    """The parts of a config.json that determine what is built, and its size."""
    found = members(parse_json(read_text(path, CONFIG), path, CONFIG), path, CONFIG)
    try:
        _check_part(found, CONFIG.root)
        for name, part in found.items():  # of a model of several parts: text_config, vision_config ...
            if name.endswith("_config") and isinstance(part, dict):
                _check_part(part, f"{CONFIG.root}.{name}")
    except InvalidInput as error:
        raise CONFIG.refuse(path, error) from None


def _check_part(part: Mapping[str, Json], where: str) -> None:
    kinds: dict[str, Any] = dict.fromkeys(_NAMES, str | None) | {"architectures": tuple[str, ...] | None}
    kinds |= dict.fromkeys((*_LAYERS, *_SIZES), tuple[int, ...] | int | None)
    for name in kinds.keys() & part.keys():
        value = from_json(kinds[name], part[name], f"{where}.{name}")
        most = _MOST_LAYERS if name in _LAYERS else _LARGEST_SIZE
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not 0 <= number <= most:
                raise InvalidInput(f"{where}.{name}: 0 to {most} was expected, got {number}")


def shards_of(folder: Path) -> list[Path]:
    """The files that the index names, all of them in the folder; [] where there is no index."""
    path = folder / _INDEX
    if not path.exists():
        return []
    found = members(parse_json(read_text(path, INDEX), path, INDEX), path, INDEX)
    index = fitting(_Index, {"weight_map": found.get("weight_map")}, path, INDEX)
    return [inside(folder, name, INDEX) for name in dict.fromkeys(index.weight_map.values())]


@dataclass(frozen=True)
class GgufFacts:
    formats: tuple[str, ...]  # of its tensors, such as Q4_K
    has_tokenizer: bool


def gguf_facts(path: Path) -> GgufFacts:
    """The contents of a GGUF file's header."""
    from gguf import GGUFReader

    with GGUF.explaining(path):
        reader = GGUFReader(path)
        formats = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        return GgufFacts(tuple(formats), "tokenizer.ggml.tokens" in reader.fields)
