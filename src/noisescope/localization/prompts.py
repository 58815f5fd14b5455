"""Prompts as token ids, for locators that compare the logits of their last tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.localization.inputs import NO_TOKENIZER, check_positions, paragraphs, random_ids
from noisescope.model.forwards import (
    Prompts,
    check_vocabulary,
    device_of,
    evaluating,
    last_token_logits,
    safe_vocabulary,
)


def chosen_layers(layers: Iterable[int] | None, blocks: int) -> tuple[int, ...]:
    """The blocks that the caller names, in order; all by default."""
    chosen = tuple(range(blocks)) if layers is None else tuple(sorted(set(layers)))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < blocks:
        raise InvalidInput(f"layers {list(chosen)} are out of range: the model has blocks 0 to {blocks - 1}")
    return chosen


def last_logits(model: nn.Module, prompts: Prompts) -> tuple[Tensor, int]:
    """The last token's logits [P, V] on the host in float32 (float64 if the model is), and the number of forwards."""
    lengths = sorted({len(prompt) for prompt in prompts})
    found: dict[int, Tensor] = {}
    with evaluating(model), torch.no_grad():
        for length in lengths:
            chosen = [at for at, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[at] for at in chosen], device=device_of(model))
            logits = last_token_logits(model, ids)
            if logits is None:
                raise InvalidInput(
                    f"{type(model).__name__} returned no logits [batch, tokens, vocabulary] for token ids, so it is "
                    f"not a language model"
                )
            last = logits.to("cpu")
            found.update(zip(chosen, last if last.dtype == torch.float64 else last.float(), strict=True))
    return torch.stack([found[at] for at in range(len(prompts))]), len(lengths)


def prompt_ids(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Any] | None, *, seed: int, count: int, length: int
) -> Prompts:
    """Prompts as token ids: the caller's texts or ids, else built-in text, or seeded ids without a tokenizer."""
    if prompts is None:
        vocabulary = safe_vocabulary(model)
        if vocabulary is None:
            raise InvalidInput(f"{type(model).__name__} takes no token ids, so prompts can't be generated for it")
        return _built_in(tokenizer, vocabulary, seed, count, length)
    if isinstance(prompts, (str, Tensor)):
        prompts = [prompts] if isinstance(prompts, str) or prompts.dim() == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or not prompts:
        raise InvalidInput(f"prompts must be a list of texts or of token ids, got {prompts!r:.60}")
    chosen = tuple(_ids(prompt, tokenizer) for prompt in prompts)
    check_vocabulary(model, chosen, "a prompt")
    check_positions(model, max(map(len, chosen)), "a prompt")
    return chosen


def _ids(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput(f"prompts are texts, but {NO_TOKENIZER}")
        prompt = tokenizer(prompt, verbose=False)["input_ids"]
    try:
        ids = tuple(int(token) for token in prompt)
    except (TypeError, ValueError):
        raise InvalidInput(f"a prompt must be a text or a list of token ids, got {prompt!r:.60}") from None
    if not ids:
        raise InvalidInput("a prompt has no tokens")
    return ids


def _built_in(tokenizer: Any, vocabulary: int, seed: int, count: int, length: int) -> Prompts:
    """`count` prompts of one length: the starts of paragraphs, from the one that the seed selects."""
    if count < 1 or length < 1:
        raise InvalidInput(f"at least one prompt of one token is needed, got count={count}, length={length}")
    if tokenizer is not None:
        long = (ids for ids in (_ids(text, tokenizer) for text in paragraphs(seed)) if len(ids) >= length)
        found = [ids[:length] for ids in itertools.islice(long, count)]
        if len(found) == count and max(map(max, found)) < vocabulary:
            return tuple(found)
    return tuple(tuple(row) for row in random_ids(vocabulary, (count, length), seed).tolist())
