"""Texts as token sequences, with the place where scoring begins. Knows the tokenizers of transformers.

A sequence's tokens ids[start:] are scored, each predicted from what precedes it; ids[final:] decide accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisescope.data.dataset import DataSet, Item
from noisescope.errors import InvalidInput, whole_number

FINAL_MARK = "####"  # GSM8K: what follows is the answer, what precedes is the working
IGNORED = -100  # Hugging Face's label of a token that is not scored

Body = tuple[list[int], int, int]  # ids without the tokenizer's prefix, start, final


@dataclass(frozen=True)
class Sequence:
    """Tokens of one sample; an item with choices has one per choice. 1 <= start <= final < len(ids)."""

    sample: int
    ids: tuple[int, ...]
    start: int
    final: int
    choice: int = 0


@dataclass(frozen=True)
class Encoded:
    """One tuple of sequences per item, and what was lost on the way."""

    sequences: tuple[tuple[Sequence, ...], ...]
    truncated: int  # items that were longer than allowed
    tokens: int  # in all sequences together
    notes: tuple[str, ...] = ()


def encode(data: DataSet, tokenizer: Any, *, max_tokens: int = 256) -> Encoded:
    """Tokens of each item, behind the tokenizer's own prefix (bos) where it has one.

    A text is scored from its first predictable token on; where it is too long, its end goes. Of the other kinds only
    the answer (the choice, the assistant's last message) is scored; where they are too long, the front of the prompt
    goes. The final answer is what follows the last "####", else the whole answer. Prompt and answer are joined by one
    space unless one of them has white space there, and no token that holds letters of the prompt is scored.
    """
    if tokenizer is None:
        raise InvalidInput(
            f"{data.source} holds texts, and this model has no tokenizer: put the tokenizer's files (tokenizer.json, "
            "tokenizer_config.json) into the model's folder. In Python: wrap(model, tokenizer), or tokenised batches"
        )
    prefix = special_prefix(tokenizer)
    room = whole_number(max_tokens, "max_tokens", least=len(prefix) + 2) - len(prefix)
    sequences, truncated, cut_prompts = [], 0, 0
    for item in data.items:
        where = f"{data.source}, item {item.number + 1}"
        bodies = [tokenize_scored(tokenizer, text, at) for text, at in _texts(item, tokenizer, where)]
        if data.kind == "chat":  # most templates write the tokenizer's prefix themselves
            bodies = [without_prefix(prefix, body) for body in bodies]
        over = max(0, max(len(ids) for ids, _, _ in bodies) - room)
        truncated += over > 0
        if data.kind == "text":
            bodies, over = [(bodies[0][0][:room], 0, 0)], 0
        elif over >= min(start for _, start, _ in bodies) and over:
            if data.kind == "choice":  # each must keep the same prompt, or they could not be compared
                raise InvalidInput(f"{where}: the choices leave no room for the prompt in max_tokens={max_tokens}")
            cut_prompts += 1
        sequences.append(_cut(item, bodies, prefix, over, where))
    notes = []
    if truncated:
        end = "end" if data.kind == "text" else "beginning"
        notes.append(
            f"{truncated} of {len(sequences)} items are longer than {max_tokens} tokens (--max-tokens) and lost their "
            f"{end}"
        )
    if cut_prompts:
        notes.append(
            f"{cut_prompts} of {len(sequences)} answers fill {max_tokens} tokens alone: their prompt is not seen"
        )
    tokens = sum(len(one.ids) for several in sequences for one in several)
    return Encoded(tuple(sequences), truncated, tokens, tuple(notes))


def _cut(item: Item, bodies: list[Body], prefix: list[int], over: int, where: str) -> tuple[Sequence, ...]:
    """The sequences of an item without the first `over` tokens after the prefix."""
    cut = []
    for choice, (body, start, final) in enumerate(bodies):
        ids = prefix + body[over:]
        first = max(1, len(prefix))  # nothing precedes the first token, and the prefix is nobody's answer
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
        return [_answered_chat(item, tokenizer, where)]
    joined = []
    for answer in item.choices or (item.answer,):
        apart = "" if not item.prompt or item.prompt[-1].isspace() or answer[0].isspace() else " "
        joined.append((f"{item.prompt}{apart}{answer}", len(item.prompt) + len(apart)))
    return joined


def from_batches(batches: Iterable[Any]) -> Encoded:
    """The user's own tokens: tensors [B, T], or dicts with `input_ids` and perhaps `attention_mask` and `labels`.

    Padding on either side is taken off. Labels are Hugging Face's: those of the tokens themselves, not shifted, -100
    where a token isn't scored. Scoring runs from the first label to the last, over gaps between them (with a note).
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
        ids = _int_matrix(fields["input_ids"], f"{where}: input_ids", None)
        mask = _int_matrix(fields.get("attention_mask", torch.ones_like(ids)), f"{where}: attention_mask", ids)
        labels = _int_matrix(fields.get("labels", ids), f"{where}: labels", ids)
        for row in range(len(ids)):
            sequence, gap = _from_row(len(sequences), ids[row], mask[row], labels[row], f"{where}, row {row}")
            sequences.append((sequence,))
            gaps += gap
    if not sequences:
        raise InvalidInput("there are no batches to score: pass a list of tensors [B, T], or of dicts with input_ids")
    notes = (f"labels of {gaps} rows have gaps: scored from the first label to the last",) if gaps else ()
    return Encoded(tuple(sequences), 0, sum(len(one.ids) for (one,) in sequences), notes)


def _int_matrix(value: Any, what: str, like: Tensor | None) -> Tensor:
    """A tensor [B, T] of whole numbers, on the CPU."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point() or value.is_complex():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(f"{what} must be a tensor [B, T] of whole numbers, got {got}")
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


def tokenize(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Ids, and the characters each stands for where the tokenizer has them."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    settings = {"return_offsets_mapping": True} if fast else {}
    out = tokenizer(text, add_special_tokens=False, verbose=False, **settings)  # verbose: it would warn of long texts
    return list(out["input_ids"]), list(out["offset_mapping"]) if fast else None


def special_prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: nothing, bos, or several tokens. What it puts behind is not wanted."""
    plain, whole = tokenize(tokenizer, "a")[0], list(tokenizer("a")["input_ids"])
    places = range(len(whole) - len(plain) + 1)
    return whole[: next((at for at in places if whole[at : at + len(plain)] == plain), 0)] if plain else []


def without_prefix(prefix: list[int], body: Body) -> Body:
    """A body that wrote the tokenizer's prefix itself, as chat templates do, without it."""
    ids, start, final = body
    again = len(prefix) if ids[: len(prefix)] == prefix else 0
    return ids[again:], max(0, start - again), max(0, final - again)


def tokenize_scored(tokenizer: Any, text: str, at: int) -> Body:
    """Tokens of a text, where those of text[at:] begin, and where those of the final answer in it begin."""
    ids, offsets = tokenize(tokenizer, text)
    start = _boundary(tokenizer, text, at, ids, offsets)
    if start is None:  # a token straddles the boundary: tokenise both sides apart
        head = tokenize(tokenizer, text[:at])[0]
        tail, _, final = tokenize_scored(tokenizer, text[at:], 0)
        return head + tail, len(head), len(head) + final
    marked = text.rfind(FINAL_MARK, at)
    rest = text[marked + len(FINAL_MARK) :]
    if marked < 0 or not rest.strip():
        return ids, start, start
    answer_at = len(text) - len(rest.lstrip())
    if offsets is None:
        head = tokenize(tokenizer, text[:answer_at].rstrip())[0]
        final = _common_length(ids, head)
    else:
        final = next((index for index, (_, end) in enumerate(offsets) if end > answer_at), start)
    return ids, start, max(start, final)


def _boundary(tokenizer: Any, text: str, at: int, ids: list[int], offsets: list[tuple[int, int]] | None) -> int | None:
    """The first token of text[at:], or None where a token holds letters of both sides.

    White space between the sides may be in one token with the first word of the answer (" 42" is one in most
    vocabularies), or with the last of the prompt (":\\n"): neither is a straddling token.
    """
    if at == 0:
        return 0
    if offsets is None:
        for head in (tokenize(tokenizer, text[:at])[0], tokenize(tokenizer, text[:at].rstrip())[0]):
            if ids[: len(head)] == head:
                return len(head)
        return None
    index = next((index for index, (_, end) in enumerate(offsets) if end > at), len(ids))
    begin, end = offsets[index] if index < len(ids) else (at, at)
    if not text[begin:at].strip():
        return index
    return index + 1 if not text[at:end].strip() else None


def _answered_chat(item: Item, tokenizer: Any, where: str) -> tuple[str, int]:
    """A chat up to the end of its answer, and where the answer begins: what follows it is the template's."""
    whole, prompt = chat(item, tokenizer, where, answered=True), chat(item, tokenizer, where)
    answer = item.messages[-1][1].strip()  # many templates strip
    at = whole.find(answer, _common_length(whole, prompt))
    if at < 0:  # some templates open a thought in the prompt that a finished chat does not show
        at = whole.rfind(answer)
    if at < 0:
        raise InvalidInput(f"{where}: the chat template rewrites the assistant's message, so it can't be found")
    return whole[: at + len(answer)], at


def chat(item: Item, tokenizer: Any, where: str, *, answered: bool = False) -> str:
    """The messages in the tokenizer's own template: all, or up to where the assistant is to answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"{where}: chat `messages` need a chat template, and this tokenizer has none: take the instruct version of "
            "the model, set tokenizer.chat_template, or give the data as prompt + answer"
        )
    turns = item.messages if answered else item.messages[:-1]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered))
    except Exception as error:  # a template is a program of its own: it may raise anything
        raise InvalidInput(f"{where}: the chat template refuses these messages: {error}") from error


def _common_length(one: AnySequence[Any], other: AnySequence[Any]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
