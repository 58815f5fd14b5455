"""Whether a CPU is fit for a checkpoint's number format: without the instructions, 16 bits are many times slower."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.nn import functional

from noisescope.model.checkpoint_folder_check import CONFIG, WHOLE, shards_of
from noisescope.model.loading import checkpoint_folder
from noisescope.untrusted_files import parse_json, read_text

SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SLOW = 1.5  # times float32: less than that may be chance
_ROWS, _SIZE, _REPEATS = 128, 1024, 3


def stored_dtype(source: str, revision: str | None = None) -> str | None:
    """The 16-bit format that a Hugging Face folder is stored in, "bfloat16" or "float16"; None for all else.

    A quantised checkpoint has its own arithmetic, and GGUF files are dequantised to float32.
    """
    if source.startswith("tiny:"):
        return None
    folder, file = checkpoint_folder(source, revision)
    if file is not None:
        return None
    path = folder / "config.json"
    config = parse_json(read_text(path, CONFIG), path, CONFIG)
    if not isinstance(config, dict) or config.get("quantization_config") is not None:
        return None
    named = config.get("dtype") or config.get("torch_dtype")
    found = named if isinstance(named, str) else _first_tensor(folder)
    return found if found in SHORT else None


def _first_tensor(folder: Path) -> str:
    """The format of a checkpoint's first tensor, as torch names it."""
    from safetensors import safe_open

    path = (shards_of(folder) or [folder / WHOLE])[0]
    try:
        with safe_open(path, framework="pt") as file:
            name = next(iter(file.keys()))
            return str(file.get_tensor(name).dtype).removeprefix("torch.")
    except Exception:  # the loader says what is wrong with the file
        return ""


def slowdown(dtype: str) -> float:
    """How many times as long as in float32 this CPU takes for a product in a 16-bit format, measured."""
    return _seconds(SHORT[dtype]) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Processor time of a product, the best of three: other programs on the machine don't count."""
    inputs, weight = torch.ones(_ROWS, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    functional.linear(inputs, weight)
    spent = []
    for _ in range(_REPEATS):
        started = time.process_time()
        functional.linear(inputs, weight)
        spent.append(time.process_time() - started)
    return max(min(spent), 1e-6)
