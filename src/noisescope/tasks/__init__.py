"""From items to tokens with a place where scoring begins, and from a model to generated answers.

A sequence's tokens ids[start:] are scored, each predicted from what precedes it; ids[final:] decide accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisescope.data import DataSet, Item
from noisescope.errors import InvalidInput
from noisescope.tasks.tokenising import Body, answered_chat, beginning, chat, scored, without

IGNORED = -100  # Hugging Face's label of a token that is not scored


@dataclass(frozen=True)
class Sequence:
    """Tokens of one sample; an item with choices has one a choice. 1 <= start <= final < len(ids)."""

    sample: int
    ids: tuple[int, ...]
    start: int
    final: int
    choice: int = 0


@dataclass(frozen=True)
class Encoded:
    """One tuple of sequences an item, and what was lost on the way."""

    sequences: tuple[tuple[Sequence, ...], ...]
    truncated: int  # items that were longer than allowed
    tokens: int  # in all sequences together
    notes: tuple[str, ...] = ()


def encode(data: DataSet, tokenizer: Any, *, max_tokens: int = 256) -> Encoded:
    """Tokens of each item, behind the tokenizer's own beginning (bos) where it has one.

    A text is scored from its first predictable token on; where it is too long, its end goes. Of the other kinds only
    the answer (the choice, the assistant's last message) is scored; where they are too long, the front of the prompt
    goes. The final answer is what follows the last "####", else the whole answer. Prompt and answer are joined by one
    space unless one of them has white space there, and no token that holds letters of the prompt is scored.
    """
    if tokenizer is None:
        raise InvalidInput(
            f"{data.source} holds texts, and this model has no tokenizer: pass one with wrap(model, tokenizer), "
            "or pass tokenised batches instead of texts"
        )
    prefix = beginning(tokenizer)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < len(prefix) + 2:
        raise InvalidInput(f"max_tokens must be a whole number from {len(prefix) + 2} on, got {max_tokens!r}")
    room = max_tokens - len(prefix)
    sequences, truncated, beheaded = [], 0, 0
    for item in data.items:
        where = f"{data.source}, item {item.number + 1}"
        bodies = [scored(tokenizer, text, at) for text, at in _texts(item, tokenizer, where)]
        if data.kind == "chat":  # most templates write the tokenizer's beginning themselves
            bodies = [without(prefix, body) for body in bodies]
        over = max(0, max(len(ids) for ids, _, _ in bodies) - room)
        truncated += over > 0
        if data.kind == "text":
            bodies, over = [(bodies[0][0][:room], 0, 0)], 0
        elif over >= min(start for _, start, _ in bodies) and over:
            if data.kind == "choice":  # each must keep the same prompt, or they could not be compared
                raise InvalidInput(f"{where}: the choices leave no room for the prompt in max_tokens={max_tokens}")
            beheaded += 1
        sequences.append(_cut(item, bodies, prefix, over, where))
    notes = []
    if truncated:
        end = "end" if data.kind == "text" else "beginning"
        notes.append(f"{truncated} of {len(sequences)} items are longer than {max_tokens} tokens and lost their {end}")
    if beheaded:
        notes.append(f"{beheaded} of {len(sequences)} answers fill {max_tokens} tokens alone: their prompt is not seen")
    tokens = sum(len(one.ids) for several in sequences for one in several)
    return Encoded(tuple(sequences), truncated, tokens, tuple(notes))


def _cut(item: Item, bodies: list[Body], prefix: list[int], over: int, where: str) -> tuple[Sequence, ...]:
    """The sequences of an item without the first `over` tokens after the beginning."""
    cut = []
    for choice, (body, start, final) in enumerate(bodies):
        ids = prefix + body[over:]
        first = max(1, len(prefix))  # nothing precedes the first token, and the beginning is nobody's answer
        begin = max(first, start - over + len(prefix))
        if begin >= len(ids):
            raise InvalidInput(f"{where} has no token that can be scored: {len(ids)} in all, the first {first} given")
        cut.append(Sequence(item.number, tuple(ids), begin, max(begin, final - over + len(prefix)), choice))
    return tuple(cut)


def _texts(item: Item, tokenizer: Any, where: str) -> list[tuple[str, int]]:
    """(text, the character where the scored part begins), one for each sequence."""
    if item.kind == "text":
        return [(item.text, 0)]
    if item.kind == "chat":
        return [answered_chat(item, tokenizer, where)]
    joined = []
    for answer in item.choices or (item.answer,):
        apart = "" if not item.prompt or item.prompt[-1].isspace() or answer[0].isspace() else " "
        joined.append((f"{item.prompt}{apart}{answer}", len(item.prompt) + len(apart)))
    return joined


def from_batches(batches: Iterable[Any]) -> Encoded:
    """The user's own tokens: tensors [B, T], or dicts with `input_ids` and perhaps `attention_mask` and `labels`.

    Padding on either side is taken off. Labels are Hugging Face's: those of the tokens themselves, not shifted, -100
    where a token isn't scored. Scoring runs from the first label to the last, over gaps between them (a note says so).
    """
    if isinstance(batches, (Tensor, Mapping, str)):
        raise InvalidInput(f"batches are a list of batches, got one {type(batches).__name__}: write [batch]")
    sequences: list[tuple[Sequence, ...]] = []
    gaps = 0
    for number, batch in enumerate(batches):
        where = f"batch {number}"
        fields = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        if "input_ids" not in fields:
            raise InvalidInput(f"{where} has no input_ids; found: {', '.join(map(str, fields))}")
        ids = _whole(fields["input_ids"], f"{where}: input_ids", None)
        mask = _whole(fields.get("attention_mask", torch.ones_like(ids)), f"{where}: attention_mask", ids)
        labels = _whole(fields.get("labels", ids), f"{where}: labels", ids)
        for row in range(len(ids)):
            sequence, gap = _from_row(len(sequences), ids[row], mask[row], labels[row], f"{where}, row {row}")
            sequences.append((sequence,))
            gaps += gap
    if not sequences:
        raise InvalidInput("there are no batches to score: pass a list of tensors [B, T], or of dicts with input_ids")
    notes = (f"labels of {gaps} rows have gaps: scored from the first label to the last",) if gaps else ()
    return Encoded(tuple(sequences), 0, sum(len(one.ids) for (one,) in sequences), notes)


def _whole(value: Any, what: str, like: Tensor | None) -> Tensor:
    """A tensor [B, T] of whole numbers, on the CPU."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point() or value.is_complex():
        came = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(f"{what} must be a tensor [B, T] of whole numbers, got {came}")
    if like is not None and value.shape != like.shape:
        raise InvalidInput(f"{what} has shape {tuple(value.shape)}, but input_ids {tuple(like.shape)}")
    return value.detach().cpu().long()


def _from_row(sample: int, ids: Tensor, mask: Tensor, labels: Tensor, where: str) -> tuple[Sequence, bool]:
    real = mask.nonzero().flatten()
    if not len(real) or len(real) != real[-1] - real[0] + 1:
        raise InvalidInput(f"{where}: the attention_mask must be one run of ones, with padding at one end")
    ids, labels = ids[mask != 0], labels[mask != 0]
    scored = (labels != IGNORED).nonzero().flatten()
    scored = scored[scored > 0]  # nothing precedes the first token
    if not len(scored):
        raise InvalidInput(f"{where} has no token that can be scored: {len(ids)} tokens, {IGNORED} means not scored")
    if not torch.equal(ids[scored], labels[scored]):
        raise InvalidInput(f"{where}: labels differ from input_ids; they must be the tokens themselves, not shifted")
    start, end = int(scored[0]), int(scored[-1]) + 1  # later tokens change nothing for a causal model
    return Sequence(sample, tuple(ids[:end].tolist()), start, start), len(scored) < end - start


def chance(data: DataSet) -> float:
    """The accuracy of a guess: the mean of 1 / number of choices, and 0 where there are no choices."""
    if data.kind != "choice":
        return 0.0
    return sum(1 / len(item.choices) for item in data.items) / len(data.items)


def prompts(data: DataSet, tokenizer: Any) -> list[str]:
    """What a model is given to answer: the prompt, or the chat up to the assistant's last turn."""
    if data.kind not in ("answer", "chat"):
        raise InvalidInput(
            f"{data.source} is of kind {data.kind}, which has no answer to generate: take prompt + answer, or chat"
        )
    if data.kind == "answer":
        return [item.prompt for item in data.items]
    return [chat(item, tokenizer, f"{data.source}, item {item.number + 1}") for item in data.items]
