"""Files of log-probabilities in the shapes that trainers and servers write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisescope.comparison.logprob_files import LogprobFile, read_logprobs
from noisescope.errors import InvalidInput

VALUES = [-0.5, -1.25, -0.01]


def read(tmp_path: Path, *objects: Any, field: str | None = None) -> LogprobFile:
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in objects) + "\n", encoding="utf-8")
    return read_logprobs(file, field=field)


def entries(values: list[float | None], ids: list[int]) -> list[Any]:
    """As vLLM writes them: the token first, and the likeliest one."""
    return [
        None
        if v is None
        else {str(i): {"logprob": v, "rank": 2, "decoded_token": "x"}, "9": {"logprob": -0.1, "rank": 1}}
        for v, i in zip(values, ids, strict=True)
    ]


CONTENT = [{"token": "a", "logprob": value, "top_logprobs": []} for value in VALUES]
NEMO = {"generation_logprobs": [[0.0, *VALUES]], "token_loss_mask": [[0, 1, 1, 1]], "token_ids": [[5, 1, 2, 3]]}
SHAPES: dict[str, tuple[Any, str]] = {
    "chat": ({"choices": [{"logprobs": {"content": CONTENT}}]}, "logprobs.content"),
    "batch": (
        {"custom_id": "r1", "response": {"body": {"choices": [{"logprobs": {"content": CONTENT}}]}}},
        "logprobs.content",
    ),
    "legacy": (
        {"choices": [{"logprobs": {"tokens": ["x", "a", "b", "c"], "token_logprobs": [None, *VALUES]}}]},
        "logprobs.token_logprobs",
    ),
    "vllm prompt": (
        {"prompt_token_ids": [5, 1, 2, 3], "choices": [{"prompt_logprobs": entries([None, *VALUES], [5, 1, 2, 3])}]},
        "prompt_logprobs",
    ),
    "vllm offline": (
        {"request_id": "7", "outputs": [{"token_ids": [1, 2, 3], "logprobs": entries(VALUES, [1, 2, 3])}]},
        "outputs.logprobs",
    ),
    "sglang": ({"meta_info": {"output_token_logprobs": [[v, 4, "x"] for v in VALUES]}}, "output_token_logprobs"),
    "verl": ({"step": 3, "rollout_log_probs": [*VALUES, 0.0], "response_mask": [1, 1, 1, 0]}, "rollout_log_probs"),
    "nemo-rl": ({"idx": 0, **NEMO}, "generation_logprobs"),
    "trl": ({"step": 3, "sampling_per_token_logps": VALUES, "completion_ids": [1, 2, 3]}, "sampling_per_token_logps"),
    "plain": ({"logprobs": VALUES}, "logprobs"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_same_values(name: str, tmp_path: Path) -> None:
    """A leading null, masked tokens and likelier alternatives are not among them."""
    written, where = SHAPES[name]
    found = read(tmp_path, written, written)
    assert found.field == where and len(found.rows) == 2
    for row in found.rows:
        assert row.values.tolist() == VALUES
        assert row.tokens is None or len(row.tokens) == 3


def test_names_steps_and_tokens_are_kept(tmp_path: Path) -> None:
    (row,) = read(tmp_path, SHAPES["batch"][0]).rows
    assert row.key == "r1"
    (row,) = read(tmp_path, {**SHAPES["trl"][0], "sampling_params": {"temperature": 0.7, "top_p": 0.9}}).rows
    assert (row.step, row.tokens, row.temperature, row.top_p) == (3.0, (1, 2, 3), 0.7, 0.9)
    (row,) = read(tmp_path, SHAPES["vllm prompt"][0]).rows
    assert row.tokens == (1, 2, 3)


def test_a_null_in_front_of_one_sequence_is_a_missing_value(tmp_path: Path) -> None:
    """Dropping it would move the others by one."""
    found = read(tmp_path, {"logprobs": [None, -1.0]}, {"logprobs": VALUES}, {"logprobs": VALUES})
    assert [len(row.values) for row in found.rows] == [2, 3, 3] and not found.notes


def test_a_batch_in_one_object_is_several_sequences(tmp_path: Path) -> None:
    found = read(tmp_path, {"old_log_probs": [VALUES, [-1.0, None]], "response_mask": [[1, 1, 1], [1, 1]]})
    assert [len(row.values) for row in found.rows] == [3, 2] and np.isnan(found.rows[1].values[1])


def test_a_field_is_chosen_by_name(tmp_path: Path) -> None:
    one = {"generation_logprobs": VALUES, "prev_logprobs": [-1.0, -1.0, -1.0]}
    assert read(tmp_path, one).field == "generation_logprobs"
    assert read(tmp_path, one, field="prev_logprobs").rows[0].values.tolist() == [-1.0] * 3
    with pytest.raises(InvalidInput, match=r"old_log_probs.*generation_logprobs"):
        read(tmp_path, one, field="old_log_probs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ('{"logprobs": [-1]}\n{oops', "line 2 is not JSON"),
        ("[1, 2]", "each line must be a JSON object"),
        ('{"text": "hello", "score": 1}', "no log-probabilities found.*its keys are text, score"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=words):
        read_logprobs(file)
