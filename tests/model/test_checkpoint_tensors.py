"""The tensors of a checkpoint by their names in the model: as transformers itself loads them, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.model.test_loading import write_gguf

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.model.checkpoint_tensors import stored_tensors
from noisescope.testing import tiny_model


def read(model: Any, source: Path) -> dict[str, torch.Tensor]:
    return dict(stored_tensors(model, str(source), None, model.state_dict()))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "bert", "t5"])
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_each_tensor_has_its_name_in_the_model(name: str, shards: str, tmp_path: Path) -> None:
    """Experts are stored one by one and merged on loading; tied weights are stored once."""
    model: Any = tiny_model(name, biases=0.1)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    found = read(model, tmp_path)
    held = model.state_dict()
    assert all(torch.equal(held[key], tensor) for key, tensor in found.items())
    assert {held[key].data_ptr() for key in found} == {tensor.data_ptr() for tensor in held.values()}


def test_a_body_without_its_head_and_the_reverse(tmp_path: Path) -> None:
    whole: Any = tiny_model("llama")
    whole.save_pretrained(tmp_path / "whole")
    body = transformers.LlamaModel.from_pretrained(tmp_path / "whole")
    assert read(body, tmp_path / "whole").keys() == body.state_dict().keys()
    body.save_pretrained(tmp_path / "body")
    assert read(whole, tmp_path / "body").keys() == whole.state_dict().keys() - {"lm_head.weight"}


def test_gguf_is_dequantised_as_on_loading(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tokenizer=False)
    model: Any = ns.load(path).model
    found = read(model, path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in found.items())


def test_what_is_not_read(tmp_path: Path) -> None:
    """Pickles, and folders of which a shard is missing."""
    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(InvalidInput, match="pickle"):
        read(model, tmp_path / "weights.pt")
    sorted(tmp_path.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(InvalidInput, match="is not in"):
        read(model, tmp_path)
