"""Greedy answers of a model to prompts, in batches padded on the left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from noisescope import progress
from noisescope.data.tokens import special_prefix, tokenize, without_prefix
from noisescope.errors import InvalidInput
from noisescope.model.forwards import evaluating

# What a checkpoint's generation_config.json may hold, undone: the likeliest token at each step and nothing else.
# Settings of sampling (temperature, top_p ...) need no undoing, since nothing is sampled.
_GREEDY: dict[str, Any] = {
    **{"do_sample": False, "num_beams": 1, "num_return_sequences": 1},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0},
    **{"return_dict_in_generate": False, "output_scores": False, "output_logits": False},
    **dict.fromkeys(["min_new_tokens", "max_length", "max_time", "stop_strings", "sequence_bias", "bad_words_ids"]),
    **dict.fromkeys(["penalty_alpha", "dola_layers", "guidance_scale", "prompt_lookup_num_tokens"]),
    "cache_implementation": None,
}


def generate(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    *,
    max_new_tokens: int = 256,
    batch_size: int,
    device: str | torch.device,
    samples: list[int],
    on_batch: Callable[[list[int], int], None] | None = None,
) -> list[str]:
    """Greedy answers. `on_batch(sample numbers, padded length)` is called before each batch, to name its rows.

    Batches are padded on the left. Neither the tokenizer nor the model's generation_config is changed, and sampling
    settings in the latter have no effect. An answer ends where the model has no position left.
    """
    if tokenizer is None or not hasattr(model, "generate"):
        what = "a tokenizer" if tokenizer is None else f"a model with generate(), and {type(model).__name__} has none"
        raise InvalidInput(f"generating answers needs {what}")
    if len(samples) != len(prompts) or batch_size < 1 or max_new_tokens < 1:
        raise InvalidInput(
            f"generating needs one sample number a prompt, and sizes from 1 on; got {len(prompts)} prompts, "
            f"{len(samples)} sample numbers, batch_size={batch_size}, max_new_tokens={max_new_tokens}"
        )
    rows = _rows(tokenizer, prompts)
    texts = generate_tokens(
        model, rows, max_new_tokens=max_new_tokens, batch_size=batch_size, device=device,
        ends=end_tokens(model, tokenizer), pad=tokenizer.pad_token_id,
        on_batch=None if on_batch is None else lambda part, length: on_batch(samples[part], length),
    )  # fmt: skip
    decode = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return [tokenizer.decode(text, **decode) for text in texts]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens at which a text ends, by the model's generation config, else by its tokenizer."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None and tokenizer is not None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def generate_tokens(
    model: Any,
    rows: list[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    device: str | torch.device,
    ends: list[int],
    pad: int | None = None,
    on_batch: Callable[[slice, int], None] | None = None,
) -> list[list[int]]:
    """Greedy continuations of token ids, without the token that ended them: those are shorter than `max_new_tokens`."""
    from transformers import GenerationConfig

    max_new_tokens = min(max_new_tokens, _room(model, rows))
    pad = (ends or [0])[0] if pad is None else pad
    known = vars(GenerationConfig())
    settings = {name: value for name, value in _GREEDY.items() if name in known}
    texts: list[list[int]] = []
    starts = range(0, len(rows), batch_size)
    for number, at in enumerate(starts):
        batch = rows[at : at + batch_size]
        length = max(map(len, batch))
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in batch], device=device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in batch], device=device)
        if on_batch is not None:
            on_batch(slice(at, at + batch_size), length)
        with _quiet(), evaluating(model):
            out = model.generate(
                input_ids=ids, attention_mask=mask, **settings, max_new_tokens=max_new_tokens, pad_token_id=pad,
                eos_token_id=ends or None,
                stopping_criteria=[_reporter(number, len(starts), length, max_new_tokens)] if progress.heard() else [],
            )  # fmt: skip
        new = out if getattr(model.config, "is_encoder_decoder", False) else out[:, length:]
        for row in new.tolist():
            end = next((index for index, token in enumerate(row) if token in ends), len(row))
            texts.append(row[:end])
    return texts


def _reporter(number: int, batches: int, length: int, most: int) -> Callable[..., Tensor]:
    """A criterion that stops nothing: it is called after each token, and reports how far this is."""

    def report(ids: Tensor, scores: Any, **more: Any) -> Tensor:
        progress.part((number + min((ids.shape[1] - length) / most, 1.0)) / batches)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    return report


def _rows(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Tokens of the prompts, each with the tokenizer's prefix once."""
    first = special_prefix(tokenizer)
    rows = [first + without_prefix(first, (tokenize(tokenizer, prompt)[0], 0, 0))[0] for prompt in prompts]
    if not all(rows):
        raise InvalidInput(f"prompt {rows.index([]) + 1} has no tokens")
    return rows


def _room(model: Any, rows: list[list[int]]) -> int:
    """How many positions are left for answers."""
    most = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, rows), default=0)
    if not isinstance(most, int):
        return 1 << 30
    if longest >= most:
        raise InvalidInput(
            f"the longest prompt has {longest} tokens, and the model has {most} positions, so nothing can follow it: "
            "leave the longest prompts out"
        )
    return most - longest


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers logs each setting of the checkpoint that greedy decoding leaves unused."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
