"""Inputs of a locator: what can't be run is refused with the reason, what shows little is told."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.locators.inputs import batches_for, remarks
from noisescope.testing import tiny_inputs, tiny_model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.tensor([[3, 64]]), "from 3 to 64, this model's are 0 to 63"),
        (torch.tensor([[3, -100]]), "from -100 to 3, this model's are 0 to 63"),
        (torch.zeros(2, 0, dtype=torch.long), r"input_ids is empty \(shape \[2, 0\]\)"),
        (torch.tensor([1, 2, 3]), r"\[sequences, tokens\], got \[3\]: one sequence is ids\[None\]"),
        (torch.tensor([[[1, 2]]]), r"got \[1, 1, 2\]"),
        (torch.tensor([[1.0, 2.0]]), "whole numbers .*, got torch.float32"),
        ({"input_ids": [[1, 2]]}, "must be a tensor .*, got list"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "relations"])
def test_ids_that_can_not_be_run_are_refused(model, method, ids, words):
    """Every method says what came and what is allowed, before the model runs."""
    with pytest.raises(InvalidInput, match=words):
        ns.locate(model, method=method, inputs=ids)


def test_the_decoder_s_ids_are_looked_at_too():
    """An encoder-decoder has two tables to look up."""
    given = tiny_inputs("t5")
    given["decoder_input_ids"] = given["input_ids"] + 64
    with pytest.raises(InvalidInput, match="decoder_input_ids holds ids"):
        batches_for(tiny_model("t5"), None, given, 0)


def test_the_largest_id_is_allowed(model):
    """Also as int32, which embeddings take; a model without a vocabulary is not asked for one."""
    batches = batches_for(model, None, torch.tensor([[0, 63]], dtype=torch.int32), 0)
    assert len(batches) == 2
    batches_for(tiny_model("transformer_encoder"), None, torch.zeros(1, 4, 32), 0)


def test_one_token_is_told_of(model):
    """A verdict on one token says what it could not see; one on two tokens a sequence has nothing to add."""
    verdict = ns.locate(model, method="relations", inputs=torch.tensor([[5]]))
    assert verdict.verdict == "healthy"
    assert any(note.startswith("one token a sequence") and "exp" in note for note in verdict.notes)
    assert any(note.startswith("one row in all") for note in verdict.notes)
    column, row = torch.tensor([[5], [6]]), torch.tensor([[5, 6]])
    assert [note[:9] for note in remarks(model, [{"input_ids": column}])] == ["one token"]
    assert remarks(model, [{"input_ids": row}]) == []
