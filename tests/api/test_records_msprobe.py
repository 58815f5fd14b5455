"""Dumps of msprobe are compared like records, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model

IDS = torch.arange(3, 35).reshape(2, 16)


def dump(model, folder: Path, step: int = 0) -> Path:
    """What msprobe writes at level L0: dump.json, and a .pt file for each tensor."""
    rank = folder / f"step{step}" / "rank0"
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


def test_two_dumps_diverge_at_the_fault(model, tmp_path):
    """The module by its name, the layer by its number, MAPE from whole tensors."""
    good = dump(model, tmp_path / "good")
    with ns.faulty(model, "gain:0.02@1/linear/down_proj"):
        bad = dump(model, tmp_path / "bad")
    found = ns.compare(good, bad, layers=[1], max_mape=0.01)
    assert (found.first.site.place, found.first.site.operator) == (1, "linear")
    assert found.first.site.module == "model.layers.1.mlp.down_proj"
    assert found.passed is False and found.first.mape == pytest.approx(0.02, rel=0.3)
    assert ns.compare(good, good).verdict == "identical"


def test_a_dump_against_a_record(model, tmp_path):
    """Sites meet by operator and module name; what only one side has is counted."""
    good = dump(model, tmp_path / "good")
    record = ns.record(ns.wrap(model), output=tmp_path / "x", prompts=IDS.tolist(), detail="full")
    found = ns.compare(record, good)
    assert found.verdict in ("identical", "round-off") and len(found.sites) > 30
    assert any("sites are compared" in note for note in found.notes)


def rewritten(folder: Path, module: str, **changes) -> None:
    """Other facts about the output of one module in a dump."""
    file = folder / "step0" / "rank0" / "dump.json"
    about = json.loads(file.read_text())
    entry = next(value for name, value in about["data"].items() if name.startswith(f"Module.{module}."))
    entry["output"][0] |= changes
    file.write_text(json.dumps(about))


def test_a_tensor_of_another_shape_does_not_pass(model, tmp_path):
    """Whatever the other tensors say; it is named."""
    good, other = dump(model, tmp_path / "good"), dump(model, tmp_path / "other")
    name = "model.layers.1.self_attn.q_proj"
    file = next((other / "step0" / "rank0" / "dump_tensor_data").glob(f"Module.{name}.*"))
    torch.save(torch.load(file, weights_only=True)[..., :-2], file)
    found = ns.compare(good, other, max_mape=0.05)
    assert found.passed is False and [site.module for site in found.uncompared] == [name]
    assert any("were not compared" in note and name in note for note in found.notes)
    assert ns.compare(good, other, layers=[0], max_mape=0.05).passed is True
    printed = CliRunner().invoke(app, ["compare", str(good), str(other), "--max-mape", "0.05"])
    assert printed.exit_code == 1 and "not passed, 1 sites can't be compared" in printed.output


def test_outputs_that_one_dump_lacks_do_not_pass(model, tmp_path):
    """Whatever the others say: exit code 1, and the words say how many were compared."""
    good, other = dump(model, tmp_path / "good"), dump(model, tmp_path / "other")
    file = other / "step0" / "rank0" / "dump.json"
    about = json.loads(file.read_text())
    lost = [name for name in about["data"] if ".layers.1.mlp." in name and "_proj" in name][:2]
    for name in lost:
        del about["data"][name]
    file.write_text(json.dumps(about))
    for pair in ((good, other), (other, good)):
        printed = CliRunner().invoke(app, ["compare", *map(str, pair), "--max-mape", "0.05"])
        assert printed.exit_code == 1 and "not passed, 2 sites can't be compared" in printed.output
        assert "identical. The sites that could be compared are identical" in printed.output
        assert "sites could be compared: the others are missing on one side" in printed.output
    record = ns.record(ns.wrap(model), output=tmp_path / "x", prompts=IDS.tolist(), detail="full")
    assert ns.compare(record, good, max_mape=0.05).passed is True  # modules that no record has are not missing in it
    assert ns.compare(good, record, max_mape=0.05).passed is True
    assert len(ns.compare(record, other, max_mape=0.05).uncompared) == 2


def test_tokens_in_one_dimension_are_all_compared(tmp_path):
    """A router is given [prompts x tokens, channels]: an error in the last token is seen there, and placed."""
    model = tiny_model("mixtral")
    good, other = dump(model, tmp_path / "good"), dump(model, tmp_path / "other")
    flat = [file for file in (other / "step0" / "rank0" / "dump_tensor_data").iterdir() if ".gate." in file.name]
    tensor = torch.load(flat[0], weights_only=True)
    assert tensor.shape[0] == IDS.numel()
    tensor[-1, 2] += 1
    torch.save(tensor, flat[0])
    (row,) = (row for row in ns.compare(good, other).sites if row.relative_l2)
    assert row.elements == tensor.numel()
    assert (row.where.prompt, row.where.token, row.where.channel) == (1, 15, 2)


def test_steps_are_in_the_order_of_their_numbers(model, tmp_path):
    """Of step9 and step10 the first is step9, and the comparison says which was taken."""
    folder = dump(model, dump(model, tmp_path / "x", step=10), step=9)
    found = ns.compare(folder, folder)
    assert found.sides.a.path == "x/step9/rank0"


def test_another_dtype_gets_no_round_off_verdict(model, tmp_path):
    """Dumps don't tell their model, but they tell the dtype."""
    good, other = dump(model, tmp_path / "good"), dump(model.bfloat16(), tmp_path / "other")
    found = ns.compare(good, other)
    assert (
        found.verdict == "compared"
        and ("The records were computed in different dtypes (float32 and bfloat16)") in found.words
    )


def test_an_output_without_a_file_is_left_out(model, tmp_path):
    """With a note that names it; the rest is compared."""
    good = dump(model, tmp_path / "good")
    rewritten(good, "model.layers.1.mlp.down_proj", data_name=None)
    found = ns.compare(good, good)
    assert all(row.site.module != "model.layers.1.mlp.down_proj" for row in found.sites)
    assert any("1 outputs have no file" in note and "layers.1.mlp.down_proj" in note for note in found.notes)


def test_pickles_are_not_run(model, tmp_path):
    """A file with more than tensors is refused, as are missing and broken ones."""
    good = dump(model, tmp_path / "good")
    files = good / "step0" / "rank0" / "dump_tensor_data"
    first = sorted(files.iterdir())[0]
    first.write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(InvalidInput, match="is not a valid tensor file: UnpicklingError") as refused:
        ns.compare(good, good)
    assert "weights_only" not in str(refused.value)  # torch's advice is to run it
    torch.save({"a": 1}, first)
    with pytest.raises(InvalidInput, match="is not a valid tensor file: it holds a dict"):
        ns.compare(good, good)
    first.unlink()
    with pytest.raises(InvalidInput, match=r"lacks .*\.pt"):
        ns.compare(good, good)
    (good / "step0" / "rank0" / "dump.json").write_text('{"data": ')
    with pytest.raises(InvalidInput, match=r"is not a valid msprobe dump\.json: Expecting value"):
        ns.compare(good, good)
    (good / "step0" / "rank0" / "dump.json").write_text('{"data": {"Module.a.Linear.forward.0": {"output": []}}}')
    with pytest.raises(InvalidInput, match="names no output of a module"):
        ns.compare(good, good)
