"""Training the bundled model, in miniature."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from noisescope.demo import problems, train, training_data


@pytest.fixture
def batch() -> training_data.Batch:
    return training_data.encode(list(itertools.islice(problems.stream(2), 8)))


def test_encoding_puts_values_at_sentence_ends(batch: training_data.Batch) -> None:
    """Rows are <bos> prompt answer <eos>, and each value sits at its sentence's full stop."""
    words = training_data.make_tokenizer()
    for row, item in enumerate(itertools.islice(problems.stream(2), 8)):
        ids = batch.tokens[row].tolist()
        assert ids[0] == training_data.BOS and ids[ids.index(training_data.EOS) :][1:] == [
            training_data.PAD
        ] * ids.count(0)
        assert words.decode(ids, skip_special_tokens=True) == f"{item.prompt} {item.answer}"
        count = len(item.values)
        assert batch.values[row].tolist() == [
            *item.values,
            *[training_data.NO_VALUE] * (training_data.SENTENCES - count),
        ]
        assert [ids[end] for end in batch.ends[row, :count]] == [words.convert_tokens_to_ids(".")] * count


def test_the_training_forward_is_the_models_own(batch: training_data.Batch) -> None:
    """Going through the blocks by hand gives the logits that the model gives."""
    model = train.make_model(4, 32, len(training_data.make_tokenizer()))
    tokens = batch.tokens.long()
    by_hand, states = train.TrainingLosses(model).logits(tokens)
    torch.testing.assert_close(by_hand, model(input_ids=tokens).logits)
    assert len(states) == 5


def test_losses_count_what_they_should(batch: training_data.Batch) -> None:
    """The answer's loss is of the tokens after the question mark alone, and no padding counts."""
    words = training_data.make_tokenizer()
    model = train.make_model(2, 32, len(words))
    losses = train.TrainingLosses(model)
    picked = batch.pick(torch.arange(8))
    found = losses(picked)["answer"]
    logs = torch.log_softmax(model(input_ids=picked.tokens).logits.float(), -1)
    terms = []
    for row, item in enumerate(itertools.islice(problems.stream(2), 8)):
        end = picked.tokens[row].tolist().index(training_data.EOS)
        for position in range(end - len(item.answer), end + 1):
            terms.append(-logs[row, position - 1, picked.tokens[row, position]])
    torch.testing.assert_close(found, torch.stack(terms).mean())


def test_a_short_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps on a CPU write the model, the data and the record, by the command that made the bundled model."""
    small = "--layers 2 --width 32 --steps 3 --batch 8 --examples 40 --tests 6"
    train.main([str(tmp_path / "a"), *small.split(), "--calibrations", "4", "--workers", "1", "--device", "cpu"])
    assert '"n": 6' in capsys.readouterr().out
    made = {str(path.relative_to(tmp_path / "a")) for path in tmp_path.rglob("*") if path.is_file()}
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert made == {f"model/{name}" for name in model} | {"test.jsonl", "calibration.jsonl", "training.json"}
    record = json.loads((tmp_path / "a" / "training.json").read_text("utf-8"))
    assert set(record["exact_match_by_noise"]) == {"0.0", "0.02", "0.05", "0.1"}
    lines = (tmp_path / "a" / "test.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [
        item.prompt for item in problems.held_out(6, train.TEST_SEED)
    ]


def test_training_learns() -> None:
    """On a handful of problems the loss of the answer falls."""
    torch.manual_seed(0)
    model = train.make_model(2, 32, len(training_data.make_tokenizer()))
    data = training_data.training_set(4, frozenset(), workers=1)
    before = train.TrainingLosses(model)(data.pick(torch.arange(4)))["answer"]
    train.fit(model, data, train.Settings(steps=20, batch=4, rate=1e-2, warm_up=5), device="cpu")
    after = train.TrainingLosses(model)(data.pick(torch.arange(4)))["answer"]
    assert after.item() < 0.7 * before.item()
