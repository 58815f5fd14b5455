"""Activations written to a folder, and by the notes' key in a YAML file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import noisescope as ns
from noisescope.api import save_activations
from noisescope.cli import app
from noisescope.errors import InvalidInput

DOWN = "model.layers.1.mlp.down_proj"


def test_every_sample_is_written_once(tmp_path: Path) -> None:
    """By length, unpadded, with its tokens and its number; the values are those a hook of torch sees."""
    subject = ns.load("tiny:llama")
    data = [{"input_ids": torch.arange(3, 27).reshape(4, 6)}, {"input_ids": torch.arange(9, 18).reshape(3, 3)}]
    rows = [row for batch in data for row in batch["input_ids"]]
    folder = save_activations(subject, data, tmp_path / "kept", batch=3)
    index = json.loads((folder / "activations.json").read_text())
    assert [entry["samples"] for entry in index["files"]] == [[4, 5, 6], [0, 1, 2], [3]]
    assert len(index["modules"]) == 4 and DOWN in index["modules"]
    seen = {}
    subject.model.get_submodule(DOWN).register_forward_hook(lambda module, given, output: seen.update(last=output))
    for entry in index["files"]:
        tensors = load_file(folder / entry["file"])
        assert set(tensors) == {*index["modules"], "input_ids", "samples"}
        assert tensors["samples"].tolist() == entry["samples"]
        for at, number in enumerate(entry["samples"]):
            assert torch.equal(tensors["input_ids"][at], rows[number])
            with torch.no_grad():
                subject.model(rows[number][None])
            assert torch.allclose(tensors[DOWN][at], seen["last"][0], atol=1e-6)


def test_patterns_and_a_folder_that_is_done(tmp_path: Path) -> None:
    """Patterns choose modules; an index that is there is left alone, so a resumed run does not begin anew."""
    subject = ns.load("tiny:llama")
    folder = save_activations(subject, [torch.arange(3, 9)[None]], tmp_path, layer_patterns=["gate_proj"])
    assert set(load_file(folder / "0000.safetensors")) == {
        "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj", "input_ids", "samples"
    }  # fmt: skip
    before = (folder / "activations.json").stat().st_mtime_ns
    save_activations(subject, [torch.arange(9)[None]], tmp_path)
    assert (folder / "activations.json").stat().st_mtime_ns == before
    with pytest.raises(InvalidInput, match="are part of no linear's name"):
        save_activations(subject, [torch.arange(9)[None]], tmp_path / "other", layer_patterns=["nowhere"])


def test_save_activations_in_a_file(tmp_path: Path) -> None:
    """`save_activations: true` of the notes' channel section writes them beside the report."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "diagnostic: {enabled: true, mode: channel, model: demo, samples: 4, effort: screen, seeds: 1, "
        f"output: '{tmp_path / 'out'}', channel: {{calibration_samples: 4, save_activations: true}}}}\n"
    )
    result = CliRunner().invoke(app, ["diagnose", "--config", str(config)])
    assert result.exit_code == 0, result.output
    index = json.loads((tmp_path / "out" / "activations" / "activations.json").read_text())
    assert sorted(number for entry in index["files"] for number in entry["samples"]) == [0, 1, 2, 3]
