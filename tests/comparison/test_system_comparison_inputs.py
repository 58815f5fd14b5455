"""Token ids of the same text on two sides: what differs, and which positions correspond."""

from __future__ import annotations

import pytest

from noisescope.comparison.system_comparison import corresponding, input_difference

TEXT = list(range(10, 30))


@pytest.mark.parametrize(
    ("b", "chat", "name", "words"),
    [
        (TEXT[1:], False, "special tokens", "b lacks the token 10 at the beginning"),
        ([1, 2, *TEXT], False, "special tokens", "a lacks the tokens 1, 2 at the beginning"),
        (TEXT[:-1], False, "special tokens", "b lacks the token 29 at the end"),
        ([*TEXT[1:], 30], False, "special tokens", "b lacks the token 10 at the beginning"),
        ([1, 2, *TEXT[:-2]], False, "special tokens", "a lacks the tokens 1, 2 at the beginning"),
        (TEXT[8:], False, "truncation", "b lacks tokens at the beginning"),
        (TEXT[:8], False, "truncation", "b lacks tokens at the end"),
        ([*TEXT[8:], *range(30, 38)], False, "truncation", "b keeps the end of long texts"),
        ([10, *TEXT[8:], *range(30, 37)], False, "truncation", "b keeps the end of long texts"),
        ([*range(2, 10), *TEXT[:12]], False, "truncation", "a keeps the end of long texts"),
        ([10, *range(50, 56), *TEXT[1:]], True, "template", "a lacks 6 tokens at the beginning"),
        ([10, *range(50, 56), *TEXT[1:14]], True, "template", "a lacks 6 tokens at the beginning"),
        ([10, *range(50, 56), *TEXT[1:]], False, "truncation", "a lacks tokens at the beginning"),
        ([10, 99, 98, *TEXT[2:]], True, "template", "they first differ at token 1: different chat template"),
        ([10, 99, *TEXT[2:]], False, "tokenizer", "they first differ at token 1"),
        (list(range(50, 70)), False, "tokenizer", "fewer than half of the tokens match"),
    ],
)
def test_kinds(b, chat, name, words):
    found = input_difference([TEXT, TEXT], [TEXT, b], chat=chat)
    assert found.name == name and found.words.startswith("1 of 2 prompts have different token ids in b: ")
    assert words in found.words


def test_the_same_ids_differ_in_nothing():
    assert input_difference([TEXT], [tuple(TEXT)], chat=True) is None


def test_positions_correspond_where_tokens_are_the_same():
    """The first token of a side is predicted from nothing, so it has no distribution."""
    assert corresponding([5, 6, 7], [5, 6, 7]) == [(1, 1), (2, 2)]
    assert corresponding([1, 5, 6, 7], [5, 6, 7]) == [(2, 1), (3, 2)]
    assert corresponding([1, 2], [3, 4]) == []
