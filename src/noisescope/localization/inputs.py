"""The inputs a model under test runs on: the caller's, prompts, built-in text, random tokens, or a record's."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.comparison.records import Record, read_record
from noisescope.data.dataset import built_in, read_data
from noisescope.errors import InvalidInput, unknown
from noisescope.model.anatomy import Anatomy, dissect
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import (
    check_vocabulary,
    device_of,
    dtype_of,
    embeddings_of,
    safe_vocabulary,
    vocabulary_size,
)
from noisescope.model.loading import Subject
from noisescope.probe.forward_patching import unwrap
from noisescope.untrusted_files import FileKind, read_text

Batch = dict[str, Any]  # arguments of a forward: tensors, and a cache or a switch where it takes one

ROWS, LENGTH = 2, 32  # of a built-in batch: 64 tokens, all of which are judged
PROMPTS = FileKind("text file of prompts", "Write one prompt per line, in UTF-8")
NO_TOKENIZER = (
    "the model has no tokenizer: put its files (tokenizer.json, tokenizer_config.json) into the model's folder. In "
    "Python: pass token ids, or wrap(model, tokenizer)"
)
_IDS = ("input_ids", "decoder_input_ids")
_NAMES_OF_IDS = ("input_ids", "idx", "tokens", "token_ids", "ids")  # the last four in hand-written models
_OF_SOUND = ("input_features", "input_values")
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "src", "x")


def batches_for(model: nn.Module, tokenizer: Any, inputs: Any, seed: int) -> list[Batch]:
    """At least two batches of one shape if possible: stale data shows only when the data changes."""
    batches = _given(model, tokenizer, inputs) if inputs is not None else _made(model, tokenizer, seed)
    for batch in batches:
        _check_names(model, batch)
        _check_ids(batch, vocabulary_size(model))
        check_positions(model, _positions_asked(batch), "a sequence")
    if len(batches) == 1:
        batches.append(_other_data(batches[0]))
    return [on_device(model, batch) for batch in batches]


def on_device(model: nn.Module, batch: Batch) -> Batch:
    """A batch on the model's device; float32 numbers in the model's dtype."""
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: _moved(value, device, dtype) for name, value in batch.items()}


def remarks(model: nn.Module, batches: Sequence[Batch]) -> list[str]:
    """What these inputs and this dtype prevent from being tested, for the notes of a verdict."""
    found = []
    tokens = [batch[name] for batch in batches for name in (*_IDS, "inputs_embeds") if batch.get(name) is not None]
    if tokens and all(t.shape[1] == 1 for t in tokens):
        found.append(
            "one token per sequence: softmax over one key is always 1, so exp, masks, positions, the key-value cache "
            "and stale data from another call were not tested. Give 8 tokens or more"
        )
    if tokens and all(t.shape[:2].numel() == 1 for t in tokens):
        found.append("only one row: row order, and faults that show only over many rows, were not tested")
    if any(p.dtype == torch.float64 for p in model.parameters()):
        found.append(
            "float64 is checked to float32 precision: models compute norms, softmax and rotary angles in float32 "
            "whatever their dtype, and the host has nothing wider than float64"
        )
    return found


def _check_ids(batch: Batch, vocabulary: int | None) -> None:
    """Reject token ids that the model can't run on."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise InvalidInput(f"{name} is empty (shape {list(value.shape)}): give at least one token")
    for name, ids in ((name, batch[name]) for name in _IDS if batch.get(name) is not None):
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise InvalidInput(f"{name} must be an integer tensor (torch.long), got {kind}")
        if ids.dim() != 2:
            raise InvalidInput(
                f"{name} must have the shape [sequences, tokens], got {list(ids.shape)}: one sequence is ids[None]"
            )
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or (vocabulary is not None and most >= vocabulary):
            allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}"
            raise InvalidInput(
                f"{name} holds ids from {least} to {most}, but this model accepts {allowed}: use the model's own "
                f"tokenizer, and leave out label values such as -100"
            )


def arguments_of(model: nn.Module) -> tuple[list[str], list[str], bool]:
    """Argument names of the model's forward, names its `**kwargs` lists, and whether it accepts any other name."""
    # The class's: one that was put on the instance may take anything and pass it on.
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidInput(
            "a TorchScript model runs no Python code that could be observed: give the module that it was made from"
        )
    bound = type(model).forward.__get__(model)
    parameters = inspect.signature(bound).parameters.values()
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wild = next((p for p in parameters if p.kind == p.VAR_KEYWORD), None)
    # Names in the dict type of `**kwargs: Unpack[...]`, as transformers has it.
    parts = () if wild is None else typing.get_args(wild.annotation)
    listed = [name for part in parts for name in getattr(part, "__annotations__", ())]
    return known, listed, wild is not None and not listed


def _check_names(model: nn.Module, batch: Batch) -> None:
    """Reject arguments that the model's forward does not have; at least one must be known if it accepts any name."""
    known, listed, takes_any = arguments_of(model)
    strange = [name for name in batch if name not in (*known, *listed)]
    if strange and not (takes_any and (len(strange) < len(batch) or not known)):
        raise unknown(f"input of {type(model).__name__}", strange[0], dict.fromkeys((*known, *listed)))


def check_positions(model: nn.Module, asked: int, what: str) -> None:
    """Reject more tokens than a learned position table has rows; other position encodings have no limit."""
    room = min(_tables_of_positions(model), default=asked)
    if asked > room:
        raise InvalidInput(
            f"{what} needs {asked} positions, but {type(model).__name__} has {room}: give at most {room} tokens"
        )


def _tables_of_positions(model: nn.Module) -> Iterator[int]:
    """Sizes of the tables that lie beside one of tokens; the rows before the first position are not counted."""
    for parent in model.modules():
        tables = {name: child for name, child in parent.named_children() if isinstance(child, nn.Embedding)}
        for name, table in tables.items():
            if len(tables) > 1 and re.search(r"pos|wpe", name):
                padding = 0 if table.padding_idx is None else table.padding_idx + 1  # as in RoBERTa
                yield table.num_embeddings - padding - int(getattr(table, "offset", 0))  # as in OPT and BART


def _positions_asked(batch: Batch) -> int:
    """How many positions a forward looks up."""
    named = batch.get("position_ids")
    if isinstance(named, Tensor):
        return int(named.max()) + 1
    past = getattr(batch.get("past_key_values"), "get_seq_length", lambda: 0)()
    lengths = [batch[name].shape[1] for name in (*_IDS, "inputs_embeds") if isinstance(batch.get(name), Tensor)]
    return int(past) + max(lengths, default=0)


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device, dtype) for each in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.dtype == torch.float32 else value.to(device)


def prompts_in(path: Path) -> list[str]:
    """The prompts of a file: one per line in a text file; other formats are those of data (`docs/diagnosis.md`)."""
    if path.suffix.lower() != ".txt":
        items = read_data(path).items
        return [item.text or item.prompt or "\n".join(content for _, content in item.messages) for item in items]
    lines = read_text(path, PROMPTS).removeprefix("\ufeff").splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InvalidInput(f"{path} holds no prompts: write one per line")
    return prompts


def _given(model: nn.Module, tokenizer: Any, inputs: Any) -> list[Batch]:
    if isinstance(inputs, Path):
        inputs = prompts_in(inputs)
    if isinstance(inputs, (str, Tensor, Mapping)):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or not inputs:
        raise InvalidInput(
            "inputs must be a batch (a dict of the model's arguments, or token ids), a list of batches, or a list of "
            f"texts; got {type(inputs).__name__}"
        )
    if all(isinstance(item, int) for item in inputs):
        inputs = [inputs]
    if all(isinstance(item, str) for item in inputs):
        if tokenizer is None:
            raise InvalidInput(f"inputs are texts, but {NO_TOKENIZER}")
        return [{"input_ids": _tokens(tokenizer, text)[None]} for text in inputs]
    return [_batch(model, item) for item in inputs]


def _batch(model: nn.Module, item: Any) -> Batch:
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (list, tuple)) and item and all(isinstance(token, int) for token in item):
        item = torch.tensor(item, device="cpu")[None]
    if isinstance(item, Tensor):
        given = inspect.signature(model.forward).parameters.values()
        names = [each.name for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        return {"input_ids" if "input_ids" in names or not names else names[0]: item}
    raise InvalidInput(f"a batch must be a dict of the model's arguments, or token ids; got {type(item).__name__}")


def _tokens(tokenizer: Any, text: str) -> Tensor:
    ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise InvalidInput(f"the tokenizer returns no tokens for {text[:40]!r}")
    return torch.tensor(ids, device="cpu")


def _made(model: nn.Module, tokenizer: Any, seed: int) -> list[Batch]:
    config = getattr(model, "config", None)
    length = min(LENGTH, positions_of(model) or LENGTH)
    known, _, takes_any = arguments_of(model)
    name = next((name for name in _NAMES_OF_IDS if name in known), "input_ids" if takes_any else "")
    takes_ids = name and getattr(model, "main_input_name", "input_ids") not in _OF_SOUND
    if takes_ids and safe_vocabulary(model) is not None:
        both = made_ids(model, tokenizer, paragraphs(seed), (2, ROWS, length), seed)
        if getattr(config, "is_encoder_decoder", False):
            return [{"input_ids": ids, "decoder_input_ids": ids.flip(-1)} for ids in both]
        return [{name: ids} for ids in both]
    drawn = images(model, 2 * ROWS, seed)
    if drawn is not None:
        return [{"pixel_values": drawn[:ROWS]}, {"pixel_values": drawn[ROWS:]}]
    raise InvalidInput(
        f"can't generate inputs for {type(model).__name__}: pass inputs={{...}}, the arguments of one forward"
    )


def positions_of(model: nn.Module) -> int | None:
    """The maximum sequence length, by the config and by learned tables; None if neither says."""
    config: Any = getattr(model, "config", None)
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    named = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
    found = [getattr(one, name, None) for one in configs for name in named]
    return min([n for n in found if isinstance(n, int) and n > 0] + list(_tables_of_positions(model)), default=None)


def made_ids(model: nn.Module, tokenizer: Any, texts: Sequence[str], shape: tuple[int, ...], seed: int) -> Tensor:
    """Token ids of texts, repeated if too short; random ids if there is no matching tokenizer."""
    vocabulary = safe_vocabulary(model) or 1
    tokens = None if tokenizer is None else _text_tokens(tokenizer, math.prod(shape), texts)
    if tokens is None or int(tokens.max()) >= vocabulary:
        return _in_use(model, random_ids(vocabulary, shape, seed))
    return tokens.reshape(shape)


def _in_use(model: nn.Module, ids: Tensor) -> Tensor:
    """Ids without those whose row of the embedding is not finite: no text has them, so nothing ever set the row."""
    table = getattr(embeddings_of(model)[0], "weight", None)
    if type(table) is not nn.Parameter or table.is_meta or not table.is_floating_point():
        return ids
    finite = table.detach().sum(-1, dtype=torch.float32).isfinite().cpu()
    others = finite.nonzero().flatten()
    return ids if len(others) < 4 else torch.where(finite[ids], ids, others[3:][ids % (len(others) - 3)])


def images(model: nn.Module, count: int, seed: int) -> Tensor | None:
    """Random images of the size in the config, if it has one."""
    config = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if not size or not channels:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((count, channels, *sides), generator=generator, device="cpu")


def paragraphs(seed: int) -> list[str]:
    """The built-in text, starting at the paragraph that the seed selects."""
    texts = [item.text for item in built_in().items]
    return texts[seed % len(texts) :] + texts[: seed % len(texts)]


def _text_tokens(tokenizer: Any, count: int, texts: Sequence[str]) -> Tensor:
    """`count` tokens of the texts."""
    found: list[int] = []
    for text in itertools.cycle(texts):
        found += _tokens(tokenizer, text).tolist()
        if len(found) >= count:
            break
    return torch.tensor(found[:count], device="cpu")


def random_ids(vocabulary: int, shape: tuple[int, ...], seed: int) -> Tensor:
    lowest = 3 if vocabulary > 6 else 0  # the first ids are special tokens as a rule; one id repeated is no evidence
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(lowest, vocabulary, shape, generator=generator, device="cpu")


def _other_data(batch: Batch) -> Batch:
    """Data of the same shape: the main input reversed."""
    name = next((name for name in _MAIN_INPUTS if isinstance(batch.get(name), Tensor)), None)
    return batch if name is None else {**batch, name: batch[name].flip(-1)}


def are_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def parts_of(subject: Subject | nn.Module) -> tuple[nn.Module, Any, Anatomy]:
    """Model, tokenizer and anatomy."""
    if isinstance(subject, Subject):
        return unwrap(subject.model), subject.tokenizer, subject.anatomy
    return unwrap(subject), None, dissect(subject)


# -- records of other devices


def recorded(given: Record | str | Path, model: nn.Module) -> Record:
    """A record or its folder, loaded; rejected with a reason if it is damaged or of another model."""
    if not isinstance(given, (Record, str, Path)):
        raise InvalidInput(
            f"a record must be the value returned by ns.record or its folder; got {type(given).__name__}"
        )
    record = given if isinstance(given, Record) else read_record(given)
    if record.model == model_fingerprint(model):
        check_vocabulary(model, record.prompts, record.path)
        return record
    here = dissect(model).architecture
    if record.architecture == here and record.dtype != dtype_of(model):
        raise InvalidInput(
            f"{record.path} was recorded in {record.dtype}, but the model here computes in {dtype_of(model)}: load the "
            f"model with dtype={record.dtype!r}, or record again"
        )
    raise InvalidInput(
        f"{record.path} was recorded with a different model ({record.architecture}, {record.dtype}, fingerprint "
        f"{record.model[:12]}), not this one ({here}): weights or config differ. Record this model, or load the "
        f"recorded one"
    )
