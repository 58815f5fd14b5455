"""Records that locators are given: of this model and of tokens it knows, or refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import noisescope as ns
from noisescope.comparison.records import prompts_digest
from noisescope.errors import InvalidInput
from noisescope.localization.inputs import recorded
from noisescope.testing import tiny_model

PROMPTS = [[3, 4, 5, 6], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=3)


@pytest.fixture(scope="module")
def record(model, tmp_path_factory):
    return ns.record(ns.wrap(model), output=tmp_path_factory.mktemp("records") / "good", prompts=PROMPTS)


def test_a_value_and_its_folder_are_the_same(model, record):
    """What `record` returned, its path as a text, and what was written are one record."""
    assert recorded(record, model) is record
    again = recorded(record.path, model)
    assert (again.prompts, again.model, again.sites) == (record.prompts, record.model, record.sites)
    assert np.array_equal(again.logits(), record.logits())


def test_the_record_of_another_model_is_refused(record):
    """Other weights, another architecture, or another dtype: each is reported."""
    with pytest.raises(InvalidInput, match=r"a different model .*weights or config differ"):
        recorded(record, tiny_model("llama", layers=3, seed=1))
    with pytest.raises(InvalidInput, match="a different model"):
        recorded(record, tiny_model("gpt2", layers=3))
    with pytest.raises(InvalidInput, match=r"recorded in float32, but the model here computes in bfloat16"):
        recorded(record, tiny_model("llama", layers=3).to(torch.bfloat16))


def test_tokens_beyond_the_vocabulary_are_refused_before_anything_runs(model, record, tmp_path):
    """In a record that was put together by hand, and in prompts that are to be recorded; no folder is left behind."""
    size = model.config.vocab_size
    for wrong in (size, -1):
        prompts = ((3, 4, 5, 6), (5, 6, 7, wrong))
        about = json.loads((Path(record.path) / "record.json").read_text())
        about |= {"prompts": prompts, "prompts_sha256": prompts_digest(prompts)}
        shutil.copytree(record.path, tmp_path / "forged", dirs_exist_ok=True)
        (tmp_path / "forged" / "record.json").write_text(json.dumps(about))
        for given in (dataclasses.replace(record, prompts=prompts), tmp_path / "forged"):
            with pytest.raises(
                InvalidInput, match=f"token id {wrong}, but LlamaForCausalLM accepts ids 0 to {size - 1}"
            ):
                recorded(given, model)
        with pytest.raises(InvalidInput, match=f"contains token id {wrong}"):
            ns.record(ns.wrap(model), output=tmp_path / "new", prompts=prompts)
    assert not (tmp_path / "new").exists()


def test_what_is_no_record_is_refused(model, record, tmp_path):
    """An array, and folders without a record."""
    with pytest.raises(InvalidInput, match=r"returned by ns\.record or its folder; got ndarray"):
        recorded(record.logits(), model)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="is not a record"):
            recorded(folder, model)
