"""The tensors of the checkpoint that a model was loaded from, by their names in the model, read one at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.model.checkpoint_folder_check import SHARD, WHOLE, shards_of
from noisescope.model.loading import checkpoint_folder, load


def stored_tensors(
    model: Any, source: str, revision: str | None, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, tensor of the file) for what transformers would load into `names`, renamed and merged alike.

    What a conversion fails on is left out. A GGUF file is loaded a second time, for its tensors are dequantised and
    permuted on loading; safetensors are read one at a time. Pickles are not read.
    """
    folder, file = checkpoint_folder(source, revision)
    if file is not None and file.endswith(".gguf"):
        yield from load(folder / file, dtype=model.dtype).model.state_dict().items()
        return
    if file is not None:
        raise InvalidInput(f"{file} is a pickle, which noisescope does not reread")
    with ExitStack() as opened:
        readers = _readers(folder, opened)
        for name, transform in _transforms(model, readers, names).items():
            try:
                made = transform.convert(name, model=model, config=model.config)
            except Exception:  # a conversion may need what only a load has
                continue
            for target, found in made.items():
                yield target, found[0] if isinstance(found, list) else found


def _readers(folder: Path, opened: ExitStack) -> dict[str, Callable[[], Tensor]]:
    """How each tensor of the file, or of its shards, is read."""
    from safetensors import safe_open

    files = shards_of(folder) or [folder / WHOLE]
    found: dict[str, Callable[[], Tensor]] = {}
    for path in files:
        if not path.exists():
            raise InvalidInput(f"{path.name} is not in {folder}")
        with SHARD.explaining(path):
            file = opened.enter_context(safe_open(path, framework="pt"))
        found |= {key: functools.partial(file.get_tensor, key) for key in file.keys()}  # noqa: SIM118
    return found


def _transforms(model: Any, readers: dict[str, Callable[[], Tensor]], names: Collection[str]) -> dict[str, Any]:
    """transformers' conversions by the (first) name that each makes, with what it reads; as its loader chooses them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Any] = {}
    for key in sorted(readers, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            continue
        if pattern is None:
            transform, pattern = WeightRenaming(key, name), key
            pattern = transform.source_patterns[0]
        else:
            transform = copy.deepcopy(by_pattern[pattern])
        found.setdefault(name, transform).add_tensor(name, key, pattern, readers[key])
    return found
