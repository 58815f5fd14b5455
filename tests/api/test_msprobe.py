"""Dumps of msprobe are compared like records, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model

IDS = torch.arange(3, 35).reshape(2, 16)


def dump(model, folder: Path) -> Path:
    """What msprobe writes at level L0: dump.json, and a .pt file for each tensor."""
    rank = folder / "step0" / "rank0"
    (rank / "dump_tensor_data").mkdir(parents=True)
    data: dict = {"Functional.relu.0.forward": {"input_args": [], "output": []}}

    def listen(name):
        def hook(module, args, y):
            tensor = y[0] if isinstance(y, tuple) else getattr(y, "logits", getattr(y, "last_hidden_state", y))
            entry = f"Module.{name}.{type(module).__name__}.forward.0"
            file = f"{entry}.output.0.pt"
            torch.save(tensor, rank / "dump_tensor_data" / file)
            about = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "data_name": file}
            data[entry] = {"input_args": [], "input_kwargs": {}, "output": [about], "parameters": {}}

        return hook

    hooks = [module.register_forward_hook(listen(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    about = {"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": str(rank), "data": data}
    (rank / "dump.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def model():
    return tiny_model("llama", layers=3)


def test_two_dumps_part_at_the_fault(model, tmp_path):
    """The module by its name, the layer by its number, MAPE from whole tensors."""
    good = dump(model, tmp_path / "good")
    with ns.faulty(model, "gain:0.02@1/linear/down_proj"):
        bad = dump(model, tmp_path / "bad")
    found = ns.compare(good, bad, layers=[1], max_mape=0.01)
    assert (found.first.site.place, found.first.site.operator) == (1, "linear")
    assert found.first.site.module == "model.layers.1.mlp.down_proj"
    assert found.passed is False and found.first.measures.mape == pytest.approx(0.02, rel=0.3)
    assert ns.compare(good, good).verdict == "identical"


def test_a_dump_against_a_record(model, tmp_path):
    """Sites meet by operator and module name; what only one side has is counted."""
    good = dump(model, tmp_path / "good")
    record = ns.record(ns.wrap(model), output=tmp_path / "x", prompts=IDS.tolist(), detail="full")
    found = ns.compare(record, good)
    assert found.verdict in ("identical", "round-off") and len(found.rows) > 30
    assert any("sites are compared" in note for note in found.notes)


def test_pickles_are_not_run(model, tmp_path):
    """A file with more than tensors is refused, as are missing and broken ones."""
    good = dump(model, tmp_path / "good")
    files = good / "step0" / "rank0" / "dump_tensor_data"
    first = sorted(files.iterdir())[0]
    first.write_bytes(pickle.dumps(print))
    with pytest.raises(InvalidInput, match="can't be read as a tensor alone"):
        ns.compare(good, good)
    torch.save({"a": 1}, first)
    with pytest.raises(InvalidInput, match="holds a dict, not a tensor"):
        ns.compare(good, good)
    first.unlink()
    with pytest.raises(InvalidInput, match=r"lacks .*\.pt"):
        ns.compare(good, good)
    (good / "step0" / "rank0" / "dump.json").write_text('{"data": ')
    with pytest.raises(InvalidInput, match="truncated or no JSON"):
        ns.compare(good, good)
    (good / "step0" / "rank0" / "dump.json").write_text('{"data": {"Module.a.Linear.forward.0": {"output": []}}}')
    with pytest.raises(InvalidInput, match="names no output of a module"):
        ns.compare(good, good)
