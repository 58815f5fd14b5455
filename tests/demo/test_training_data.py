"""The bundled model's tokenizer, as made and as it comes back from its files."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from noisescope.demo import folder, problems, training_data

MADE = training_data.make_tokenizer()


@given(st.integers(0, 2**32))
def test_round_trip(seed: int) -> None:
    """Decoding gives the problem back, no word is unknown, and the longest fits the training length."""
    problem = problems.make(random.Random(seed), 4)
    text = f"{problem.prompt} {problem.answer}"
    ids = MADE(text)["input_ids"]
    assert ids[0] == training_data.BOS and training_data.UNK not in ids and len(ids) + 1 <= 64
    assert MADE.decode(ids, skip_special_tokens=True) == text


def test_an_answer_continues_its_prompt() -> None:
    """Prompt and answer tokenised apart are the tokens of both joined by a space, whichever side has the space."""
    prompt, answer = "How many nuts are left?", "38"
    whole = MADE(f"{prompt} {answer}")["input_ids"]
    for text in (answer, f" {answer}"):
        assert MADE(prompt)["input_ids"] + MADE(text, add_special_tokens=False)["input_ids"] == whole
    assert MADE.convert_ids_to_tokens(whole[-2:]) == ["▁3", "8"]


@pytest.mark.parametrize("source", ["saved", "bundled"])
def test_files_give_the_same_tokenizer(source: str, tmp_path: Path) -> None:
    """What transformers reads from the files splits as the one that was saved: some model types put in their own."""
    path = folder()
    if source == "saved":
        from noisescope.demo.train import make_model

        path = tmp_path
        make_model(1, 32, len(MADE)).config.save_pretrained(path)
        MADE.save_pretrained(path)
    read: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    texts = [problem.prompt for problem in itertools.islice(problems.stream(3), 50)]
    assert read(texts)["input_ids"] == MADE(texts)["input_ids"]
    assert (read.pad_token_id, read.bos_token_id, read.eos_token_id) == (
        training_data.PAD,
        training_data.BOS,
        training_data.EOS,
    )
    assert read.padding_side == "left"
