"""Prompts for the locators that look at logits: from the caller, from built-in text, or seeded token ids; and how they
are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import Anatomy, dissect
from noisescope.data import built_in
from noisescope.errors import InvalidInput
from noisescope.evaluation import evaluating
from noisescope.locators.inputs import check_positions
from noisescope.model import Subject
from noisescope.probe.door import unwrap
from noisescope.runs.forwards import Prompts as Prompts
from noisescope.runs.forwards import check_vocabulary, last_of, vocabulary_of
from noisescope.runs.forwards import device_of as device_of


def parts_of(subject: Subject | nn.Module) -> tuple[nn.Module, Any, Anatomy]:
    """Model, tokenizer and anatomy."""
    if isinstance(subject, Subject):
        return unwrap(subject.model), subject.tokenizer, subject.anatomy
    return unwrap(subject), None, dissect(subject)


def last_logits(model: nn.Module, prompts: Prompts) -> tuple[Tensor, int]:
    """The last token's logits [P, V] on the host in float32 (float64 where the model is), and the forwards it took."""
    lengths = sorted({len(prompt) for prompt in prompts})
    found: dict[int, Tensor] = {}
    with evaluating(model), torch.no_grad():
        for length in lengths:
            chosen = [at for at, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[at] for at in chosen], device=device_of(model))
            found.update(zip(chosen, _forward(model, ids), strict=True))
    return torch.stack([found[at] for at in range(len(prompts))]), len(lengths)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    logits = last_of(model, ids)
    if logits is None:
        raise InvalidInput(
            f"{type(model).__name__} gave no logits [batch, tokens, vocabulary] for token ids: it is no language model"
        )
    last = logits.to("cpu")
    return last if last.dtype == torch.float64 else last.float()


def prompt_ids(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Any] | None, *, seed: int, count: int, length: int
) -> Prompts:
    """Prompts as token ids: the caller's texts or ids, else built-in text, or seeded ids without a tokenizer."""
    if prompts is None:
        vocabulary = vocabulary_of(model)
        if vocabulary is None:
            raise InvalidInput(f"{type(model).__name__} takes no token ids: prompts can't be made up for it")
        return _built_in(tokenizer, vocabulary, seed, count, length)
    if isinstance(prompts, (str, Tensor)):
        prompts = [prompts] if isinstance(prompts, str) or prompts.dim() == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or not prompts:
        raise InvalidInput(f"prompts are a list of texts or of token ids, got {prompts!r:.60}")
    chosen = tuple(_ids(prompt, tokenizer) for prompt in prompts)
    check_vocabulary(model, chosen, "a prompt")
    check_positions(model, max(map(len, chosen)), "a prompt")
    return chosen


def _ids(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput("prompts are texts, but the model has no tokenizer: pass token ids, or wrap it with one")
        prompt = tokenizer(prompt, verbose=False)["input_ids"]
    try:
        ids = tuple(int(token) for token in prompt)
    except (TypeError, ValueError):
        raise InvalidInput(f"a prompt is a text or a list of token ids, got {prompt!r:.60}") from None
    if not ids:
        raise InvalidInput("a prompt has no tokens")
    return ids


def _built_in(tokenizer: Any, vocabulary: int, seed: int, count: int, length: int) -> Prompts:
    """`count` prompts of one length: the beginnings of paragraphs, from the one that the seed chooses on."""
    if count < 1 or length < 1:
        raise InvalidInput(f"at least one prompt of one token is needed, got count={count}, length={length}")
    if tokenizer is not None:
        texts = [item.text for item in built_in().items]
        turned = texts[seed % len(texts) :] + texts[: seed % len(texts)]
        found = [ids[:length] for ids in (_ids(text, tokenizer) for text in turned) if len(ids) >= length][:count]
        if len(found) == count and max(map(max, found)) < vocabulary:
            return tuple(found)
    generator = torch.Generator("cpu").manual_seed(seed)
    lowest = min(3, vocabulary - 1)  # the first ids are special tokens as a rule
    drawn = torch.randint(lowest, vocabulary, (count, length), generator=generator, device="cpu")
    return tuple(tuple(row) for row in drawn.tolist())
