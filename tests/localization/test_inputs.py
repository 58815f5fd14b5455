"""Inputs of a locator: what can't be run is refused with the reason, what shows little is reported."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.localization.inputs import batches_for, random_ids, remarks
from noisescope.testing import tiny_inputs, tiny_model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize(
    "ids, words",
    [
        (torch.tensor([[3, 64]]), "from 3 to 64, but this model accepts 0 to 63"),
        (torch.tensor([[3, -100]]), "from -100 to 3, but this model accepts 0 to 63"),
        (torch.zeros(2, 0, dtype=torch.long), r"input_ids is empty \(shape \[2, 0\]\)"),
        (torch.tensor([1, 2, 3]), r"\[sequences, tokens\], got \[3\]: one sequence is ids\[None\]"),
        (torch.tensor([[[1, 2]]]), r"got \[1, 1, 2\]"),
        (torch.tensor([[1.0, 2.0]]), "an integer tensor .*, got torch.float32"),
        ({"input_ids": [[1, 2]]}, "must be an integer tensor .*, got list"),
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
    assert any(note.startswith("one token per sequence") and "exp" in note for note in verdict.notes)
    assert any(note.startswith("only one row") for note in verdict.notes)
    column, row = torch.tensor([[5], [6]]), torch.tensor([[5, 6]])
    assert [note[:9] for note in remarks(model, [{"input_ids": column}])] == ["one token"]
    assert remarks(model, [{"input_ids": row}]) == []


@pytest.mark.parametrize("method", ["auto", "relations"])
@pytest.mark.parametrize(
    ("name", "strange", "words"),
    [
        ("llama", {"input_id": torch.tensor([[5, 6]])}, "unknown input of LlamaForCausalLM 'input_id'.*'input_ids'"),
        ("llama", {"input_ids": torch.tensor([[5, 6]]), "nonsense": 1}, "'nonsense'. Allowed: input_ids, attention_m"),
        ("gpt2", {"tokens": torch.tensor([[5, 6]])}, "unknown input of GPT2LMHeadModel 'tokens'. Allowed: input_ids"),
        ("vit", {"images": torch.zeros(1, 3, 8, 8)}, "'images'. Allowed: pixel_values"),
        ("transformer_encoder", {"source": torch.zeros(1, 4, 32)}, "'source'. Allowed: src, mask"),
    ],
)
def test_inputs_of_another_name_are_refused(method, name, strange, words):
    """With the names that the model's forward has, also where it would swallow any other in silence."""
    with pytest.raises(InvalidInput, match=words):
        ns.locate(tiny_model(name), method=method, inputs=strange)


def test_token_ids_for_a_wrapper_that_takes_anything(model):
    ids = torch.arange(3, 35)[None]
    for around in (model, torch.nn.DataParallel(model)):
        batch = batches_for(around, None, [ids], 0)[0]
        assert list(batch) == ["input_ids"] and torch.equal(batch["input_ids"], ids)


def test_names_that_only_kwargs_take_are_allowed():
    """What transformers lists for its **kwargs; anything beside a known name where nothing is listed."""
    ids = torch.tensor([[5, 6]])
    batches_for(tiny_model("llama"), None, {"input_ids": ids, "output_attentions": False}, 0)
    batches_for(tiny_model("gpt2"), None, {"input_ids": ids, "something_of_its_own": 1}, 0)

    class Wrapper(torch.nn.Linear):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    batches_for(Wrapper(3, 3), None, {"anything": torch.zeros(1, 3)}, 0)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
def test_more_tokens_than_learned_positions_are_refused(name):
    """The last position can be used; OPT's table has two rows more than positions. Rotary angles have no end."""
    model = tiny_model(name)
    batches_for(model, None, torch.full((1, 64), 5), 0)
    assert ns.locate(model, inputs=torch.full((1, 64), 5), quick=True).verdict == "healthy"
    for inputs in (torch.full((2, 65), 5), {"inputs_embeds": torch.zeros(1, 65, 32)}):
        with pytest.raises(InvalidInput, match=r"a sequence needs 65 positions, .* has 64: give at most 64"):
            ns.locate(model, inputs=inputs)
    batches_for(tiny_model("llama"), None, torch.full((1, 65), 5), 0)


def test_positions_are_counted_from_where_they_begin():
    """RoBERTa's first is behind the padding's row; a cache holds some already; numbers that are given count."""
    from transformers import DynamicCache, RobertaConfig, RobertaForMaskedLM

    roberta = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=34,
        )
    ).eval()
    batches_for(roberta, None, torch.full((1, 32), 5), 0)
    with pytest.raises(InvalidInput, match=r"needs 33 positions, .* has 32"):
        batches_for(roberta, None, torch.full((1, 33), 5), 0)
    gpt2, cache = tiny_model("gpt2"), DynamicCache()
    with torch.no_grad():
        gpt2(torch.full((1, 60), 5), past_key_values=cache)
    for more in ({"past_key_values": cache}, {"position_ids": torch.arange(60, 65)[None]}):
        with pytest.raises(InvalidInput, match="needs 65 positions"):
            batches_for(gpt2, None, {"input_ids": torch.full((1, 5), 5), **more}, 0)


def test_a_cache_may_be_asked_for(model):
    """Relations, which call modules again, run without one all the same."""
    inputs = {"input_ids": torch.arange(3, 19).reshape(2, 8), "use_cache": True}
    assert ns.locate(model, method="relations", inputs=inputs).verdict == "healthy"


def test_ids_as_lists(model):
    """One sequence, or several, as a tokenizer gives them."""
    (batch, _) = batches_for(model, None, [5, 6, 7], 0)
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    both = batches_for(model, None, [[5, 6, 7], [8, 9]], 0)
    assert [batch["input_ids"].tolist() for batch in both] == [[[5, 6, 7]], [[8, 9]]]
    with pytest.raises(InvalidInput, match="a batch must be a dict of the model's arguments, or token ids; got list"):
        batches_for(model, None, [[5, "six"]], 0)


@pytest.mark.parametrize("vocabulary", [2, 3, 4, 6])
def test_a_tiny_vocabulary_is_not_one_token_repeated(vocabulary):
    assert len(random_ids(vocabulary, (2, 32), 0).unique()) == vocabulary
