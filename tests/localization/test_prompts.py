"""Prompts for the locators: built-in or the caller's, run in their own order."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.localization.prompts import last_logits, prompt_ids
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=3)


def test_prompts_of_different_lengths_keep_their_order(model):
    """Prompts are grouped by length to be run, and the rows come back in the caller's order."""
    prompts = ([5, 6, 7], [8, 9], [10, 11, 12], [13])
    logits, forwards = last_logits(model, tuple(map(tuple, prompts)))
    assert forwards == 3
    for prompt, row in zip(prompts, logits, strict=True):
        with torch.no_grad():
            assert torch.allclose(row, model(torch.tensor([prompt])).logits[0, -1], atol=1e-6)


def test_the_built_in_prompts_need_no_data_and_depend_on_the_seed(model):
    """Text where there is a tokenizer, ids inside the vocabulary elsewhere; the same seed gives the same prompts."""
    demo = ns.load("demo")
    texts = prompt_ids(demo.model, demo.tokenizer, None, seed=0, count=4, length=6)
    assert demo.tokenizer.decode(texts[0]).strip()
    assert len({*texts}) == 4
    assert {len(ids) for ids in texts} == {6}
    for which in (0, 1):
        ids = prompt_ids(model, None, None, seed=which, count=4, length=6)
        assert ids == prompt_ids(model, None, None, seed=which, count=4, length=6)
        assert max(map(max, ids)) < model.config.vocab_size
    assert ids != prompt_ids(model, None, None, seed=0, count=4, length=6)


def test_prompts_that_are_none(model):
    """Texts without a tokenizer, no tokens, no list, unknown ids, too many, a model that takes no tokens."""
    for prompts, reason in (
        (["hello"], "no tokenizer"),
        ([[]], "no tokens"),
        ([3], "list of token ids"),
        ([], "list of"),
        ([[3, model.config.vocab_size]], "accepts ids 0 to"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            prompt_ids(model, None, prompts, seed=0, count=3, length=5)
    with pytest.raises(InvalidInput, match="can't be generated"):
        prompt_ids(tiny_model("vit"), None, None, seed=0, count=3, length=5)
    with pytest.raises(InvalidInput, match="a prompt needs 65 positions, but GPT2LMHeadModel has 64"):
        prompt_ids(tiny_model("gpt2"), None, [[5], [5] * 65], seed=0, count=3, length=5)
    with pytest.raises(InvalidInput, match="at least one prompt"):
        prompt_ids(model, None, None, seed=0, count=0, length=5)
    with pytest.raises(InvalidInput, match="not a language model"):
        last_logits(torch.nn.EmbeddingBag(9, 4), ((1, 2),))
