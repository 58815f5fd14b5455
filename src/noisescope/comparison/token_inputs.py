"""Compares the token ids that two systems produce for the same text: how they differ, and which positions match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

Ids = Sequence[int]
_SHORT = 3  # tokens that a prefix or suffix of special tokens has at most
_LIKE = 0.5  # share of tokens in common, below which two tokenizers are at work


@dataclass(frozen=True)
class InputDifference:
    name: str  # "special tokens", "template", "truncation" or "tokenizer"
    words: str


def corresponding(a: Ids, b: Ids) -> list[tuple[int, int]]:
    """Positions of tokens that both sides predict: the same token, aligned, and not the first on either side."""
    if list(a) == list(b):
        return [(at, at) for at in range(1, len(a))]
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    pairs = ((block.a + at, block.b + at) for block in blocks for at in range(block.size))
    return [(i, j) for i, j in pairs if i and j]


def input_difference(a: Sequence[Ids], b: Sequence[Ids], *, chat: bool) -> InputDifference | None:
    """How the ids of all prompts differ, by the most common kind; None if none does."""
    kinds = [_kind(list(mine), list(its), chat) for mine, its in zip(a, b, strict=True) if list(mine) != list(its)]
    if not kinds:
        return None
    (name, detail), _ = Counter(kinds).most_common(1)[0]
    return InputDifference(name, f"{len(kinds)} of {len(a)} prompts have different token ids in b: {detail}")


def _kind(a: list[int], b: list[int], chat: bool) -> tuple[str, str]:
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    lacking, more = ("b", len(a) - len(b)) if longer is a else ("a", len(b) - len(a))
    if more and longer[more:] == shorter:
        if more <= _SHORT:
            return "special tokens", f"{lacking} lacks the {_ids(longer[:more])} at the beginning"
        return "truncation", f"{lacking} lacks tokens at the beginning"
    if more and longer[: len(shorter)] == shorter:
        if more <= _SHORT:
            return "special tokens", f"{lacking} lacks the {_ids(longer[-more:])} at the end"
        return "truncation", f"{lacking} lacks tokens at the end"
    for which, early, late in (("b", a, b), ("a", b, a)):
        if _begins_inside(early, late):
            return "truncation", f"{which} keeps the end of long texts where the other side keeps the beginning"
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < _LIKE:
        return "tokenizer", "fewer than half of the tokens match"
    first = next(code for code in matcher.get_opcodes() if code[0] != "equal")
    where = f"they first differ at token {first[1]}"
    if chat:
        return "template", f"{where}: different chat template"
    return "tokenizer", f"{where}: different tokenizer, template or normalisation"


def _begins_inside(first: list[int], second: list[int]) -> bool:
    """Whether `second`, after special tokens that both begin with, begins with what `first` ends with."""
    same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
    first, second = (ids[same if same <= _SHORT else 0 :] for ids in (first, second))
    return any(first[at:] == second[: len(first) - at] for at in range(1, int(len(first) * (1 - _LIKE)) + 1))


def _ids(ids: list[int]) -> str:
    return f"token{'' if len(ids) == 1 else 's'} {', '.join(map(str, ids))}"
