"""Texts as tokens, and where in them the scored part begins. Knows tokenizers of transformers; no torch here."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import Any

from noisescope.data import Item
from noisescope.errors import InvalidInput

FINAL_MARK = "####"  # GSM8K: what follows is the answer, what precedes is the working

Body = tuple[list[int], int, int]  # ids without the tokenizer's beginning, start, final


def tokens(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Ids, and the characters each stands for where the tokenizer can tell."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    settings = {"return_offsets_mapping": True} if fast else {}
    out = tokenizer(text, add_special_tokens=False, verbose=False, **settings)  # verbose: it would warn of long texts
    return list(out["input_ids"]), list(out["offset_mapping"]) if fast else None


def beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: nothing, bos, or several tokens. What it puts behind is not wanted."""
    plain, whole = tokens(tokenizer, "a")[0], list(tokenizer("a")["input_ids"])
    places = range(len(whole) - len(plain) + 1)
    return whole[: next((at for at in places if whole[at : at + len(plain)] == plain), 0)] if plain else []


def without(prefix: list[int], body: Body) -> Body:
    """A body that wrote the tokenizer's beginning itself, as chat templates do, without it."""
    ids, start, final = body
    again = len(prefix) if ids[: len(prefix)] == prefix else 0
    return ids[again:], max(0, start - again), max(0, final - again)


def scored(tokenizer: Any, text: str, at: int) -> Body:
    """Tokens of a text, where those of text[at:] begin, and where those of the final answer in it begin."""
    ids, offsets = tokens(tokenizer, text)
    start = _boundary(tokenizer, text, at, ids, offsets)
    if start is None:  # a token straddles the boundary: tokenise both sides apart
        head = tokens(tokenizer, text[:at])[0]
        tail, _, final = scored(tokenizer, text[at:], 0)
        return head + tail, len(head), len(head) + final
    marked = text.rfind(FINAL_MARK, at)
    rest = text[marked + len(FINAL_MARK) :]
    if marked < 0 or not rest.strip():
        return ids, start, start
    answer_at = len(text) - len(rest.lstrip())
    if offsets is None:
        head = tokens(tokenizer, text[:answer_at].rstrip())[0]
        final = _agreeing(ids, head)
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
        for head in (tokens(tokenizer, text[:at])[0], tokens(tokenizer, text[:at].rstrip())[0]):
            if ids[: len(head)] == head:
                return len(head)
        return None
    index = next((index for index, (_, end) in enumerate(offsets) if end > at), len(ids))
    begin, end = offsets[index] if index < len(ids) else (at, at)
    if not text[begin:at].strip():
        return index
    return index + 1 if not text[at:end].strip() else None


def answered_chat(item: Item, tokenizer: Any, where: str) -> tuple[str, int]:
    """A chat up to the end of its answer, and where the answer begins: what follows it is the template's."""
    whole, prompt = chat(item, tokenizer, where, answered=True), chat(item, tokenizer, where)
    answer = item.messages[-1][1].strip()  # many templates strip
    at = whole.find(answer, _agreeing(whole, prompt))
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


def _agreeing(one: AnySequence[Any], other: AnySequence[Any]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
